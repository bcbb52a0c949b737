// --verify=seal: sums of what was sealed, and a sample of all that has one.
#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"
#include "server/base/log.h"
#include "server/daemon/daemon.h"
#include "server/daemon/registry.h"
#include "server/space/content_checks.h"
#include "server/space/space.h"

namespace kvpool {
namespace {

// So many parts of what was sealed in one space a round sums: others, and the sample, have their turn.
constexpr int kMostParts = 16;
// So often a round looks for what has a sum, in one space.
constexpr int kMostLooks = 16;
// So often it looks for what is doubted: all of a million blocks.
constexpr int kMostDoubtLooks = 1024;

// Answers how many bytes were read.
template <typename Choose>
uint64_t CheckPart(Space* space, CheckedWhen when, Choose choose) {
  ContentChecks::Part part;
  const ContentChecks* checks = nullptr;
  {
    SpaceLock lock(*space);
    choose(&space->state.checks, &part);
    checks = &space->state.checks;
    space->LookWhetherItDoubts();
  }
  checks->Sum(&part);
  space->GiveWay();
  if (part.empty()) return 0;
  SpaceLock lock(*space);
  space->state.checks.Settle(when, part);
  space->LookWhetherItDoubts();
  return part.size() * checks->block_bytes();
}

}  // namespace

void Daemon::VerifyOnce(uint64_t elapsed_ms) {
  const std::vector<std::shared_ptr<Space>> spaces = registry_->Spaces();
  uint64_t most = options_.verify_sample_bytes;
  for (const std::shared_ptr<Space>& space : spaces) {
    const auto sealed = [](ContentChecks* checks, ContentChecks::Part* part) { checks->ChooseSealed(part); };
    int parts = 0;
    while (!stopping_ && parts++ < kMostParts && CheckPart(space.get(), CheckedWhen::kSeal, sealed) > 0) {
    }
    // As long as something is doubted, matches read what blocks hold.
    const auto doubted = [](ContentChecks* checks, ContentChecks::Part* part) {
      checks->ChooseDoubted(part);
    };
    parts = 0;
    for (int look = 0; look < kMostDoubtLooks && parts < kMostParts && space->may_doubt() && !stopping_;
         ++look)
      parts += CheckPart(space.get(), CheckedWhen::kRestart, doubted) > 0;
    most = std::max<uint64_t>(most, space->facts.layout.block_bytes() * space->facts.devices.size());
  }
  // What is left over is a second's, or a block's that is larger.
  sample_bytes_ = std::min(sample_bytes_ + options_.verify_sample_bytes * elapsed_ms / 1000, most);
  ++sample_rounds_;
  for (size_t i = 0; i < spaces.size(); ++i) {
    Space* const space = spaces[(sample_rounds_ + i) % spaces.size()].get();
    const auto sample = [this](ContentChecks* checks, ContentChecks::Part* part) {
      checks->ChooseSample(sample_bytes_, part);
    };
    const uint64_t block_bytes = space->facts.layout.block_bytes() * space->facts.devices.size();
    for (int look = 0; look < kMostLooks && !stopping_ && sample_bytes_ >= block_bytes; ++look)
      sample_bytes_ -= CheckPart(space, CheckedWhen::kSample, sample);
  }
  for (const std::shared_ptr<Space>& space : spaces) {
    std::vector<BlockRef> condemned;
    std::optional<ContentChecks::Wrong> wrong;
    {
      SpaceLock lock(*space);
      condemned = space->state.checks.NextCondemned();
      wrong = space->state.checks.TakeWrong(space->NowMs());
      space->LookWhetherItDoubts();
    }
    if (!condemned.empty()) EvictFrom(space.get(), EvictReason::kDamaged, &condemned, condemned.size());
    if (!wrong.has_value()) continue;
    const absl::string_view key(reinterpret_cast<const char*>(wrong->key.bytes.data()),
                                wrong->key.bytes.size());
    LogError("block is not what was sealed", {{"space", space->facts.id},
                                              {"block", Index(wrong->ref.id)},
                                              {"key", absl::BytesToHexString(key)},
                                              {"group", static_cast<int>(wrong->key.group)},
                                              {"when", kCheckedWhenNames[static_cast<size_t>(wrong->when)]},
                                              {"more", wrong->more}});
  }
}

}  // namespace kvpool
