// Checks of what opens a session: layout, fingerprint, tenant, role.
#include <string>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "proto/support/dtype.h"
#include "proto/support/limits.h"
#include "proto/support/status_macros.h"
#include "server/wire/field_checks.h"
#include "server/wire/validate.h"

namespace kvpool {
namespace {

constexpr uint64_t kMinBlockBytes = 64;
constexpr uint64_t kMaxBlockBytes = uint64_t{1} << 30;
constexpr size_t kMaxFacts = 64;
constexpr size_t kMaxFactBytes = 256;
constexpr size_t kMaxDigestBytes = 64;
constexpr size_t kMaxGroupNameBytes = 64;

// Kernels load elements where the layout says they are: a load that is not aligned is an error which a GPU's
// context does not survive.
absl::Status CheckAligned(const std::string& field, uint64_t bytes, uint32_t element_bytes) {
  if (bytes % element_bytes == 0) return absl::OkStatus();
  return Invalid(
      absl::StrCat(field, " is ", bytes, "; must be a multiple of the element size, ", element_bytes));
}

absl::Status CheckPlane(const std::string& field, const v1::Plane& plane, const v1::LayerGroup& group,
                        uint32_t head_dim, uint64_t block_bytes) {
  RETURN_IF_ERROR(CheckKnown(field, plane));
  const uint32_t element_bytes = ElementBytes(group.dtype());
  if (plane.dim_stride_bytes() < element_bytes) {
    return Invalid(absl::StrCat(field, ".dim_stride_bytes is ", plane.dim_stride_bytes(), "; an element has ",
                                element_bytes, " bytes"));
  }
  // Each product is below 2^64 * 2^12, so their sum stays far below 2^128.
  using Wide = unsigned __int128;
  const Wide end = Wide{plane.offset_bytes()} + Wide{plane.layer_stride_bytes()} * (group.layers_size() - 1) +
                   Wide{plane.token_stride_bytes()} * (group.tokens_per_block() - 1) +
                   Wide{plane.head_stride_bytes()} * (group.kv_heads() - 1) +
                   Wide{plane.dim_stride_bytes()} * (head_dim - 1) + element_bytes;
  if (end > block_bytes) {
    const std::string shown =
        end > Wide{UINT64_MAX} ? "beyond 2^64" : absl::StrCat(static_cast<uint64_t>(end));
    return Invalid(absl::StrCat(field, ": its farthest element ends at byte ", shown,
                                "; layout.block_bytes is ", block_bytes));
  }
  RETURN_IF_ERROR(CheckAligned(field + ".offset_bytes", plane.offset_bytes(), element_bytes));
  RETURN_IF_ERROR(CheckAligned(field + ".layer_stride_bytes", plane.layer_stride_bytes(), element_bytes));
  RETURN_IF_ERROR(CheckAligned(field + ".token_stride_bytes", plane.token_stride_bytes(), element_bytes));
  RETURN_IF_ERROR(CheckAligned(field + ".head_stride_bytes", plane.head_stride_bytes(), element_bytes));
  return CheckAligned(field + ".dim_stride_bytes", plane.dim_stride_bytes(), element_bytes);
}

absl::Status CheckStrided(const std::string& field, const v1::LayerGroup& group, uint64_t block_bytes) {
  RETURN_IF_ERROR(CheckRange(field + ".kv_heads", group.kv_heads(), 1, kMaxKvHeads));
  RETURN_IF_ERROR(CheckRange(field + ".k_head_dim", group.k_head_dim(), 1, kMaxHeadDim));
  RETURN_IF_ERROR(CheckRange(field + ".v_head_dim", group.v_head_dim(), 0, kMaxHeadDim));
  if (group.dtype() == v1::DTYPE_UNSPECIFIED) {
    return Invalid(absl::StrCat(field, ".dtype is unspecified; strided layouts need one"));
  }
  if (!group.has_k()) return Invalid(absl::StrCat(field, ".k is missing; strided layouts need it"));
  RETURN_IF_ERROR(CheckPlane(field + ".k", group.k(), group, group.k_head_dim(), block_bytes));
  RETURN_IF_ERROR(CheckAligned("layout.block_bytes", block_bytes, ElementBytes(group.dtype())));
  if (group.v_head_dim() == 0) {
    if (group.has_v()) return Invalid(absl::StrCat(field, ".v is given, but v_head_dim is 0"));
    return absl::OkStatus();
  }
  if (!group.has_v()) {
    return Invalid(absl::StrCat(field, ".v is missing; v_head_dim is ", group.v_head_dim()));
  }
  return CheckPlane(field + ".v", group.v(), group, group.v_head_dim(), block_bytes);
}

absl::Status CheckGroup(const std::string& field, const v1::LayerGroup& group, const v1::Layout& layout,
                        absl::flat_hash_set<uint32_t>* taken) {
  RETURN_IF_ERROR(CheckKnown(field, group));
  RETURN_IF_ERROR(CheckSize(field + ".name", group.name(), 1, kMaxGroupNameBytes));
  RETURN_IF_ERROR(CheckRange("number of " + field + ".layers", group.layers_size(), 1, kMaxLayers));
  for (int i = 1; i < group.layers_size(); ++i) {
    if (group.layers(i) <= group.layers(i - 1)) {
      return Invalid(absl::StrCat(field, ".layers[", i, "] is ", group.layers(i), "; must be above ",
                                  group.layers(i - 1)));
    }
  }
  for (const uint32_t layer : group.layers()) {
    if (!taken->insert(layer).second) {
      return Invalid(absl::StrCat(field, ".layers: layer ", layer, " is in another group too"));
    }
  }
  RETURN_IF_ERROR(CheckRange(field + ".tokens_per_block", group.tokens_per_block(), 1, kMaxTokensPerBlock));
  if (!v1::Dtype_IsValid(group.dtype())) {
    return Invalid(absl::StrCat(field, ".dtype is ", static_cast<int>(group.dtype()), "; must be 0 to ",
                                static_cast<int>(v1::Dtype_MAX)));
  }
  if (layout.encoding() != v1::ENCODING_STRIDED) return absl::OkStatus();
  return CheckStrided(field, group, layout.block_bytes());
}

absl::Status CheckLayout(const v1::Layout& layout) {
  RETURN_IF_ERROR(CheckKnown("layout", layout));
  if (layout.encoding() == v1::ENCODING_UNSPECIFIED || !v1::Encoding_IsValid(layout.encoding())) {
    return Invalid(absl::StrCat("layout.encoding is ", static_cast<int>(layout.encoding()), "; must be 1 to ",
                                static_cast<int>(v1::Encoding_MAX)));
  }
  RETURN_IF_ERROR(CheckRange("layout.block_bytes", layout.block_bytes(), kMinBlockBytes, kMaxBlockBytes));
  RETURN_IF_ERROR(CheckRange("number of layout.groups", layout.groups_size(), 1, kMaxGroups));
  absl::flat_hash_set<uint32_t> taken;
  for (int i = 0; i < layout.groups_size(); ++i) {
    RETURN_IF_ERROR(CheckGroup(absl::StrCat("layout.groups[", i, "]"), layout.groups(i), layout, &taken));
  }
  return absl::OkStatus();
}

absl::Status CheckFingerprint(const v1::Fingerprint& fingerprint) {
  RETURN_IF_ERROR(CheckKnown("fingerprint", fingerprint));
  RETURN_IF_ERROR(CheckSize("fingerprint.digest", fingerprint.digest(), 1, kMaxDigestBytes));
  RETURN_IF_ERROR(CheckRange("number of fingerprint.facts", fingerprint.facts_size(), 0, kMaxFacts));
  for (const auto& [name, value] : fingerprint.facts()) {
    RETURN_IF_ERROR(CheckSize("a name in fingerprint.facts", name, 1, kMaxFactBytes));
    RETURN_IF_ERROR(CheckSize("fingerprint.facts[\"" + name + "\"]", value, 0, kMaxFactBytes));
  }
  return absl::OkStatus();
}

absl::Status CheckRole(const v1::Role& role, uint32_t ranks) {
  RETURN_IF_ERROR(CheckKnown("role", role));
  if (role.scheduler() && role.rank() != 0) {
    return Invalid(absl::StrCat("role.rank is ", role.rank(), "; must be 0 for the scheduler"));
  }
  if (role.rank() >= ranks) {
    return Invalid(absl::StrCat("role.rank is ", role.rank(), "; must be below ranks, ", ranks));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckTenant(const std::string& tenant) {
  RETURN_IF_ERROR(CheckSize("tenant", tenant, 0, kMaxTenantBytes));
  for (const char c : tenant) {
    if (!absl::ascii_isalnum(c) && c != '.' && c != '_' && c != '-') {
      return Invalid(
          absl::StrCat("tenant has byte ", static_cast<unsigned char>(c), "; allowed are [A-Za-z0-9._-]"));
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateOpenSession(const v1::OpenSession& request) {
  RETURN_IF_ERROR(CheckKnown("open_session", request));
  RETURN_IF_ERROR(CheckSize("attach_token", request.attach_token(), kAttachTokenBytes, kAttachTokenBytes));
  RETURN_IF_ERROR(CheckTenant(request.tenant()));
  RETURN_IF_ERROR(ValidateClientName(request.client_name()));
  RETURN_IF_ERROR(CheckRange("ranks", request.ranks(), 0, kMaxRanks));
  const uint32_t ranks = request.ranks() == 0 ? 1 : request.ranks();
  RETURN_IF_ERROR(CheckRole(request.role(), ranks));
  if (!request.has_layout()) return Invalid("layout is missing");
  RETURN_IF_ERROR(CheckLayout(request.layout()));
  if (!request.has_fingerprint()) return Invalid("fingerprint is missing");
  RETURN_IF_ERROR(CheckFingerprint(request.fingerprint()));
  if (request.device_uuids_size() != 0 && request.device_uuids_size() != static_cast<int>(ranks)) {
    return Invalid(absl::StrCat("device_uuids has ", request.device_uuids_size(),
                                " entries; must have none or ", ranks, ", one a rank"));
  }
  if (!v1::SpaceKind_IsValid(request.kind())) {
    return Invalid(absl::StrCat("kind is ", static_cast<int>(request.kind()), "; must be 0 to ",
                                static_cast<int>(v1::SpaceKind_MAX)));
  }
  if (!v1::PriorityClass_IsValid(request.priority_class())) {
    return Invalid(absl::StrCat("priority_class is ", static_cast<int>(request.priority_class()),
                                "; must be 0 to ", static_cast<int>(v1::PriorityClass_MAX)));
  }
  if (request.max_blocks() != 0 && request.guaranteed_blocks() > request.max_blocks()) {
    return Invalid(absl::StrCat("guaranteed_blocks is ", request.guaranteed_blocks(), "; max_blocks is ",
                                request.max_blocks()));
  }
  return absl::OkStatus();
}

absl::Status ValidateAddMember(const v1::AddMember& request) {
  RETURN_IF_ERROR(CheckKnown("add_member", request));
  RETURN_IF_ERROR(CheckSize("attach_token", request.attach_token(), kAttachTokenBytes, kAttachTokenBytes));
  RETURN_IF_ERROR(CheckSize("invitation", request.invitation(), kMemberTokenBytes, kMemberTokenBytes));
  if (!request.has_role()) return Invalid("role is missing");
  RETURN_IF_ERROR(CheckRole(request.role(), kMaxRanks));
  if (!request.has_layout()) return Invalid("layout is missing");
  RETURN_IF_ERROR(CheckLayout(request.layout()));
  if (!request.has_fingerprint()) return Invalid("fingerprint is missing");
  return CheckFingerprint(request.fingerprint());
}

}  // namespace kvpool
