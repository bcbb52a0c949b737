#include <cstdio>
#include <cstring>
#include <string>

#include "client/layouts.h"
#include "client/live_sequence.h"
#include "client/session.h"

// Generates 1,000 tokens with a budget of 256: for each block that fills, the daemon drops the one that matters least.
absl::Status Generate(const kvpool::SessionOptions& options) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  auto session = kvpool::Session::Open(options);
  if (!session.ok()) return session.status();
  kvpool::LiveSequence sequence(session->get());
  kvpool::v1::Prune prune;  // PagedEviction, unless prune.mutable_policy() says otherwise.
  prune.set_budget_tokens(256);
  // By the newest queries the daemon measures what is lost (kvpoold --guard-share), whatever the policy needs: of each layer one
  // query and its two heads here.
  kvpool::v1::QueryWindow* const window = prune.mutable_signals()->mutable_window();
  window->set_queries(1);
  window->set_q_heads(2);
  window->mutable_data()->set_inlined(std::string(size_t{4} * 1 * 2 * 64 * sizeof(uint16_t), 60));
  for (uint32_t token = 0; token < 1000; ++token) {
    if (sequence.room() == 0) {
      auto block = (*session)->LeaseWithin(1, deadline);
      if (!block.ok()) return block.status();
      std::memset((*session)->data((*block)[0]), 56 + token / 16 % 8,
                  options.layout.block_bytes());  // The model writes K and V.
      if (auto status = sequence.Append(*std::move(block)); !status.ok()) return status;
    }
    if (auto status = sequence.Extend({&token, 1}); !status.ok()) return status;
    if (sequence.room() > 0) continue;
    auto pruned = sequence.Prune(prune, deadline);
    if (!pruned.ok()) return pruned.status();
  }
  std::printf("%u of 1000 tokens are resident, in %zu blocks\n", sequence.tokens(), sequence.blocks().size());
  return absl::OkStatus();
}

int main() {
  kvpool::SessionOptions options;
  options.layout = kvpool::PagedLayout({.layers = 4, .kv_heads = 2, .head_dim = 64});
  options.fingerprint.set_digest("my-model-v1");
  const absl::Status generated = Generate(options);
  if (!generated.ok()) std::fprintf(stderr, "%s\n", generated.ToString().c_str());
  return generated.ok() ? 0 : 1;
}
