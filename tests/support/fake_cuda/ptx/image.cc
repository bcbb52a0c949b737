#include "tests/support/fake_cuda/ptx/image.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace kvpool::fake::ptx {
namespace {

// The layout is not documented; these are the fields that nvcc 13 writes.
struct FatBinary {
  uint32_t magic;
  uint16_t version, header_bytes;
  uint64_t bytes;  // all entries together
};
struct Entry {
  uint16_t kind, version;
  uint32_t header_bytes;
  uint64_t bytes;             // the padded payload's
  uint32_t compressed_bytes;  // 0: it is not compressed
  uint32_t other[9];
  uint64_t uncompressed_bytes;
};
static_assert(offsetof(Entry, uncompressed_bytes) == 56);
constexpr uint32_t kMagic = 0xba55ed50;
constexpr uint16_t kPtx = 1;
constexpr unsigned char kZstdMagic[] = {0x28, 0xb5, 0x2f, 0xfd};

// Debian's dpkg needs this library, so every Debian has it; its headers are in a package that not every machine has.
size_t DecompressZstd(void* to, size_t to_bytes, const void* from, size_t bytes) {
  using Decompress = size_t(void*, size_t, const void*, size_t);
  static auto* const decompress = [] {
    void* library = ::dlopen("libzstd.so.1", RTLD_NOW);
    if (library == nullptr) Die(::dlerror());
    return reinterpret_cast<Decompress*>(::dlsym(library, "ZSTD_decompress"));
  }();
  return decompress(to, to_bytes, from, bytes);
}

}  // namespace

void Die(const std::string& why) {
  std::fprintf(stderr, "fake libcuda: %s\n", why.c_str());
  std::abort();
}

std::string TextOf(const void* fat_binary) {
  FatBinary header;
  std::memcpy(&header, fat_binary, sizeof header);
  if (header.magic != kMagic) Die("a module is no fat binary");
  const auto* at = static_cast<const unsigned char*>(fat_binary) + header.header_bytes;
  const auto* const end = at + header.bytes;
  Entry entry;
  for (; at < end; at += entry.header_bytes + entry.bytes) {
    std::memcpy(&entry, at, sizeof entry);
    if (entry.kind != kPtx) continue;
    const unsigned char* const payload = at + entry.header_bytes;
    std::string text(reinterpret_cast<const char*>(payload), entry.bytes);
    if (entry.compressed_bytes != 0) {
      if (!std::equal(std::begin(kZstdMagic), std::end(kZstdMagic), payload)) {
        Die("the PTX of a fat binary is compressed by something other than zstd");
      }
      text.resize(entry.uncompressed_bytes);
      if (DecompressZstd(text.data(), text.size(), payload, entry.compressed_bytes) != text.size()) {
        Die("the PTX of a fat binary can't be decompressed");
      }
    }
    std::erase(text, '\0');
    return text;
  }
  Die("a fat binary has no PTX: a GPU that is newer than its machine code could not run it");
}

}  // namespace kvpool::fake::ptx
