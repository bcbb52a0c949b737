// Serves one prompt. Run it twice: the second run finds what the first one computed.
#include <cstdio>
#include <cstring>

#include "client/layouts.h"
#include "client/prefix_hasher.h"
#include "client/session.h"

int main() {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  kvpool::SessionOptions options;
  options.layout = kvpool::PagedLayout({.layers = 4, .kv_heads = 2, .head_dim = 64});
  options.fingerprint.set_digest("my-model-v1");  // Engines that say the same share prefixes.
  // value() of an error ends the program with the daemon's words.
  const auto session = kvpool::Session::Open(options).value();

  const std::vector<uint32_t> prompt(1024, 7);  // token ids
  const auto keys = kvpool::PrefixHasher(session->hash_seed()).Chain(prompt, 16);
  const auto hit = session->Match(kvpool::KeyBytes(keys)).value().Wait(deadline).value();
  const size_t cached = hit.groups[0].size();
  std::printf("%zu of %zu blocks were cached\n", cached, keys.size());
  if (cached == keys.size()) return 0;

  const auto blocks = session->LeaseWithin(keys.size() - cached, deadline).value();
  for (const kvpool::BlockRef block : blocks.refs()) {  // The model writes K and V in place.
    std::memset(session->data(block), 7, options.layout.block_bytes());
  }
  const auto computed = absl::MakeSpan(keys).subspan(cached);
  const auto parent = absl::MakeSpan(keys).first(cached).last(cached > 0 ? 1 : 0);
  const auto sealed = session->Seal(
      {.blocks = blocks.refs(), .keys = kvpool::KeyBytes(computed), .parent_key = kvpool::KeyBytes(parent)});
  return sealed.ok() ? 0 : 1;
}
