// A main for fuzz targets where libFuzzer is not linked: runs the target on generated inputs (the same in every run),
// or on the files that are named, such as a crash that libFuzzer found.
//
//   target [-runs=N] [-max_len=BYTES] [FILE...]
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

// SplitMix64.
uint64_t Next(uint64_t* state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Random bytes, with runs of the bytes that boundaries are made of.
std::vector<uint8_t> Generate(uint64_t run, size_t max_len) {
  constexpr uint8_t kBoundary[] = {0x00, 0xff, 0x7f, 0x80, 0x01};
  uint64_t state = run;
  std::vector<uint8_t> bytes(Next(&state) % (max_len + 1));
  const uint64_t style = Next(&state) % 4;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const bool boundary = style == 1 || (style == 2 && Next(&state) % 4 == 0);
    bytes[i] = boundary ? kBoundary[Next(&state) % 5] : static_cast<uint8_t>(Next(&state));
  }
  return bytes;
}

bool RunFile(const char* path) {
  std::FILE* file = std::fopen(path, "rb");
  if (file == nullptr) {
    std::fprintf(stderr, "cannot open %s\n", path);
    return false;
  }
  std::vector<uint8_t> bytes;
  for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) bytes.push_back(static_cast<uint8_t>(c));
  std::fclose(file);
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t runs = 1000;
  uint64_t max_len = 512;
  int files = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "-runs=", 6) == 0) {
      runs = std::strtoull(argv[i] + 6, nullptr, 10);
    } else if (std::strncmp(argv[i], "-max_len=", 9) == 0) {
      max_len = std::strtoull(argv[i] + 9, nullptr, 10);
    } else {
      if (!RunFile(argv[i])) return 2;
      ++files;
    }
  }
  for (uint64_t run = 0; files == 0 && run < runs; ++run) {
    const std::vector<uint8_t> bytes = Generate(run, max_len);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  return 0;
}
