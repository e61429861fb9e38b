// Whether other processes of this host still live: through file descriptors of processes, which cannot be mistaken for
// a later process with the same number.
//
//   ProcessWatch watch(world_size);
//   watch.Add(peer, identity_of_peer);      // what the peer got from ProcessIdentity::Self()
//   if (watch.IsDead(peer)) ...
//
// Works for processes of the same host and the same process namespace, on Linux 5.3 and later; all others are unknown,
// and a deadline is what finds them.
#ifndef EVENKEEL_COMM_MPI_PROCESS_WATCH_H_
#define EVENKEEL_COMM_MPI_PROCESS_WATCH_H_

#include <cstdint>
#include <string>
#include <vector>

namespace evenkeel::comm {

// Plain bytes: travels between ranks.
struct ProcessIdentity {
  uint64_t host = 0;           // digest of host name and boot
  uint64_t pid_namespace = 0;  // 0: unknown
  int64_t pid = 0;
  char host_name[40] = {};

  static ProcessIdentity Self();
};

// Thread-safe after all Add calls.
class ProcessWatch {
 public:
  explicit ProcessWatch(int world_size) : peers_(world_size) {}
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;

  void Add(int peer, const ProcessIdentity& identity);
  // False also when it cannot be known.
  bool IsDead(int peer) const;
  bool CanKnow(int peer) const { return peers_[peer].descriptor >= 0 || peers_[peer].never_lived; }
  // "process 4711 on node7 is stopped".
  std::string Describe(int peer) const;

 private:
  struct Peer {
    ProcessIdentity identity;
    bool same_host = false;
    bool never_lived = false;  // had ended before it was watched
    int descriptor = -1;
  };
  std::vector<Peer> peers_;
};

}  // namespace evenkeel::comm

#endif  // EVENKEEL_COMM_MPI_PROCESS_WATCH_H_
