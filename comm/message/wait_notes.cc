#include "evenkeel/comm/message/wait_notes.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace evenkeel::comm {
namespace {

constexpr size_t kMaxNotes = 12;
constexpr size_t kMaxWaitsFor = 8;
constexpr size_t kMaxText = 160;
static_assert(kMaxNotes * (12 + 4 * kMaxWaitsFor + kMaxText) < kEagerMessageBytes - 256);

void AppendInt(size_t value, std::string* bytes) {
  const auto number = static_cast<uint32_t>(value);
  bytes->append(reinterpret_cast<const char*>(&number), sizeof(number));
}

bool TakeInt(absl::string_view* bytes, uint32_t limit, uint32_t* value) {
  if (bytes->size() < sizeof(*value)) return false;
  std::memcpy(value, bytes->data(), sizeof(*value));
  bytes->remove_prefix(sizeof(*value));
  return *value <= limit;
}

void AppendNote(const WaitNote& note, std::string* bytes) {
  const size_t num_waits = std::min(note.waits_for.size(), kMaxWaitsFor);
  AppendInt(static_cast<size_t>(note.rank), bytes);
  AppendInt(num_waits, bytes);
  for (size_t i = 0; i < num_waits; ++i) AppendInt(static_cast<size_t>(note.waits_for[i]), bytes);
  const std::string text = note.text.substr(0, kMaxText);
  AppendInt(text.size(), bytes);
  bytes->append(text);
}

bool TakeNote(absl::string_view* bytes, int world_size, WaitNote* note) {
  const auto last_rank = static_cast<uint32_t>(world_size - 1);
  uint32_t rank = 0, num_waits = 0, length = 0;
  if (!TakeInt(bytes, last_rank, &rank) || !TakeInt(bytes, kMaxWaitsFor, &num_waits)) return false;
  note->rank = static_cast<int>(rank);
  for (uint32_t i = 0; i < num_waits; ++i) {
    if (!TakeInt(bytes, last_rank, &rank)) return false;
    note->waits_for.push_back(static_cast<int>(rank));
  }
  if (!TakeInt(bytes, kMaxText, &length) || bytes->size() < length) return false;
  note->text.assign(bytes->data(), length);
  bytes->remove_prefix(length);
  return true;
}

// Depth first along the waits: the path from the rank that comes again.
bool FindCycle(int rank, const WaitNotes& notes, std::set<int>* seen, std::vector<int>* path) {
  const auto again = std::find(path->begin(), path->end(), rank);
  if (again != path->end()) {
    path->erase(path->begin(), again);
    return true;
  }
  const auto note = notes.find(rank);
  if (note == notes.end() || !seen->insert(rank).second) return false;
  path->push_back(rank);
  for (const int next : note->second.waits_for) {
    if (FindCycle(next, notes, seen, path)) return true;
  }
  path->pop_back();
  return false;
}

}  // namespace

std::string EncodeWaitNotes(const WaitNotes& notes, int first) {
  std::string bytes;
  size_t room = kMaxNotes;
  if (const auto own = notes.find(first); own != notes.end()) {
    AppendNote(own->second, &bytes);
    --room;
  }
  for (const auto& [rank, note] : notes) {
    if (rank == first || room == 0) continue;
    AppendNote(note, &bytes);
    --room;
  }
  return bytes;
}

std::optional<WaitNotes> DecodeWaitNotes(absl::string_view bytes, int world_size) {
  WaitNotes notes;
  while (!bytes.empty()) {
    WaitNote note;
    if (notes.size() == kMaxNotes || !TakeNote(&bytes, world_size, &note)) return std::nullopt;
    notes[note.rank] = note;
  }
  return notes;
}

WaitNotes KnownWaits(Mailroom& mailroom, int rank, int world_size) {
  WaitNotes known;
  for (const auto& [peer, body] : mailroom.WaitNotes()) {
    const std::optional<WaitNotes> told = DecodeWaitNotes(body, world_size);
    if (!told.has_value()) continue;
    for (const auto& [waiting, note] : *told) {
      if (waiting == rank) continue;
      // A rank knows its own wait better than others do.
      if (waiting == peer) {
        known[waiting] = note;
      } else {
        known.emplace(waiting, note);
      }
    }
  }
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer == rank || known.count(peer) != 0 || !mailroom.PeekProposal(peer).has_value()) continue;
    known[peer] = {.rank = peer, .waits_for = {rank}, .text = "waits in create_group"};
  }
  return known;
}

std::string DescribeWaitOf(int rank, const WaitNotes& notes) {
  const auto note = notes.find(rank);
  if (note == notes.end()) return "";
  return absl::StrCat("; it ", note->second.text,
                      note->second.waits_for.size() == 1 ? " for world rank " : " for world ranks ",
                      absl::StrJoin(note->second.waits_for, ","));
}

std::string DescribeCycle(int start, const WaitNotes& notes) {
  std::vector<int> path;
  std::set<int> seen;
  if (!FindCycle(start, notes, &seen, &path)) return "";
  std::string text;
  for (size_t i = 0; i < path.size(); ++i) {
    absl::StrAppend(&text, i == 0 ? ", they wait for each other: " : ", ", "world rank ", path[i], " ",
                    notes.at(path[i]).text, " for world rank ", path[(i + 1) % path.size()]);
  }
  return text;
}

}  // namespace evenkeel::comm
