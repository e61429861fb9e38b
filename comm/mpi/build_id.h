// Which build the running program is.
#ifndef EVENKEEL_COMM_MPI_BUILD_ID_H_
#define EVENKEEL_COMM_MPI_BUILD_ID_H_

#include <cstdint>

namespace evenkeel::comm {

// A digest of the build id that the linker wrote into the running program; without one, of the program file itself.
// Equal for processes that run the same file.
uint64_t RunningBuildDigest();

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MPI_BUILD_ID_H_
