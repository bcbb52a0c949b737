// Runs a target in the form that libFuzzer has over random bytes, and over files for a look into one input.
// Usage: TARGET [--random=N] [--seed=N] FILE|FOLDER...
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

size_t RunFile(const std::filesystem::path& path) {
  std::fprintf(stderr, "%s\n", path.c_str());  // The last one before a crash is the one that crashed.
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t random = 0, seed = 1;
  size_t runs = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.starts_with("--random=")) {
      random = std::strtoull(argument.c_str() + 9, nullptr, 10);
    } else if (argument.starts_with("--seed=")) {
      seed = std::strtoull(argument.c_str() + 7, nullptr, 10);
    } else if (std::filesystem::is_directory(argument)) {
      for (const auto& entry : std::filesystem::directory_iterator(argument)) runs += RunFile(entry.path());
    } else {
      runs += RunFile(argument);
    }
  }
  for (uint64_t i = 0; i < random; ++i, ++runs) {
    std::mt19937_64 generator(seed + i);
    std::vector<uint8_t> bytes(generator() % 1000);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(generator());
    if (std::getenv("KVPOOL_FUZZ_VERBOSE") != nullptr) std::fprintf(stderr, "seed %lu\n", seed + i);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%zu inputs\n", runs);
  return runs == 0 ? 1 : 0;
}
