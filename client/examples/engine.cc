#include <cstdio>
#include <cstring>

#include "client/layouts.h"
#include "client/prefix_hasher.h"
#include "client/session.h"

// Serves one prompt. Run it twice: the second run finds what the first one computed.
absl::Status Serve(const kvpool::SessionOptions& options) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  auto session = kvpool::Session::Open(options);
  if (!session.ok()) return session.status();
  std::vector<uint32_t> prompt(1024);  // Token ids.
  for (uint32_t i = 0; i < prompt.size(); ++i) prompt[i] = i;
  const auto keys = kvpool::PrefixHasher((*session)->hash_seed()).Chain(prompt, 16);
  auto pending = (*session)->Match(kvpool::KeyBytes(keys));
  if (!pending.ok()) return pending.status();
  auto hit = pending->Wait(deadline);
  if (!hit.ok()) return hit.status();
  const uint32_t cached = hit->groups[0].size(), missing = keys.size() - cached;
  std::printf("%u of %zu blocks were cached\n", cached, keys.size());
  if (missing == 0) return absl::OkStatus();
  auto blocks = (*session)->LeaseWithin(missing, deadline);
  if (!blocks.ok()) return blocks.status();
  for (kvpool::BlockRef block : blocks->refs()) {  // The model writes K and V in place.
    std::memset((*session)->data(block), 7, options.layout.block_bytes());
  }
  return (*session)
      ->Seal({.blocks = blocks->refs(),
              .keys = kvpool::KeyBytes(keys).substr(cached * sizeof(kvpool::PrefixKey)),
              .parent_key = cached == 0 ? "" : kvpool::KeyBytes({&keys[cached - 1], 1})})
      .status();
}

int main() {
  kvpool::SessionOptions options;
  options.layout = kvpool::PagedLayout({.layers = 4, .kv_heads = 2, .head_dim = 64});
  options.fingerprint.set_digest("my-model-v1");  // Engines that say the same share prefixes.
  const absl::Status served = Serve(options);
  if (!served.ok()) std::fprintf(stderr, "%s\n", served.ToString().c_str());
  return served.ok() ? 0 : 1;
}
