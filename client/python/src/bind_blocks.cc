// Holds on blocks, and tables of them.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "client/python/src/bind.h"
#include "client/python/src/view.h"

namespace kvpool::python {

PyBlocks::~PyBlocks() {
  if (!released_ && !refs_.empty()) session_->DropBlocks(refs_);
}

const std::vector<BlockRef>& PyBlocks::refs() const {
  if (released_) throw ReleasedError("these blocks were released");
  session_->CheckUsable();
  return refs_;
}

size_t PyBlocks::Offset(int64_t index) const {
  const auto size = static_cast<int64_t>(refs().size());
  const int64_t at = index < 0 ? index + size : index;
  if (at < 0 || at >= size) throw nb::index_error(absl::StrCat("block ", index, " of ", size).c_str());
  return static_cast<size_t>(at);
}

void PyBlocks::Release(std::optional<uint64_t> after, const ReleaseHint& hint) {
  if (std::exchange(released_, true) || session_->closed()) return;
  const std::vector<BlockRef> refs = std::exchange(refs_, {});
  session_->Use([&](Session&) { session_->GiveBack(refs, StepOf(after), hint); });
}

std::vector<BlockRef> PyBlocks::Take() {
  refs();
  released_ = true;
  return std::exchange(refs_, {});
}

PyBlocks PyBlocks::Split(size_t count) {
  if (count > refs().size()) {
    throw StatusError(
        absl::InvalidArgumentError(absl::StrCat("split at ", count, " of ", refs_.size(), " blocks")));
  }
  PyBlocks tail(session_, {refs_.begin() + static_cast<ptrdiff_t>(count), refs_.end()}, false);
  tail.writable_.assign(writable_.begin() + static_cast<ptrdiff_t>(count), writable_.end());
  refs_.resize(count);
  writable_.resize(count);
  return tail;
}

void PyBlocks::Extend(PyBlocks* more) {
  refs();
  if (more == this || more->session_ != session_) {
    throw StatusError(absl::InvalidArgumentError("extend: blocks of the same session, from another list"));
  }
  more->refs();
  writable_.insert(writable_.end(), more->writable_.begin(), more->writable_.end());
  const std::vector<BlockRef> taken = more->Take();
  refs_.insert(refs_.end(), taken.begin(), taken.end());
}

std::vector<BlockRef> RefsOf(nb::handle blocks) {
  if (nb::isinstance<PyBlocks>(blocks)) return nb::cast<const PyBlocks&>(blocks).refs();
  if (!nb::isinstance<nb::iterable>(blocks)) throw TypeErrorOf("blocks", blocks, "Blocks, or a list of refs");
  std::vector<BlockRef> refs;
  for (const nb::handle ref : blocks) {
    uint64_t packed = 0;
    if (!nb::try_cast(ref, packed)) {
      throw TypeErrorOf(EntryOf("blocks", refs.size()), ref, "a ref: an int of 0 to 2**64 - 1");
    }
    refs.push_back(BlockRef::Unpack(packed));
  }
  return refs;
}

nb::object BlocksObject(const std::shared_ptr<SharedSession>& session, Blocks holds) {
  const auto refs = holds.Detach();
  return nb::cast(PyBlocks(session, {refs.begin(), refs.end()}, false));
}

std::vector<uint64_t> Packed(absl::Span<const BlockRef> refs) {
  std::vector<uint64_t> packed;
  packed.reserve(refs.size());
  for (const BlockRef ref : refs) packed.push_back(ref.Pack());
  return packed;
}

namespace {

void BindBlockTable(nb::module_& module) {
  nb::class_<PyBlockTable>(
      module, "BlockTable",
      "Blocks of one sequence in one layer group, in order. It refers to the holds of `blocks` "
      "and has none of its own.")
      .def(
          "__init__",
          [](PyBlockTable* self, const nb::object& blocks, uint32_t group, uint32_t last_block_tokens) {
            if (!nb::isinstance<PyBlocks>(blocks)) {
              throw nb::type_error("a block table is of Blocks; Session.ref makes them of bare refs");
            }
            new (self) PyBlockTable{.blocks = blocks, .group = group, .last_block_tokens = last_block_tokens};
          },
          nb::arg("blocks"), nb::kw_only(), nb::arg("group") = 0, nb::arg("last_block_tokens") = 0,
          nb::sig(
              "def __init__(self, blocks: Blocks, *, group: int = 0, last_block_tokens: int = 0) -> None"))
      .def_prop_ro(
          "blocks", [](const PyBlockTable& table) { return table.blocks; },
          nb::sig("def blocks(self) -> Blocks"))
      .def_ro("group", &PyBlockTable::group, "Layer group.")
      .def_ro("last_block_tokens", &PyBlockTable::last_block_tokens,
              "Valid tokens of the last block; 0: it is full.");
}

using BlocksClass = nb::class_<PyBlocks>;

void BindRefs(BlocksClass& blocks) {
  blocks.def("__len__", [](const PyBlocks& blocks) { return blocks.refs().size(); })
      .def_prop_ro(
          "refs", [](const PyBlocks& blocks) { return Packed(blocks.refs()); },
          "generation << 32 | block number: what verbs take. 0 stands before a window, for no block.")
      .def_prop_ro(
          "ids",
          [](const PyBlocks& blocks) {
            std::vector<uint32_t> ids;
            for (const BlockRef ref : blocks.refs()) ids.push_back(Index(ref.id));
            return ids;
          },
          "Block numbers: indices into the pool's arrays.")
      .def_prop_ro("released", &PyBlocks::released)
      .def("__repr__", [](const PyBlocks& blocks) {
        return blocks.released() ? std::string("<kvpool.Blocks released>")
                                 : absl::StrCat("<kvpool.Blocks of ", blocks.refs().size(), ">");
      });
}

void BindViews(BlocksClass& blocks) {
  blocks
      .def(
          "k",
          [](const PyBlocks& blocks, int64_t index, std::optional<uint32_t> layer, uint32_t group) {
            return PlaneOfBlock(blocks.session(), blocks.at(index), group, false, layer,
                                blocks.writable(index));
          },
          nb::arg("index"), nb::arg("layer") = nb::none(), nb::arg("group") = 0,
          "K of one block: [layers, tokens, heads, dim], without the first axis if `layer` is given.")
      .def(
          "v",
          [](const PyBlocks& blocks, int64_t index, std::optional<uint32_t> layer, uint32_t group) {
            return PlaneOfBlock(blocks.session(), blocks.at(index), group, true, layer,
                                blocks.writable(index));
          },
          nb::arg("index"), nb::arg("layer") = nb::none(), nb::arg("group") = 0, "V of one block, as k().")
      .def(
          "data",
          [](const PyBlocks& blocks, int64_t index) {
            return BytesOfBlock(blocks.session(), blocks.at(index), blocks.writable(index));
          },
          nb::arg("index"), "All bytes of one block.");
}

void BindHolds(BlocksClass& blocks) {
  blocks.def("split", &PyBlocks::Split, nb::arg("count"), "Takes the blocks behind the first `count` out.")
      .def(
          "extend", [](PyBlocks& blocks, PyBlocks& more) { blocks.Extend(&more); }, nb::arg("more"),
          "Takes over what `more` holds, behind its own.")
      .def(
          "release",
          [](PyBlocks& blocks, std::optional<uint64_t> after, const std::string& reuse, uint32_t category) {
            blocks.Release(after, HintOf(reuse, category));
          },
          nb::arg("after") = nb::none(), nb::kw_only(), nb::arg("reuse") = "unspecified",
          nb::arg("category") = 0,
          nb::sig(
              "def release(self, after: int | None = None, *, reuse: Reuse = 'unspecified', category: int "
              "= 0) -> None"),
          "Gives the holds back once step `after` is done: by default the step begun last. Again is\n"
          "nothing.\n\n"
          "`reuse` is advice to the replacement policy: \"expected\" (the conversation goes on),\n"
          "\"unlikely\" (it is over); but \"never\" (a pruned beam) binds: those of the blocks that nobody\n"
          "holds any more leave the cache before all others. `category`: 1 to 15, as the engine numbers\n"
          "its kinds of requests; 0: not said. InvalidArgumentError: a hint that is none, and nothing was\n"
          "given back.")
      .def(
          "detach", [](PyBlocks& blocks) { return Packed(blocks.Take()); },
          "Lets go of the handle and keeps the holds: give the refs back with Session.release.")
      .def(
          "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> Blocks"))
      .def(
          "__exit__", [](PyBlocks& blocks, nb::args) { blocks.Release(std::nullopt); },
          nb::sig("def __exit__(self, *args: object) -> None"));
}

}  // namespace

void BindBlocks(nb::module_& module) {
  BlocksClass blocks(
      module, "Blocks",
      "One hold on each of a list of blocks, in sequence order: leased, or by reference.\n\n"
      "`with` releases them. What is released raises ReleasedError from then on; views that are\n"
      "there keep their blocks held until they are gone.");
  BindRefs(blocks);
  BindViews(blocks);
  BindHolds(blocks);
  BindBlockTable(module);
}

}  // namespace kvpool::python
