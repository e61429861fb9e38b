// This workspace's own header, named as one of Evenkeel's.
#ifndef STRANGER_RUNTIME_BASE_PHILOX_H_
#define STRANGER_RUNTIME_BASE_PHILOX_H_

namespace stranger {

inline constexpr int kOwnSeed = 7;

}  // namespace stranger

#endif  // STRANGER_RUNTIME_BASE_PHILOX_H_
