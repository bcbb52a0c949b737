#include "server/daemon/space_terms.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/util/message_differencer.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/support/status_macros.h"
#include "server/base/random_bytes.h"
#include "server/tiers/tier_secret.h"

namespace kvpool {
namespace {

constexpr uint64_t kHostSlabBytes = uint64_t{64} << 20;
constexpr uint64_t kCudaSlabBytes = uint64_t{256} << 20;
constexpr size_t kHashSeedBytes = 32;

uint32_t RanksOf(const v1::OpenSession& request) { return std::max(1u, request.ranks()); }

v1::SpaceKind KindOf(const v1::OpenSession& request) {
  return request.kind() == v1::SPACE_KIND_UNSPECIFIED ? v1::SPACE_KIND_SLABS : request.kind();
}

absl::StatusOr<std::vector<size_t>> PickDevices(const std::vector<std::unique_ptr<Device>>& devices,
                                                const v1::OpenSession& request) {
  const uint32_t ranks = RanksOf(request);
  std::vector<size_t> picked;
  if (request.device_uuids().empty()) {
    // Host memory beside GPUs is for those who name it. Ranks may share it; whether two share a GPU is for the engine to say.
    std::vector<size_t> gpus;
    for (size_t i = 0; i < devices.size(); ++i) {
      if (!devices[i]->uuid_bytes().empty()) gpus.push_back(i);
    }
    if (!gpus.empty() && ranks > gpus.size()) {
      return absl::InvalidArgumentError(absl::StrCat("ranks is ", ranks, "; the daemon has ", gpus.size(),
                                                     " GPUs: name each rank's device in device_uuids"));
    }
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      picked.push_back(gpus.empty() ? rank % devices.size() : gpus[rank]);
    }
    return picked;
  }
  for (const std::string& uuid : request.device_uuids()) {
    std::vector<size_t> named;
    for (size_t i = 0; i < devices.size(); ++i) {
      if (devices[i]->id() == uuid) named.push_back(i);
    }
    if (named.empty()) {
      const std::string ids = absl::StrJoin(
          devices, ", ", [](std::string* out, const auto& device) { out->append(device->id()); });
      return absl::NotFoundError(absl::StrCat("device_uuids names \"", uuid, "\"; the daemon has ", ids));
    }
    const auto before = std::count_if(picked.begin(), picked.end(),
                                      [&](size_t index) { return devices[index]->id() == uuid; });
    picked.push_back(named[before % named.size()]);
  }
  return picked;
}

// One text for one layout, whichever daemon writes it.
std::string CanonicalText(v1::Layout layout) {
  layout.DiscardUnknownFields();
  std::string text;
  google::protobuf::io::StringOutputStream stream(&text);
  google::protobuf::io::CodedOutputStream coded(&stream);
  coded.SetSerializationDeterministic(true);
  layout.SerializeToCodedStream(&coded);
  coded.Trim();
  return text;
}

absl::Status Differs(const SpaceFacts& facts, absl::string_view field, absl::string_view there,
                     absl::string_view here) {
  return absl::FailedPreconditionError(
      absl::StrCat(field, " differs from that of space ", facts.id, " of tenant ", facts.tenant,
                   " under this fingerprint: ", there, " there, ", here, " here"));
}

}  // namespace

absl::StatusOr<TenantScope> ScopeTenant(const AccessRule& rule, const std::string& tenant, uint32_t uid) {
  if (rule.tenants.empty()) {
    const std::string name = tenant.empty() ? "default" : tenant;
    return TenantScope{name, absl::StrCat(name, "@", uid)};
  }
  const std::string& name = tenant.empty() ? rule.tenants.front() : tenant;
  if (std::find(rule.tenants.begin(), rule.tenants.end(), name) == rule.tenants.end()) {
    return absl::PermissionDeniedError(absl::StrCat("tenant is \"", name, "\"; rule [", rule.name,
                                                    "] gives uid ", uid,
                                                    " tenant = ", absl::StrJoin(rule.tenants, ", ")));
  }
  return TenantScope{name, name};
}

GiveBack::Terms TermsOf(const AccessRule& rule, v1::PriorityClass asked) {
  const AccessLimits& limits = rule.limits;
  return {.limit_blocks = limits.space_blocks == kNoAccessLimit ? 0 : limits.space_blocks,
          .weight = limits.weight,
          .priority = limits.priority,
          .asked = asked};
}

bool IsForTenant(const AccessRule& rule, const std::string& tenant_scope) {
  if (!rule.Allows(AccessRole::kEngine)) return false;
  const auto has = [](const auto& list, const auto& value) {
    return std::find(list.begin(), list.end(), value) != list.end();
  };
  if (!rule.tenants.empty()) return has(rule.tenants, tenant_scope);
  uint32_t uid = 0;
  const size_t at = tenant_scope.find('@');
  return at != std::string::npos && absl::SimpleAtoi(tenant_scope.substr(at + 1), &uid) &&
         (rule.uids.empty() || has(rule.uids, uid));
}

GiveBack::Terms TermsInForce(const AccessControl& access, const AccessRule& rule,
                             const std::string& tenant_scope, v1::PriorityClass asked) {
  const auto now = access.RuleNamed(rule.name);
  return TermsOf(now != nullptr && IsForTenant(*now, tenant_scope) ? *now : rule, asked);
}

void DeriveKeys(const DaemonOptions& options, SpaceFacts* facts, uint32_t ranks) {
  if (options.tier_secret.empty()) {
    facts->hash_seed = RandomBytes(kHashSeedBytes);
    return;
  }
  std::vector<std::string> fields = {kTierVersion, facts->fingerprint.digest(), CanonicalText(facts->layout),
                                     absl::StrCat(ranks), facts->tenant};
  // Two openings whose facts differ don't share a space, and nothing below it either.
  const std::map<std::string, std::string> sorted(facts->fingerprint.facts().begin(),
                                                  facts->fingerprint.facts().end());
  for (const auto& [name, value] : sorted) {
    fields.push_back(name);
    fields.push_back(value);
  }
  const TierSpace seed = DeriveTierKey(options.tier_secret, "hash seed", fields);
  facts->hash_seed.assign(seed.begin(), seed.end());
  facts->tier_space = DeriveTierKey(options.tier_secret, "tier space", fields);
  facts->tier_owner = OwnerBelow(options, facts->tenant);
}

TierOwner OwnerBelow(const DaemonOptions& options, const std::string& tenant_scope) {
  return DeriveTierOwner(options.tier_secret, tenant_scope);
}

absl::StatusOr<SpaceFacts> DescribeSpace(const DaemonOptions& options,
                                         const std::vector<std::unique_ptr<Device>>& devices,
                                         const v1::OpenSession& request, const TenantScope& tenant,
                                         uint64_t id) {
  SpaceFacts facts;
  facts.id = id;
  facts.tenant = tenant.scope;
  facts.tenant_name = tenant.name;
  facts.fingerprint = request.fingerprint();
  facts.layout = request.layout();
  facts.kind = KindOf(request);
  facts.low_watermark = options.low_watermark;
  facts.high_watermark = options.high_watermark;
  DeriveKeys(options, &facts, RanksOf(request));
  ASSIGN_OR_RETURN(facts.rank_devices, PickDevices(devices, request));

  GeometryRequest geometry;
  geometry.block_bytes = request.layout().block_bytes();
  geometry.max_bytes = request.max_space_bytes() == 0 ? UINT64_MAX : request.max_space_bytes();
  bool host = true;
  for (const size_t index : facts.rank_devices) {
    Device* device = devices[index].get();
    facts.devices.push_back(device);
    host = host && device->uuid_bytes().empty();
    geometry.granularity_bytes = std::max<uint64_t>(geometry.granularity_bytes, device->granularity_bytes());
    const uint64_t sharers = std::count(facts.rank_devices.begin(), facts.rank_devices.end(), index);
    geometry.max_bytes = std::min(geometry.max_bytes, options.device_capacity_bytes[index] / sharers);
  }
  geometry.slab_limit_bytes = options.slab_bytes != 0 ? options.slab_bytes
                              : host                  ? kHostSlabBytes
                                                      : kCudaSlabBytes;
  ASSIGN_OR_RETURN(facts.geometry, ComputeGeometry(geometry));
  if (facts.kind == v1::SPACE_KIND_IPC) {
    // An IPC space is one allocation for life.
    facts.geometry.slab_bytes = facts.geometry.max_blocks * facts.geometry.block_stride_bytes;
  }
  return facts;
}

std::string SpaceKey(const std::string& tenant_scope, const v1::Fingerprint& fingerprint) {
  return absl::StrCat(tenant_scope, "\n", fingerprint.digest());
}

PoolOptions PoolOptionsOf(const DaemonOptions& options, const SpaceFacts& facts) {
  PoolOptions pool;
  pool.max_blocks = facts.geometry.max_blocks;
  pool.slab_blocks = facts.geometry.blocks_in(facts.geometry.slab_bytes);
  pool.pin_budget = options.pin_budget;
  pool.keeps_sums = options.verify;
  for (const v1::LayerGroup& group : facts.layout.groups()) {
    // It needs 64 bits: a window near 2^32 tokens must not round to none.
    const uint64_t blocks =
        (uint64_t{group.window_tokens()} + group.tokens_per_block() - 1) / group.tokens_per_block();
    pool.windows.push_back(static_cast<uint32_t>(blocks));
  }
  return pool;
}

absl::Status CheckSameModel(const SpaceFacts& facts, const v1::Layout& layout,
                            const v1::Fingerprint& fingerprint) {
  if (fingerprint.digest() != facts.fingerprint.digest()) {
    return absl::FailedPreconditionError(
        absl::StrCat("fingerprint.digest is not that of space ", facts.id,
                     "; facts: ", DescribeFactDifferences(facts.fingerprint, fingerprint)));
  }
  const std::string differences = DescribeFactDifferences(facts.fingerprint, fingerprint);
  if (!differences.empty()) {
    return absl::FailedPreconditionError(absl::StrCat("fingerprint.facts differ from those of space ",
                                                      facts.id, " of tenant ", facts.tenant,
                                                      " under the same digest: ", differences));
  }
  google::protobuf::util::MessageDifferencer differencer;
  std::string report;
  differencer.ReportDifferencesToString(&report);
  if (differencer.Compare(facts.layout, layout)) return absl::OkStatus();
  std::replace(report.begin(), report.end(), '\n', ';');
  return absl::FailedPreconditionError(absl::StrCat("layout differs from that of space ", facts.id,
                                                    " of tenant ", facts.tenant,
                                                    " (there -> here): ", report));
}

absl::Status CheckSameSpace(const SpaceFacts& facts, const std::vector<std::unique_ptr<Device>>& devices,
                            const v1::OpenSession& request) {
  RETURN_IF_ERROR(CheckSameModel(facts, request.layout(), request.fingerprint()));
  const size_t ranks = RanksOf(request);
  if (ranks != facts.devices.size()) {
    return Differs(facts, "ranks", absl::StrCat(facts.devices.size()), absl::StrCat(ranks));
  }
  if (KindOf(request) != facts.kind) {
    return Differs(facts, "kind", v1::SpaceKind_Name(facts.kind), v1::SpaceKind_Name(KindOf(request)));
  }
  for (int rank = 0; rank < request.device_uuids_size(); ++rank) {
    if (request.device_uuids(rank) == facts.devices[rank]->id()) continue;
    return Differs(facts, absl::StrCat("device_uuids[", rank, "]"), facts.devices[rank]->id(),
                   request.device_uuids(rank));
  }
  if (!request.device_uuids().empty()) return absl::OkStatus();
  // Who names none takes any GPU for another, but not host memory for a GPU's.
  ASSIGN_OR_RETURN(const std::vector<size_t> picked, PickDevices(devices, request));
  for (size_t rank = 0; rank < ranks; ++rank) {
    const Device& here = *devices[picked[rank]];
    if (here.uuid_bytes().empty() == facts.devices[rank]->uuid_bytes().empty()) continue;
    return Differs(facts, absl::StrCat("the device of rank ", rank), facts.devices[rank]->id(), here.id());
  }
  return absl::OkStatus();
}

std::string DescribeFactDifferences(const v1::Fingerprint& there, const v1::Fingerprint& here) {
  const std::map<std::string, std::string> left(there.facts().begin(), there.facts().end());
  const std::map<std::string, std::string> right(here.facts().begin(), here.facts().end());
  std::set<std::string> names;
  for (const auto& [name, value] : left) names.insert(name);
  for (const auto& [name, value] : right) names.insert(name);
  const auto show = [](const std::map<std::string, std::string>& facts, const std::string& name) {
    const auto it = facts.find(name);
    return it == facts.end() ? std::string("missing") : absl::StrCat("\"", it->second, "\"");
  };
  std::vector<std::string> differences;
  for (const std::string& name : names) {
    const std::string a = show(left, name), b = show(right, name);
    if (a != b) differences.push_back(absl::StrCat(name, " ", a, " there, ", b, " here"));
  }
  return absl::StrJoin(differences, "; ");
}

}  // namespace kvpool
