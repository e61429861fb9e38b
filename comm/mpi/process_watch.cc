#include "evenkeel/comm/mpi/process_watch.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "evenkeel/runtime/base/digest.h"

namespace evenkeel::comm {
namespace {

std::string ReadSmallFile(const std::string& path) {
  std::string text(512, '\0');
  FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return "";
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  return text;
}

// The state letter of /proc/PID/stat, which follows the name in parentheses; 0 when it cannot be read.
char StateOf(int64_t pid) {
  const std::string stat = ReadSmallFile(absl::StrCat("/proc/", pid, "/stat"));
  const size_t end = stat.rfind(')');
  return end == std::string::npos || end + 2 >= stat.size() ? '\0' : stat[end + 2];
}

}  // namespace

ProcessIdentity ProcessIdentity::Self() {
  ProcessIdentity self;
  self.pid = getpid();
  (void)gethostname(self.host_name, sizeof(self.host_name) - 1);
  self.host = Digest64(absl::StrCat(self.host_name, ReadSmallFile("/proc/sys/kernel/random/boot_id")));
  struct stat status;
  if (stat("/proc/self/ns/pid", &status) == 0) self.pid_namespace = status.st_ino;
  return self;
}

ProcessWatch::~ProcessWatch() {
  for (const Peer& peer : peers_) {
    if (peer.descriptor >= 0) close(peer.descriptor);
  }
}

void ProcessWatch::Add(int index, const ProcessIdentity& identity) {
  Peer& peer = peers_[index];
  peer.identity = identity;
  peer.identity.host_name[sizeof(identity.host_name) - 1] = '\0';
  const ProcessIdentity self = ProcessIdentity::Self();
  peer.same_host =
      identity.host == self.host && identity.pid_namespace == self.pid_namespace && self.pid_namespace != 0;
  if (!peer.same_host) return;
#ifdef SYS_pidfd_open
  peer.descriptor = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(identity.pid), 0));
  peer.never_lived = peer.descriptor < 0 && errno == ESRCH;
#endif
}

bool ProcessWatch::IsDead(int index) const {
  const Peer& peer = peers_[index];
  if (peer.never_lived) return true;
  if (peer.descriptor < 0) return false;
  pollfd ended = {.fd = peer.descriptor, .events = POLLIN, .revents = 0};
  return poll(&ended, 1, 0) > 0 && (ended.revents & POLLIN) != 0;
}

std::string ProcessWatch::Describe(int index) const {
  const Peer& peer = peers_[index];
  const std::string name = absl::StrCat("process ", peer.identity.pid, " on ", peer.identity.host_name);
  if (IsDead(index)) return absl::StrCat(name, " is dead");
  if (!peer.same_host) return absl::StrCat(name, " cannot be watched from here");
  const char state = StateOf(peer.identity.pid);
  if (state == 'T' || state == 't') return absl::StrCat(name, " is stopped");
  return absl::StrCat(name, " is alive");
}

}  // namespace evenkeel::comm
