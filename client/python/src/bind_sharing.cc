// Sharing blocks: matches, seals, and how long shared blocks stay.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>

#include "client/python/src/bind.h"

namespace kvpool::python {
namespace {

using SessionPtr = std::shared_ptr<SharedSession>;

struct PyHit {
  uint64_t tokens = 0, below_tokens = 0;
  uint32_t below_ms = 0;
  bool may_be_below = false;
  std::string miss;
  std::vector<nb::object> groups;  // Blocks, parallel to those asked for.

  void Release() {
    for (const nb::object& group : groups) nb::cast<PyBlocks&>(group).Release(std::nullopt);
  }
};

struct PySealOutcome {
  std::vector<uint64_t> canonical;
  nb::object duplicates;  // Blocks.
  std::vector<std::tuple<uint32_t, int, std::string>> refused;
};

void BindMatchHit(nb::module_& module) {
  nb::class_<PyHit>(module, "MatchHit", "What a match found, held by reference. `with` releases it.")
      .def_ro("tokens", &PyHit::tokens, "Length of the common prefix.")
      .def_ro("below_tokens", &PyHit::below_tokens,
              "Tokens behind it that are in a tier below the pool, and have not come.")
      .def_ro("below_ms", &PyHit::below_ms, "When they could be here, in milliseconds; 0: not known.")
      .def_ro("may_be_below", &PyHit::may_be_below,
              "More may be there, in a store that nodes share. A match with wait_ms asks it.")
      .def_ro("miss", &PyHit::miss,
              "Why it is not longer: \"none\", \"never_seen\", \"evicted\", ...; see MissReason.")
      .def_prop_ro(
          "groups", [](const PyHit& hit) { return hit.groups; }, nb::sig("def groups(self) -> list[Blocks]"),
          "Parallel to the groups asked for.")
      .def_prop_ro(
          "blocks", [](const PyHit& hit) { return hit.groups.at(0); }, nb::sig("def blocks(self) -> Blocks"),
          "Blocks of the first group.")
      .def("release", &PyHit::Release, "Gives back what was found and not moved elsewhere.")
      .def(
          "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> MatchHit"))
      .def(
          "__exit__", [](PyHit& hit, nb::args) { hit.Release(); },
          nb::sig("def __exit__(self, *args: object) -> None"));

  nb::class_<PyPending<MatchHit>>(module, "PendingMatch",
                                  "A match on its way. May be dropped: then what comes is given back.")
      .def_prop_ro("ready", &PyPending<MatchHit>::ready)
      .def(
          "wait",
          [](PyPending<MatchHit>& pending, Timeout timeout) {
            MatchHit found = pending.Wait(timeout);
            PyHit hit{.tokens = found.tokens,
                      .below_tokens = found.below_tokens,
                      .below_ms = found.below_ms,
                      .may_be_below = found.may_be_below,
                      .miss = NameOf(v1::MissReason_Name(found.miss), "MISS_REASON_")};
            for (Blocks& group : found.groups) {
              hit.groups.push_back(BlocksObject(pending.session(), std::move(group)));
            }
            return hit;
          },
          nb::arg("timeout") = 30.0,
          "Takes the answer, once. DeadlineExceededError: it may be waited for again. With timeout=None it\n"
          "waits without limit.");
}

void BindSealOutcome(nb::module_& module) {
  nb::class_<PySealOutcome>(module, "SealOutcome", "What became of sealed blocks.")
      .def_ro("canonical", &PySealOutcome::canonical,
              "Parallel to the blocks. The block's own ref: sealed. Another: the key existed, `duplicates`\n"
              "holds that block, and the own one stays leased and private. 0: refused, or a duplicate that\n"
              "was to be left.")
      .def_prop_ro(
          "duplicates", [](const PySealOutcome& outcome) { return outcome.duplicates; },
          nb::sig("def duplicates(self) -> Blocks"))
      .def_ro("refused", &PySealOutcome::refused, "(index, code, why) of each block that was not sealed.");

  nb::class_<PyPending<SealOutcome>>(module, "PendingSeal", "A seal on its way. May be dropped.")
      .def_prop_ro("ready", &PyPending<SealOutcome>::ready)
      .def(
          "wait",
          [](PyPending<SealOutcome>& pending, Timeout timeout) {
            SealOutcome sealed = pending.Wait(timeout);
            PySealOutcome outcome{.canonical = Packed(sealed.canonical)};
            outcome.duplicates = BlocksObject(pending.session(), std::move(sealed.duplicates));
            for (const v1::Refusal& refusal : sealed.refused) {
              outcome.refused.emplace_back(refusal.index(), refusal.code(), refusal.message());
            }
            return outcome;
          },
          nb::arg("timeout") = 30.0, "Takes the answer, once.");
}

PyPending<MatchHit> Match(const SessionPtr& session, nb::handle keys, uint32_t group, uint32_t wait_ms,
                          bool prefetch) {
  uint32_t key_bytes = 32;
  const std::string bytes = KeysOf(keys, &key_bytes);
  const GroupKeys asked{.group = group, .keys = bytes, .key_bytes = key_bytes};
  return {session, ValueOf(session->Use([&](Session& open) {
            return open.Match({&asked, 1}, {.wait_ms = wait_ms, .prefetch = prefetch});
          }))};
}

PyPending<MatchHit> MatchGroups(const SessionPtr& session,
                                const std::vector<std::pair<uint32_t, nb::object>>& groups, uint32_t wait_ms,
                                bool prefetch) {
  std::vector<std::string> bytes(groups.size());
  std::vector<GroupKeys> asked(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    asked[i].group = groups[i].first;
    bytes[i] = KeysOf(groups[i].second, &asked[i].key_bytes);
    asked[i].keys = bytes[i];
  }
  return {session, ValueOf(session->Use([&](Session& open) {
            return open.Match(asked, {.wait_ms = wait_ms, .prefetch = prefetch});
          }))};
}

PyPending<SealOutcome> Seal(const SessionPtr& session, nb::handle blocks, nb::handle keys,
                            std::optional<nb::bytes> parent_key, uint32_t group, uint32_t keys_per_block,
                            std::optional<uint64_t> after, bool leave_duplicates) {
  uint32_t key_bytes = 32;
  const std::vector<BlockRef> refs = RefsOf(blocks);
  const std::string bytes = KeysOf(keys, &key_bytes);
  const std::string parent =
      parent_key.has_value() ? std::string(parent_key->c_str(), parent_key->size()) : "";
  PyPending<SealOutcome> pending(session, ValueOf(session->Use([&](Session& open) {
                                   return open.Seal({.group = group,
                                                     .blocks = refs,
                                                     .keys = bytes,
                                                     .key_bytes = key_bytes,
                                                     .keys_per_block = keys_per_block,
                                                     .parent_key = parent,
                                                     .leave_duplicates = leave_duplicates,
                                                     .after = StepOf(after)});
                                 })));
  if (nb::isinstance<PyBlocks>(blocks)) nb::cast<PyBlocks&>(blocks).MarkSealed();
  return pending;
}

PyBlocks Ref(const SessionPtr& session, nb::handle blocks) {
  const std::vector<BlockRef> refs = RefsOf(blocks);
  session->Use([&](Session& open) { ValueOf(open.Ref(refs)).Detach(); });
  return PyBlocks(session, refs, false);
}

using SessionClass = nb::class_<SharedSession>;

void BindVerbs(SessionClass& session) {
  session
      .def("match", Match, nb::arg("keys"), nb::arg("group") = 0, nb::kw_only(), nb::arg("wait_ms") = 0,
           nb::arg("prefetch") = false,
           nb::sig("def match(self, keys: bytes | collections.abc.Sequence[bytes], group: int = 0, *, "
                   "wait_ms: int = 0, prefetch: bool = False) -> PendingMatch"),
           "Finds the longest resident prefix, and takes holds on it. What is behind it in a tier below the\n"
           "pool is brought up: with `wait_ms` the answer waits for it, so long at most (60000), and with\n"
           "`prefetch` it does not.")
      .def(
          "match_groups", MatchGroups, nb::arg("groups"), nb::kw_only(), nb::arg("wait_ms") = 0,
          nb::arg("prefetch") = false,
          nb::sig("def match_groups(self, groups: collections.abc.Sequence[tuple[int, bytes | "
                  "collections.abc.Sequence[bytes]]], *, wait_ms: int = 0, prefetch: bool = False) -> "
                  "PendingMatch"),
          "The same for several groups at once, [(group, keys)]: the longest prefix resident in every group.")
      .def(
          "seal", Seal, nb::arg("blocks"), nb::arg("keys"), nb::kw_only(), nb::arg("parent_key") = nb::none(),
          nb::arg("group") = 0, nb::arg("keys_per_block") = 1, nb::arg("after") = nb::none(),
          nb::arg("leave_duplicates") = false,
          nb::sig("def seal(self, blocks: Refs, keys: bytes | collections.abc.Sequence[bytes], *, "
                  "parent_key: bytes | None = None, group: int = 0, keys_per_block: int = 1, after: int | "
                  "None = None, leave_duplicates: bool = False) -> PendingSeal"),
          "Makes full blocks immutable and findable, once step `after` is done. `parent_key` is that of the\n"
          "block before the first. Views of these Blocks are read-only from then on; arrays taken before\n"
          "stay writable, and must not be written. Where a key exists already the block that has it is\n"
          "held, which takes credit; with `leave_duplicates` it is not. The caller's own block is kept\n"
          "either way.")
      .def("ref", Ref, nb::arg("blocks"), nb::sig("def ref(self, blocks: Refs) -> Blocks"),
           "Takes one more hold on blocks that this session holds.")
      .def(
          "touch",
          [](const SessionPtr& s, nb::handle blocks) {
            const std::vector<BlockRef> refs = RefsOf(blocks);
            Check(s->Use([&](Session& open) { return open.Touch(refs); }));
          },
          nb::arg("blocks"), nb::sig("def touch(self, blocks: Refs) -> None"),
          "Tells the replacement policy that the blocks were used now.");
}

// How long blocks stay.
void BindRetention(SessionClass& session) {
  session
      .def(
          "pin",
          [](const SessionPtr& s, nb::handle blocks, double ttl) {
            const std::vector<BlockRef> refs = RefsOf(blocks);
            const std::chrono::milliseconds time = TimeOf(ttl, "ttl");
            Check(s->Use([&](Session& open) { return open.Pin(refs, time); }));
          },
          nb::arg("blocks"), nb::arg("ttl"), nb::sig("def pin(self, blocks: Refs, ttl: float) -> None"),
          "Protects sealed blocks for `ttl` seconds, more than 0 and up to 86400 (InvalidArgumentError).\n"
          "Blocks beyond the tenant's budget are in take_refusals().")
      .def(
          "unpin",
          [](const SessionPtr& s, nb::handle blocks) {
            const std::vector<BlockRef> refs = RefsOf(blocks);
            Check(s->Use([&](Session& open) { return open.Unpin(refs); }));
          },
          nb::arg("blocks"), nb::sig("def unpin(self, blocks: Refs) -> None"), "Ends pins early.")
      .def(
          "set_retention",
          [](const SessionPtr& s, nb::handle blocks, uint32_t priority, double ttl, double half_life) {
            const std::vector<BlockRef> refs = RefsOf(blocks);
            const std::chrono::milliseconds time = TimeOf(ttl, "ttl");
            const std::chrono::milliseconds half = TimeOf(half_life, "half_life");
            Check(s->Use([&](Session& open) { return open.SetRetention(refs, priority, time, half); }));
          },
          nb::arg("blocks"), nb::arg("priority"), nb::arg("ttl"), nb::kw_only(), nb::arg("half_life") = 0.0,
          nb::sig(
              "def set_retention(self, blocks: Refs, priority: int, ttl: float, *, half_life: float = 0.0) "
              "-> None"),
          "Sets the priority of sealed blocks, 0 to 100: cached blocks of lower priority leave first. The\n"
          "default is 50, to which the blocks return after `ttl` seconds (more than 0 and up to 86400). In\n"
          "each `half_life` seconds the priority moves half the way to 50; 0: it stays. Both times count in\n"
          "milliseconds. InvalidArgumentError: beyond a limit. Above 50 a block counts against the tenant's\n"
          "budget, like a pin: blocks beyond that are in take_refusals().")
      .def(
          "report_prefill",
          [](const SessionPtr& s, uint64_t tokens, uint64_t tokens_before, uint64_t microseconds) {
            const std::chrono::microseconds time(std::min<uint64_t>(microseconds, INT64_MAX));
            Check(s->Use([&](Session& open) { return open.ReportPrefill(tokens, tokens_before, time); }));
          },
          nb::arg("tokens"), nb::arg("tokens_before"), nb::arg("microseconds"),
          nb::sig("def report_prefill(self, tokens: int, tokens_before: int, microseconds: int) -> None"),
          "A prefill of `tokens` behind `tokens_before` others took so long, in a step of the engine with "
          "nothing\n"
          "else to speak of. The daemon learns from it whether to load what is below the pool, or to have "
          "it\n"
          "computed again. InvalidArgumentError: beyond a limit (2**24 tokens, 2**32 before, an hour).");
}

}  // namespace

void BindSharing(nb::module_& module) {
  BindMatchHit(module);
  BindSealOutcome(module);
  auto session = nb::borrow<nb::class_<SharedSession>>(nb::type<SharedSession>());
  BindVerbs(session);
  BindRetention(session);
}

}  // namespace kvpool::python
