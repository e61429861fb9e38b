#include "evenkeel/tools/bench/mpi_ranks.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/runtime/base/status_macros.h"

extern char** environ;

namespace evenkeel::bench {
namespace {

constexpr int kPatienceMs = 30'000;

// The program that the ranks run lies beside this one.
std::string RankProgram() {
  std::error_code ignored;
  return (std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path() / "comm_mpi").string();
}

bool Readable(int fd, int milliseconds) {
  pollfd one = {.fd = fd, .events = POLLIN, .revents = 0};
  return poll(&one, 1, milliseconds) == 1;
}

bool ReadAll(int fd, void* data, size_t bytes) {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    if (!Readable(fd, kPatienceMs)) return false;
    const ssize_t n = read(fd, to, bytes);
    if (n <= 0) return false;
    to += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

class Impl final : public MpiRanks {
 public:
  explicit Impl(int ranks) : sockets_(ranks, -1) {}

  ~Impl() override {
    for (const int socket : sockets_) {
      if (socket >= 0) close(socket);
    }
    if (listener_ >= 0) close(listener_);
    AwaitLauncher();
  }

  absl::Status Start() {
    // A socket without a file, under a name that the kernel chooses: nothing is left behind, however this process ends.
    listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    socklen_t bytes = sizeof(sa_family_t);
    if (listener_ < 0 || bind(listener_, reinterpret_cast<sockaddr*>(&address), bytes) != 0 ||
        listen(listener_, static_cast<int>(sockets_.size())) != 0) {
      return absl::UnavailableError("no socket for the MPI ranks");
    }
    bytes = sizeof(address);
    if (getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) {
      return absl::UnavailableError("the socket for the MPI ranks has no name");
    }
    constexpr size_t kNameAt = offsetof(sockaddr_un, sun_path) + 1;
    EK_RETURN_IF_ERROR(Launch(std::string(address.sun_path + 1, bytes - kNameAt)));
    for (size_t i = 0; i < sockets_.size(); ++i) EK_RETURN_IF_ERROR(AcceptRank());
    return absl::OkStatus();
  }

  absl::StatusOr<double> Run(Kind kind, Op op, int64_t bytes, int64_t calls) override {
    const WindowOrder order = {kind, op, bytes, calls};
    for (const int socket : sockets_) {
      if (send(socket, &order, sizeof(order), MSG_NOSIGNAL) != sizeof(order)) return Ended();
    }
    double seconds = 0;
    if (!ReadAll(sockets_[0], &seconds, sizeof(seconds))) return Ended();
    return seconds;
  }

 private:
  absl::Status Ended() const {
    return absl::UnavailableError(absl::StrCat("the job of ", sockets_.size(), " MPI ranks has ended or is stuck"));
  }

  absl::Status Launch(const std::string& name) {
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    setenv("OMPI_MCA_plm", "isolated", 0);  // one host: no remote shell needed
    setenv("OMPI_MCA_pml", "ob1", 0);
    std::vector<std::string> words = {
        FindMpirun(), "--oversubscribe", "-n", absl::StrCat(sockets_.size()), RankProgram(), name};
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&files, 2, 1);  // stdout is the benchmark's own
    const int error = posix_spawn(&launcher_, argv[0], &files, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    if (error == 0) return absl::OkStatus();
    launcher_ = -1;
    return absl::UnavailableError(absl::StrCat("cannot start ", words[0], ": ", std::strerror(error)));
  }

  absl::Status AcceptRank() {
    for (int waited = 0; !Readable(listener_, 100); waited += 100) {
      if (waited >= kPatienceMs || waitpid(launcher_, nullptr, WNOHANG) != 0) return Ended();
    }
    const int connection = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    int32_t rank = -1;
    if (connection < 0 || !ReadAll(connection, &rank, sizeof(rank)) || rank < 0 ||
        rank >= static_cast<int>(sockets_.size()) || sockets_[rank] >= 0) {
      if (connection >= 0) close(connection);
      return Ended();
    }
    sockets_[rank] = connection;
    return absl::OkStatus();
  }

  // The ranks end when their sockets are closed.
  void AwaitLauncher() const {
    if (launcher_ <= 0) return;
    for (int i = 0; i < 100; ++i) {
      if (waitpid(launcher_, nullptr, WNOHANG) != 0) return;
      absl::SleepFor(absl::Milliseconds(100));
    }
    kill(launcher_, SIGTERM);
    waitpid(launcher_, nullptr, 0);
  }

  std::vector<int> sockets_;  // by rank
  int listener_ = -1;
  pid_t launcher_ = -1;
};

}  // namespace

std::string FindMpirun() {
  const char* path = getenv("PATH");
  for (const absl::string_view folder : absl::StrSplit(path == nullptr ? "/usr/bin" : path, ':')) {
    const std::string program = absl::StrCat(folder, "/mpirun");
    if (access(program.c_str(), X_OK) == 0) return program;
  }
  return "";
}

absl::StatusOr<std::unique_ptr<MpiRanks>> MpiRanks::Start(int ranks) {
  auto job = std::make_unique<Impl>(ranks);
  EK_RETURN_IF_ERROR(job->Start());
  return job;
}

}  // namespace evenkeel::bench
