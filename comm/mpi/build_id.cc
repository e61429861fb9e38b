#include "evenkeel/comm/mpi/build_id.h"

#include <elf.h>
#include <link.h>

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <vector>

#include "evenkeel/runtime/base/digest.h"

namespace evenkeel::comm {
namespace {

uint64_t DigestOfNotes(const char* note, size_t bytes) {
  while (bytes >= sizeof(ElfW(Nhdr))) {
    ElfW(Nhdr) header;
    std::memcpy(&header, note, sizeof(header));
    const size_t name = (header.n_namesz + 3) / 4 * 4, text = (header.n_descsz + 3) / 4 * 4;
    if (sizeof(header) + name + text > bytes) return 0;
    if (header.n_type == NT_GNU_BUILD_ID && header.n_namesz == 4 && std::memcmp(note + sizeof(header), "GNU", 4) == 0) {
      return Digest64(note + sizeof(header) + name, header.n_descsz);
    }
    note += sizeof(header) + name + text;
    bytes -= sizeof(header) + name + text;
  }
  return 0;
}

// The first object that is visited is the program.
int VisitProgram(dl_phdr_info* info, size_t, void* result) {
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_NOTE) continue;
    const auto* note = reinterpret_cast<const char*>(info->dlpi_addr + segment.p_vaddr);
    const uint64_t digest = DigestOfNotes(note, segment.p_memsz);
    if (digest != 0) *static_cast<uint64_t*>(result) = digest;
  }
  return 1;
}

uint64_t DigestOfProgramFile() {
  FILE* file = std::fopen("/proc/self/exe", "re");
  if (file == nullptr) return 0;
  uint64_t digest = 1;
  std::vector<char> block(1 << 20);
  for (size_t bytes; (bytes = std::fread(block.data(), 1, block.size(), file)) > 0;) {
    digest = CombineDigests(digest, Digest64(block.data(), bytes));
  }
  std::fclose(file);
  return digest;
}

}  // namespace

uint64_t RunningBuildDigest() {
  uint64_t digest = 0;
  dl_iterate_phdr(VisitProgram, &digest);
  return digest != 0 ? digest : DigestOfProgramFile();
}

}  // namespace evenkeel::comm
