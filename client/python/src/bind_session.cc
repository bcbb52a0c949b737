// Sessions, matches, seals, notices.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "client/prefix_hasher.h"
#include "client/python/src/bind.h"
#include "client/python/src/view.h"

namespace kvpool::python {
namespace {

using SessionPtr = std::shared_ptr<SharedSession>;

struct PyNotice {
  std::string kind;
  bool on = false;
  uint64_t value = 0;
  std::string detail;
};

struct PyHit {
  uint64_t tokens = 0;
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

nb::object BlocksObject(const SessionPtr& session, Blocks holds) {
  const auto refs = holds.Detach();
  return nb::cast(PyBlocks(session, {refs.begin(), refs.end()}, false));
}

void BindAnswers(nb::module_& module) {
  nb::class_<PyNotice>(module, "Notice",
                       "What the daemon wants the engine to know; see NoticeKind in engine.proto.")
      .def_ro("kind", &PyNotice::kind, "\"pressure\", \"revoke\", \"capacity\", \"drain\" or \"ended\".")
      .def_ro("on", &PyNotice::on, "The condition holds.")
      .def_ro("value", &PyNotice::value,
              "Of pressure: blocks available; of revoke: blocks asked for; of capacity: blocks.")
      .def_ro("detail", &PyNotice::detail, "For people.")
      .def("__repr__", [](const PyNotice& notice) {
        return absl::StrCat("<kvpool.Notice ", notice.kind, notice.on ? "" : " off", " ", notice.value, " ",
                            notice.detail, ">");
      });

  nb::class_<PyHit>(module, "MatchHit", "What a match found, held by reference. `with` releases it.")
      .def_ro("tokens", &PyHit::tokens, "Length of the common prefix.")
      .def_ro("miss", &PyHit::miss,
              "Why it is not longer: \"none\", \"never_seen\", \"evicted\", ...; see MissReason.")
      .def_prop_ro(
          "groups", [](const PyHit& hit) { return hit.groups; }, nb::sig("def groups(self) -> list[Blocks]"),
          "Parallel to the groups asked for.")
      .def_prop_ro(
          "blocks", [](const PyHit& hit) { return hit.groups.at(0); }, nb::sig("def blocks(self) -> Blocks"),
          "Of the first group.")
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
                      .miss = NameOf(v1::MissReason_Name(found.miss), "MISS_REASON_")};
            for (Blocks& group : found.groups) {
              hit.groups.push_back(BlocksObject(pending.session(), std::move(group)));
            }
            return hit;
          },
          nb::arg("timeout") = 30.0,
          "Takes the answer, once. DeadlineExceededError: it may be asked for again. Without a timeout: for "
          "ever.");

  nb::class_<PySealOutcome>(module, "SealOutcome", "What became of sealed blocks.")
      .def_ro("canonical", &PySealOutcome::canonical,
              "Parallel to the blocks. The block's own ref: sealed. Another: the key existed, `duplicates` "
              "holds that block,\n"
              "and the own one stays leased and private. 0: refused.")
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

SessionPtr OpenSession(const PyLayout& layout, nb::handle fingerprint,
                       const std::map<std::string, std::string>& facts, const std::string& socket,
                       const std::string& tenant, const std::string& client_name, uint32_t rank,
                       uint32_t ranks, bool scheduler, const std::vector<std::string>& device_uuids,
                       const std::string& kind, uint64_t max_space_bytes, uint32_t guaranteed_blocks,
                       uint32_t max_blocks, bool warmup, uint32_t magazine_blocks, double open_timeout,
                       std::optional<nb::bytes> invitation) {
  SessionOptions options;
  options.socket = socket;
  options.tenant = tenant;
  options.client_name = client_name;
  options.layout = layout.proto;
  if (nb::isinstance<nb::bytes>(fingerprint)) {
    const auto digest = nb::borrow<nb::bytes>(fingerprint);
    options.fingerprint.set_digest(digest.c_str(), digest.size());
  } else {
    options.fingerprint.set_digest(nb::cast<std::string>(fingerprint));
  }
  for (const auto& [name, value] : facts) (*options.fingerprint.mutable_facts())[name] = value;
  options.role.set_scheduler(scheduler);
  options.role.set_rank(rank);
  options.ranks = ranks;
  options.device_uuids = device_uuids;
  options.kind =
      EnumOf<v1::SpaceKind>(kind.empty() ? "unspecified" : kind, "SPACE_KIND_", "kind", &v1::SpaceKind_Parse);
  options.max_space_bytes = max_space_bytes;
  options.guaranteed_blocks = guaranteed_blocks;
  options.max_blocks = max_blocks;
  options.warmup = warmup;
  options.magazine_blocks = magazine_blocks;
  options.open_timeout = std::chrono::milliseconds(static_cast<int64_t>(open_timeout * 1000));
  const std::string proof =
      invitation.has_value() ? std::string(invitation->c_str(), invitation->size()) : "";
  nb::gil_scoped_release released;
  return SharedSession::Open(std::move(options), proof);
}

PyBlocks Lease(const SessionPtr& session, uint32_t count, Timeout timeout) {
  std::vector<BlockRef> refs(count);
  Check(Await(timeout, [&](Deadline deadline) -> absl::Status {
    while (true) {
      const uint64_t refills = session->shared().counters().refills;
      const absl::Status leased =
          session->UseWithoutGil([&](Session& open) { return open.LeaseRefs(absl::MakeSpan(refs)); });
      if (!absl::IsResourceExhausted(leased)) return leased;
      // Not in a turn: others may be about to give back what this waits for.
      if (session->shared().AwaitRefill(refills, deadline)) continue;
      return timeout.has_value() && *timeout <= 0 ? leased : absl::DeadlineExceededError(leased.message());
    }
  }));
  return PyBlocks(session, std::move(refs), true);
}

PyPending<MatchHit> Match(const SessionPtr& session, nb::handle keys, uint32_t group) {
  uint32_t key_bytes = 32;
  const std::string bytes = KeysOf(keys, &key_bytes);
  const GroupKeys asked{.group = group, .keys = bytes, .key_bytes = key_bytes};
  return {session, ValueOf(session->Use([&](Session& open) { return open.Match({&asked, 1}); }))};
}

PyPending<MatchHit> MatchGroups(const SessionPtr& session,
                                const std::vector<std::pair<uint32_t, nb::object>>& groups) {
  std::vector<std::string> bytes(groups.size());
  std::vector<GroupKeys> asked(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    asked[i].group = groups[i].first;
    bytes[i] = KeysOf(groups[i].second, &asked[i].key_bytes);
    asked[i].keys = bytes[i];
  }
  return {session, ValueOf(session->Use([&](Session& open) { return open.Match(asked); }))};
}

PyPending<SealOutcome> Seal(const SessionPtr& session, nb::handle blocks, nb::handle keys,
                            std::optional<nb::bytes> parent_key, uint32_t group, uint32_t keys_per_block,
                            std::optional<uint64_t> after) {
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

std::optional<PyNotice> NextNotice(const SessionPtr& session, Timeout timeout) {
  const absl::StatusOr<v1::Notice> next =
      Await(timeout, [&](Deadline deadline) -> absl::StatusOr<v1::Notice> {
        std::optional<v1::Notice> notice = session->NextNotice(deadline);
        if (notice.has_value()) return *std::move(notice);
        return absl::DeadlineExceededError("no notice");
      });
  if (!next.ok()) return std::nullopt;
  return PyNotice{.kind = NameOf(v1::NoticeKind_Name(next->kind()), "NOTICE_KIND_"),
                  .on = next->on(),
                  .value = next->value(),
                  .detail = next->detail()};
}

bool CloseSession(const SessionPtr& session, double timeout) {
  nb::gil_scoped_release released;
  return session->Close(DeadlineOf(timeout));
}

uint64_t CurrentStep(const SessionPtr& session) {
  return session->Use([](Session& open) { return open.current_step(); });
}

// Kernels of an unfinished step may still run, in an engine that left by an exception: then the session hangs up, and its
// blocks come free with its processes.
void LeaveSession(const SessionPtr& session) {
  if (session->closed()) return;
  if (CurrentStep(session) > session->shared().passed_step()) {
    session->Abandon();
    return;
  }
  CloseSession(session, 5.0);
}

using SessionClass = nb::class_<SharedSession>;

void BindFacts(SessionClass& session) {
  session
      .def_prop_ro(
          "id", [](const SharedSession& s) { return s.shared().id(); }, "As the daemon's tools show it.")
      .def(
          "invitation", [](const SharedSession& s) { return BytesOf(s.shared().Invitation()); },
          "Lets another process join; secret.")
      .def_prop_ro("hash_seed", [](const SharedSession& s) { return BytesOf(s.shared().hash_seed()); })
      .def(
          "hasher",
          [](const SharedSession& s, const nb::bytes& salt) {
            return PrefixHasher(s.shared().hash_seed(), {salt.c_str(), salt.size()});
          },
          nb::arg("salt") = nb::bytes(""),
          "Makes keys of this space. Another salt: prefixes that are not shared.")
      .def_prop_ro("layout", [](const SharedSession& s) { return PyLayout{s.shared().layout()}; })
      .def_prop_ro("block_stride_bytes",
                   [](const SharedSession& s) { return s.shared().block_stride_bytes(); })
      .def_prop_ro(
          "max_blocks", [](const SharedSession& s) { return s.shared().max_blocks(); },
          "Most the space can have, the null block included.")
      .def_prop_ro(
          "capacity_blocks", [](const SharedSession& s) { return s.shared().capacity_blocks(); },
          "Usable now, the null block included.")
      .def_prop_ro(
          "mapped_blocks", [](const SharedSession& s) { return s.shared().mapped_blocks(); },
          "Mapped in this process, the null block included.")
      .def_prop_ro(
          "sink_block", [](const SharedSession& s) { return s.shared().sink_block().Pack(); },
          "Ref of the block for padding writes.")
      .def_prop_ro(
          "base", [](const SharedSession& s) { return s.shared().base(); }, "Address of block 0.")
      .def_prop_ro(
          "free_blocks", [](const SharedSession& s) { return s.shared().free_blocks(); },
          "Blocks that lease() gets for sure.")
      .def_prop_ro("under_pressure", [](const SharedSession& s) { return s.shared().under_pressure(); })
      .def_prop_ro("draining", [](const SharedSession& s) { return s.shared().draining(); })
      .def_prop_ro("views", &SharedSession::views,
                   "Views of blocks that are there, arrays made from them included.")
      .def_prop_ro("closed", &SharedSession::closed)
      .def(
          "check",
          [](const SharedSession& s) {
            s.CheckUsable();
            Check(s.shared().status());
          },
          "Raises what has ended the session: SessionEndedError, UnavailableError and why.")
      .def_prop_ro(
          "counters",
          [](const SharedSession& s) {
            const SessionCounters counters = s.shared().counters();
            nb::dict all;
            all["batches"] = counters.batches;
            all["operations"] = counters.operations;
            all["blocks"] = counters.blocks;
            all["leased"] = counters.leased;
            all["refills"] = counters.refills;
            all["refused"] = counters.refused;
            all["reconnects"] = counters.reconnects;
            return all;
          },
          nb::sig("def counters(self) -> dict[str, int]"), "See SessionCounters in client/session.h.");
}

void BindMemory(SessionClass& session) {
  session
      .def(
          "k",
          [](const SessionPtr& s, std::optional<uint32_t> layer, uint32_t group,
             std::optional<uint32_t> blocks) {
            s->CheckUsable();
            return PlaneOfPool(s, group, false, layer, blocks);
          },
          nb::arg("layer") = nb::none(), nb::arg("group") = 0, nb::arg("blocks") = nb::none(),
          "K of the whole pool: [blocks, layers, tokens, heads, dim], without the second axis if `layer` is "
          "given.\n\n"
          "By default of the blocks mapped now; max_blocks takes the whole range, of which what is not "
          "mapped yet must\n"
          "not be touched. Such an array keeps memory mapped and holds no block: read and write blocks that "
          "you hold.")
      .def(
          "v",
          [](const SessionPtr& s, std::optional<uint32_t> layer, uint32_t group,
             std::optional<uint32_t> blocks) {
            s->CheckUsable();
            return PlaneOfPool(s, group, true, layer, blocks);
          },
          nb::arg("layer") = nb::none(), nb::arg("group") = 0, nb::arg("blocks") = nb::none(),
          "V of the pool, as k().")
      .def(
          "data",
          [](const SessionPtr& s, std::optional<uint32_t> blocks) {
            s->CheckUsable();
            return BytesOfPool(s, blocks);
          },
          nb::arg("blocks") = nb::none(), "All bytes: [blocks, block_bytes]; see k().")
      .def(
          "finish_warmup",
          [](const SessionPtr& s) { Check(s->Use([](Session& open) { return open.FinishWarmup(); })); },
          "Maps the pool over the scratch of a session opened with warmup=True.");
}

void BindVerbs(SessionClass& session) {
  session
      .def(
          "begin_step",
          [](const SessionPtr& s, std::optional<uint64_t> step) {
            return s->Use([&](Session& open) {
              if (!step.has_value()) return open.BeginStep();
              open.BeginStep(*step);
              return open.current_step();
            });
          },
          nb::arg("step") = nb::none(),
          "Work launched from now on belongs to a new step, whose number is returned.")
      .def_prop_ro("current_step", [](const SessionPtr& s) { return CurrentStep(s); })
      .def_prop_ro(
          "passed_step", [](const SharedSession& s) { return s.shared().passed_step(); },
          "All members are done with it, as far as is known here.")
      .def(
          "complete_step",
          [](const SessionPtr& s, std::optional<uint64_t> step) {
            s->shared().CompleteStep(step.has_value() ? *step : CurrentStep(s));
          },
          nb::arg("step") = nb::none(), "This member is done with everything through `step`.")
      .def(
          "complete_step_on_stream",
          [](const SessionPtr& s, uint64_t step, uint64_t cuda_stream) {
            Check(s->Use([&](Session& open) {
              return open.CompleteStepOnStream(step, reinterpret_cast<void*>(cuda_stream));
            }));
          },
          nb::arg("step"), nb::arg("cuda_stream"),
          "The same, when the work that is on the stream now is done.")
      .def("lease", Lease, nb::arg("count"), nb::arg("timeout") = 30.0,
           "Blocks to write, all or none. timeout=0: those at hand, or ResourceExhaustedError; otherwise "
           "waits for refills, and\n"
           "raises DeadlineExceededError with the daemon's reason.")
      .def(
          "release",
          [](const SessionPtr& s, nb::handle blocks, std::optional<uint64_t> after) {
            if (nb::isinstance<PyBlocks>(blocks)) return nb::cast<PyBlocks&>(blocks).Release(after);
            const std::vector<BlockRef> refs = RefsOf(blocks);
            s->Use([&](Session&) { s->GiveBack(refs, StepOf(after)); });
          },
          nb::arg("blocks"), nb::arg("after") = nb::none(),
          nb::sig("def release(self, blocks: Refs, after: int | None = None) -> None"),
          "Gives back one hold on each.")
      .def("match", Match, nb::arg("keys"), nb::arg("group") = 0,
           nb::sig("def match(self, keys: bytes | collections.abc.Sequence[bytes], group: int = 0) -> "
                   "PendingMatch"),
           "Finds the longest prefix that is there, and holds it.")
      .def("match_groups", MatchGroups, nb::arg("groups"),
           nb::sig("def match_groups(self, groups: collections.abc.Sequence[tuple[int, bytes | "
                   "collections.abc.Sequence[bytes]]]) -> PendingMatch"),
           "The longest that is there in every group: [(group, keys)].")
      .def("seal", Seal, nb::arg("blocks"), nb::arg("keys"), nb::kw_only(),
           nb::arg("parent_key") = nb::none(), nb::arg("group") = 0, nb::arg("keys_per_block") = 1,
           nb::arg("after") = nb::none(),
           nb::sig("def seal(self, blocks: Refs, keys: bytes | collections.abc.Sequence[bytes], *, "
                   "parent_key: bytes | None = "
                   "None, group: int = 0, keys_per_block: int = 1, after: int | None = None) -> PendingSeal"),
           "Makes full blocks immutable and findable, once step `after` is done. `parent_key`: of the block "
           "before the first.\n"
           "Views of these Blocks are read-only from then on; arrays taken before stay writable, and must "
           "not be written.")
      .def("ref", Ref, nb::arg("blocks"), nb::sig("def ref(self, blocks: Refs) -> Blocks"),
           "One more hold on blocks that this session holds.")
      .def(
          "touch",
          [](const SessionPtr& s, nb::handle blocks) {
            const std::vector<BlockRef> refs = RefsOf(blocks);
            Check(s->Use([&](Session& open) { return open.Touch(refs); }));
          },
          nb::arg("blocks"), nb::sig("def touch(self, blocks: Refs) -> None"),
          "They were used now, for the replacement policy.")
      .def(
          "pin",
          [](const SessionPtr& s, nb::handle blocks, double ttl) {
            const std::vector<BlockRef> refs = RefsOf(blocks);
            Check(s->Use([&](Session& open) {
              return open.Pin(refs, std::chrono::milliseconds(static_cast<int64_t>(ttl * 1000)));
            }));
          },
          nb::arg("blocks"), nb::arg("ttl"), nb::sig("def pin(self, blocks: Refs, ttl: float) -> None"),
          "Sealed blocks stay for `ttl` seconds.")
      .def(
          "unpin",
          [](const SessionPtr& s, nb::handle blocks) {
            const std::vector<BlockRef> refs = RefsOf(blocks);
            Check(s->Use([&](Session& open) { return open.Unpin(refs); }));
          },
          nb::arg("blocks"), nb::sig("def unpin(self, blocks: Refs) -> None"))
      .def(
          "set_retention",
          [](const SessionPtr& s, nb::handle blocks, uint32_t priority, double ttl) {
            const std::vector<BlockRef> refs = RefsOf(blocks);
            Check(s->Use([&](Session& open) {
              return open.SetRetention(refs, priority,
                                       std::chrono::milliseconds(static_cast<int64_t>(ttl * 1000)));
            }));
          },
          nb::arg("blocks"), nb::arg("priority"), nb::arg("ttl"),
          nb::sig("def set_retention(self, blocks: Refs, priority: int, ttl: float) -> None"),
          "How dear sealed blocks are to the replacement policy, 0 to 100 (50 by itself), for `ttl` seconds.")
      .def(
          "flush",
          [](const SessionPtr& s, Timeout timeout) {
            const Deadline deadline = DeadlineOf(timeout);
            Check(s->Use([&](Session& open) { return open.Flush(deadline); }));
          },
          nb::arg("timeout") = 30.0, "Waits until all that was queued before is answered.")
      .def("next_notice", NextNotice, nb::arg("timeout") = 0.0,
           "The oldest notice of the daemon that was not taken yet (of each kind only the newest is kept), "
           "or None when the\n"
           "timeout is over.");
}

}  // namespace

void BindSession(nb::module_& module) {
  BindAnswers(module);
  SessionClass session(module, "Session", nb::dynamic_attr(), nb::is_weak_referenceable(),
                       "An engine's hold on a space of KV blocks; see client/session.h. `with` closes it.\n\n"
                       "Any number of Python threads may use it: their calls take turns, and waiting is done "
                       "without the GIL.");
  session.def(nb::new_(&OpenSession), nb::arg("layout"), nb::arg("fingerprint"), nb::kw_only(),
              nb::arg("facts") = std::map<std::string, std::string>(), nb::arg("socket") = "",
              nb::arg("tenant") = "", nb::arg("client_name") = "", nb::arg("rank") = 0, nb::arg("ranks") = 1,
              nb::arg("scheduler") = false, nb::arg("device_uuids") = std::vector<std::string>(),
              nb::arg("kind") = "", nb::arg("max_space_bytes") = 0, nb::arg("guaranteed_blocks") = 0,
              nb::arg("max_blocks") = 0, nb::arg("warmup") = false, nb::arg("magazine_blocks") = 256,
              nb::arg("open_timeout") = 30.0, nb::arg("invitation") = nb::none(),
              "Opens a session, or with an invitation joins one; SessionOptions in client/session.h says "
              "what each means.");
  BindFacts(session);
  BindMemory(session);
  BindVerbs(session);
  session
      .def("close", CloseSession, nb::arg("timeout") = 5.0,
           "Ends the session and gives back all that it holds: no member has work on the device any more. "
           "False: views of its\n"
           "blocks are still there, and it ends with the last of them.")
      .def(
          "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> Session"))
      .def(
          "__exit__", [](const SessionPtr& s, nb::args) { LeaveSession(s); },
          nb::sig("def __exit__(self, *args: object) -> None"));
  module.def(
      "close_all",
      [] {
        nb::gil_scoped_release released;
        SharedSession::CloseAll();
      },
      "Ends the process' sessions.");
}

}  // namespace kvpool::python
