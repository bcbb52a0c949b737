// Layouts, and keys of blocks.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "client/layouts.h"
#include "client/prefix_hasher.h"
#include "client/python/src/bind.h"
#include "proto/support/dtype.h"

namespace kvpool::python {
namespace {

struct PyPlane {
  v1::Plane proto;
};
struct PyLayerGroup {
  v1::LayerGroup proto;
};

PrefixKey KeyOf(const nb::bytes& bytes, const char* field) {
  PrefixKey key;
  if (bytes.size() != key.size()) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat(field, ": ", bytes.size(), " bytes, where keys have ", key.size())));
  }
  std::copy_n(reinterpret_cast<const uint8_t*>(bytes.c_str()), key.size(), key.begin());
  return key;
}
nb::bytes KeyBytesOf(const PrefixKey& key) { return BytesOf(KeyBytes({&key, 1})); }

std::vector<std::string> StringsOf(const std::vector<nb::bytes>& list) {
  std::vector<std::string> strings;
  for (const nb::bytes& item : list) strings.emplace_back(item.c_str(), item.size());
  return strings;
}

void BindPlane(nb::module_& module) {
  nb::class_<PyPlane>(
      module, "Plane",
      "Where K or V of a layer group lies in a block: element (layer, token, head, dim) is at byte\n"
      "offset + layer * layer_stride + token * token_stride + head * head_stride + dim * dim_stride.")
      .def(
          "__init__",
          [](PyPlane* self, uint64_t offset, uint64_t layer_stride, uint64_t token_stride,
             uint64_t head_stride, uint64_t dim_stride) {
            new (self) PyPlane;
            self->proto.set_offset_bytes(offset);
            self->proto.set_layer_stride_bytes(layer_stride);
            self->proto.set_token_stride_bytes(token_stride);
            self->proto.set_head_stride_bytes(head_stride);
            self->proto.set_dim_stride_bytes(dim_stride);
          },
          nb::kw_only(), nb::arg("offset"), nb::arg("layer_stride"), nb::arg("token_stride"),
          nb::arg("head_stride"), nb::arg("dim_stride"));
}

void BindLayerGroup(nb::module_& module) {
  nb::class_<PyLayerGroup>(module, "LayerGroup", "Layers that share block tables; fields as in layout.proto.")
      .def(
          "__init__",
          [](PyLayerGroup* self, const std::string& name, const std::vector<uint32_t>& layers,
             uint32_t tokens_per_block, uint32_t window_tokens, uint32_t kv_heads, uint32_t k_head_dim,
             uint32_t v_head_dim, const std::string& dtype, const PyPlane* k, const PyPlane* v) {
            new (self) PyLayerGroup;
            v1::LayerGroup& group = self->proto;
            group.set_name(name);
            group.mutable_layers()->Add(layers.begin(), layers.end());
            group.set_tokens_per_block(tokens_per_block);
            group.set_window_tokens(window_tokens);
            group.set_kv_heads(kv_heads);
            group.set_k_head_dim(k_head_dim);
            group.set_v_head_dim(v_head_dim);
            if (!dtype.empty()) group.set_dtype(DtypeOf(dtype));
            if (k != nullptr) *group.mutable_k() = k->proto;
            if (v != nullptr) *group.mutable_v() = v->proto;
          },
          nb::kw_only(), nb::arg("name"), nb::arg("layers"), nb::arg("tokens_per_block"),
          nb::arg("window_tokens") = 0, nb::arg("kv_heads") = 0, nb::arg("k_head_dim") = 0,
          nb::arg("v_head_dim") = 0, nb::arg("dtype") = "", nb::arg("k").none() = nb::none(),
          nb::arg("v").none() = nb::none());
}

using LayoutClass = nb::class_<PyLayout>;

void BindLow(nb::module_& module) {
  nb::class_<LowLayout>(
      module, "LowLayout",
      "How blocks hold tokens in low precision (LowTerms of score.proto). Record r of a sequence, at\n"
      "r % records_per_block * record_bytes in its block r // records_per_block, has tokens [32 g, 32 g + "
      "32)\n"
      "of plane p, r = g * planes + p: [k_head_dim] (scale, zero) of float16; at k_codes_at 32 rows of "
      "codes, of\n"
      "k_row_bytes; at v_ranges_at [32] (scale, zero); at v_codes_at 32 rows of v_row_bytes. Codes are "
      "packed\n"
      "little end first, and an element is zero + code * scale.")
      .def_ro("planes", &LowLayout::planes, "Of one rank, layer * kv_heads + head.")
      .def_ro("bits", &LowLayout::bits)
      .def_ro("k_row_bytes", &LowLayout::k_row_bytes)
      .def_ro("v_row_bytes", &LowLayout::v_row_bytes)
      .def_ro("k_codes_at", &LowLayout::k_codes_at)
      .def_ro("v_ranges_at", &LowLayout::v_ranges_at)
      .def_ro("v_codes_at", &LowLayout::v_codes_at)
      .def_ro("record_bytes", &LowLayout::record_bytes)
      .def_ro("records_per_block", &LowLayout::records_per_block)
      .def("blocks", &LowLayout::Blocks, nb::arg("tokens"), "Blocks that so many tokens of each plane take.");
}

void BindMaking(LayoutClass& layout) {
  layout
      .def(
          "__init__",
          [](PyLayout* self, const std::vector<const PyLayerGroup*>& groups, uint64_t block_bytes,
             const std::string& encoding) {
            new (self) PyLayout;
            self->proto.set_encoding(
                EnumOf<v1::Encoding>(encoding, "ENCODING_", "encoding", &v1::Encoding_Parse));
            self->proto.set_block_bytes(block_bytes);
            for (const PyLayerGroup* group : groups) *self->proto.add_groups() = group->proto;
          },
          nb::arg("groups"), nb::kw_only(), nb::arg("block_bytes"), nb::arg("encoding") = "strided")
      .def_static(
          "paged",
          [](uint32_t layers, uint32_t kv_heads, uint32_t head_dim, uint32_t tokens_per_block,
             const std::string& dtype) {
            return PyLayout{PagedLayout({.layers = layers,
                                         .kv_heads = kv_heads,
                                         .head_dim = head_dim,
                                         .tokens_per_block = tokens_per_block,
                                         .dtype = DtypeOf(dtype)})};
          },
          nb::kw_only(), nb::arg("layers"), nb::arg("kv_heads"), nb::arg("head_dim"),
          nb::arg("tokens_per_block") = 16, nb::arg("dtype") = "bfloat16",
          "One group of full attention: K, then V, each [layer][token][head][dim] without gaps.")
      .def_static(
          "opaque",
          [](uint64_t block_bytes, uint32_t tokens_per_block) {
            return PyLayout{OpaqueLayout({.block_bytes = block_bytes, .tokens_per_block = tokens_per_block})};
          },
          nb::kw_only(), nb::arg("block_bytes"), nb::arg("tokens_per_block") = 16,
          "Bytes that mean something to the engine alone: shared, but never scored.");
}

void BindAsking(LayoutClass& layout) {
  layout
      .def_prop_ro(
          "block_bytes", [](const PyLayout& layout) { return layout.proto.block_bytes(); },
          "Bytes of a block on one rank.")
      .def_prop_ro(
          "groups", [](const PyLayout& layout) { return layout.proto.groups_size(); },
          "How many layer groups there are.")
      .def(
          "tokens_per_block",
          [](const PyLayout& layout, uint32_t group) {
            if (group >= static_cast<uint32_t>(layout.proto.groups_size())) {
              throw StatusError(absl::InvalidArgumentError(
                  absl::StrCat("group: ", group, ", where the layout has ", layout.proto.groups_size())));
            }
            return layout.proto.groups(static_cast<int>(group)).tokens_per_block();
          },
          nb::arg("group") = 0)
      .def(
          "low",
          [](const PyLayout& layout, uint32_t bits, uint32_t group) {
            return ValueOf(LowLayoutOf(layout.proto, {.group = group, .bits = bits}));
          },
          nb::arg("bits") = LowLayout::kDefaultBits, nb::kw_only(), nb::arg("group") = 0,
          "Where compact(disposition='low') puts tokens in blocks of this layout.")
      .def(
          "__eq__",
          [](const PyLayout& a, const PyLayout& b) {
            return a.proto.SerializeAsString() == b.proto.SerializeAsString();
          },
          nb::sig("def __eq__(self, other: object, /) -> bool"), nb::is_operator())
      .def("__repr__", [](const PyLayout& layout) {
        return absl::StrCat("<kvpool.Layout ", layout.proto.ShortDebugString(), ">");
      });
}

void BindHasher(nb::module_& module) {
  nb::class_<PrefixHasher>(
      module, "PrefixHasher",
      "Keys of blocks: a SHA-256 chain over tokens, from the space's seed. session.hasher() has it.")
      .def(
          "__init__",
          [](PrefixHasher* self, const nb::bytes& seed, const nb::bytes& salt, nb::handle salt_from) {
            new (self) PrefixHasher({seed.c_str(), seed.size()}, {salt.c_str(), salt.size()},
                                    PositionOf(salt_from, "salt_from"));
          },
          nb::arg("seed"), nb::arg("salt") = nb::bytes(""), nb::kw_only(), nb::arg("salt_from") = 0,
          nb::sig("def __init__(self, seed: bytes, salt: bytes = b'', *, salt_from: int = 0) -> None"),
          "salt_from: the salt counts from the block that holds the token at this position on, and what is "
          "in\n"
          "front is shared with everybody. 0: it is in every key. Without a salt it changes nothing.")
      .def_prop_ro(
          "root", [](const PrefixHasher& hasher) { return KeyBytesOf(hasher.root()); },
          "The parent key of the first block.")
      .def(
          "next",
          [](const PrefixHasher& hasher, const nb::bytes& parent, nb::handle tokens,
             const std::vector<nb::bytes>& extra_keys, nb::handle position) {
            if (position.is_none() && hasher.needs_positions()) {
              throw StatusError(
                  absl::InvalidArgumentError("position is None; must be that of the first token, since the "
                                             "salt counts from a token on"));
            }
            const std::vector<std::string> extra = StringsOf(extra_keys);
            return KeyBytesOf(hasher.NextAt(
                KeyOf(parent, "parent"), position.is_none() ? 0 : PositionOf(position, "position"),
                TokensOf(tokens), std::vector<std::string_view>(extra.begin(), extra.end())));
          },
          nb::arg("parent"), nb::arg("tokens"), nb::arg("extra_keys") = std::vector<nb::bytes>(),
          nb::kw_only(), nb::arg("position").none() = nb::none(),
          nb::sig("def next(self, parent: bytes, tokens: Tokens, extra_keys: collections.abc.Sequence[bytes] "
                  "= (), *, position: int | None = None) -> bytes"),
          "Key of the block that holds `tokens` behind the block of `parent`.\n\n"
          "position: of the first of `tokens` in the sequence, where those that a pruning dropped count, "
          "too.\n"
          "A salt with salt_from needs it (InvalidArgumentError), and others don't care.")
      .def(
          "behind_pruning",
          [](const PrefixHasher& hasher, const nb::bytes& parent, nb::handle tokens,
             const nb::bytes& digest) {
            return KeyBytesOf(hasher.BehindPruning(KeyOf(parent, "parent"), TokensOf(tokens),
                                                   {digest.c_str(), digest.size()}));
          },
          nb::arg("parent"), nb::arg("tokens"), nb::arg("digest"),
          nb::sig("def behind_pruning(self, parent: bytes, tokens: Tokens, digest: bytes) -> bytes"),
          "The parent of the first key behind a pruning.")
      .def(
          "chain",
          [](const PrefixHasher& hasher, nb::handle tokens, uint32_t tokens_per_block,
             const std::vector<nb::bytes>& extra_keys) {
            if (tokens_per_block == 0) {
              throw StatusError(
                  absl::InvalidArgumentError("tokens_per_block: 0, where at least 1 is needed"));
            }
            const std::vector<std::string> extra = StringsOf(extra_keys);
            const std::vector<uint32_t> ids = TokensOf(tokens);
            nb::list keys;
            for (const PrefixKey& key : hasher.Chain(
                     ids, tokens_per_block, std::vector<std::string_view>(extra.begin(), extra.end()))) {
              keys.append(KeyBytesOf(key));
            }
            return keys;
          },
          nb::arg("tokens"), nb::arg("tokens_per_block"), nb::arg("extra_keys") = std::vector<nb::bytes>(),
          nb::sig("def chain(self, tokens: Tokens, tokens_per_block: int, extra_keys: "
                  "collections.abc.Sequence[bytes] = "
                  "()) -> list[bytes]"),
          "Keys of the full blocks of `tokens`, from the root; a partial last block has none.");
}

}  // namespace

void BindLayout(nb::module_& module) {
  BindPlane(module);
  BindLayerGroup(module);
  LayoutClass layout(module, "Layout", "How one block is filled; see layout.proto.");
  BindLow(module);
  BindMaking(layout);
  BindAsking(layout);
  BindHasher(module);
}

}  // namespace kvpool::python
