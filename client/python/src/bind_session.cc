// Sessions: opening, properties, steps, leases, notices.
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
#include "client/python/src/gil.h"
#include "client/python/src/view.h"

namespace kvpool::python {
namespace {

using SessionPtr = std::shared_ptr<SharedSession>;

struct PyNotice {
  std::string kind;
  bool on = false;
  uint64_t value = 0;
  std::string detail;
  std::optional<double> within;
};

void BindNotice(nb::module_& module) {
  nb::class_<PyNotice>(module, "Notice",
                       "What the daemon wants the engine to know; see NoticeKind in engine.proto.")
      .def_ro("kind", &PyNotice::kind, "\"pressure\", \"revoke\", \"capacity\", \"drain\" or \"ended\".")
      .def_ro("on", &PyNotice::on, "The condition holds.")
      .def_ro("value", &PyNotice::value,
              "pressure: blocks available; revoke: blocks asked for; capacity: blocks.")
      .def_ro("detail", &PyNotice::detail, "An explanation for people.")
      .def_ro(
          "within", &PyNotice::within,
          "revoke: what is given back within so many seconds counts for who asked, and later than that the\n"
          "session is late. None: it counts whenever it comes.")
      .def("__repr__", [](const PyNotice& notice) {
        return absl::StrCat("<kvpool.Notice ", notice.kind, notice.on ? "" : " off", " ", notice.value, " ",
                            notice.detail, ">");
      });
}

GiveBack GiveBackOf(const std::string& name) {
  if (name == "never") return GiveBack::kNever;
  if (name == "by_call") return GiveBack::kByCall;
  if (name == "any_time") return GiveBack::kAnyTime;
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat("give_back is \"", name, "\"; must be \"never\", \"by_call\" or \"any_time\"")));
}

SessionPtr OpenSession(const PyLayout& layout, nb::handle fingerprint,
                       const std::map<std::string, std::string>& facts, const std::string& socket,
                       const std::string& tenant, const std::string& client_name, uint32_t rank,
                       uint32_t ranks, bool scheduler, const std::vector<std::string>& device_uuids,
                       const std::string& kind, uint64_t max_space_bytes, uint32_t guaranteed_blocks,
                       uint32_t max_blocks, bool warmup, uint32_t magazine_blocks, double open_timeout,
                       std::optional<nb::bytes> invitation, const std::string& give_back, bool holes,
                       const std::string& priority) {
  SessionOptions options;
  options.socket = socket;
  options.tenant = tenant;
  options.client_name = client_name;
  options.layout = layout.proto;
  if (nb::isinstance<nb::bytes>(fingerprint)) {
    const auto digest = nb::borrow<nb::bytes>(fingerprint);
    options.fingerprint.set_digest(digest.c_str(), digest.size());
  } else {
    std::string digest;
    if (!nb::try_cast(fingerprint, digest)) throw TypeErrorOf("fingerprint", fingerprint, "bytes or a str");
    options.fingerprint.set_digest(digest);
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
  options.give_back = GiveBackOf(give_back);
  options.holes = holes;
  options.priority_class = EnumOf<v1::PriorityClass>(priority.empty() ? "unspecified" : priority,
                                                     "PRIORITY_CLASS_", "priority", &v1::PriorityClass_Parse);
  options.magazine_blocks = magazine_blocks;
  options.open_timeout = std::chrono::milliseconds(static_cast<int64_t>(open_timeout * 1000));
  const std::string proof =
      invitation.has_value() ? std::string(invitation->c_str(), invitation->size()) : "";
  const GilRelease released;
  return SharedSession::Open(std::move(options), proof);
}

PyBlocks Lease(const SessionPtr& session, uint32_t count, Timeout timeout) {
  const uint32_t most = session->shared().most_leased_blocks();
  if (count > most) {  // It says why, and is not worth a wait, nor memory for as many refs.
    ValueOf(session->Use([&](Session& open) { return open.Lease(count); }));
  }
  std::vector<BlockRef> refs(count);
  Check(Await(timeout, [&](Deadline deadline) -> absl::Status {
    while (true) {
      const uint64_t refills = session->shared().counters().refills;
      const absl::Status leased =
          session->UseWithoutGil([&](Session& open) { return open.LeaseRefs(absl::MakeSpan(refs)); });
      if (!absl::IsResourceExhausted(leased)) return leased;
      // Outside a turn: other threads may be about to give back what this one waits for.
      if (session->shared().AwaitRefill(refills, deadline)) continue;
      return timeout.has_value() && *timeout <= 0 ? leased : absl::DeadlineExceededError(leased.message());
    }
  }));
  return PyBlocks(session, std::move(refs), true);
}

std::optional<PyNotice> NextNotice(const SessionPtr& session, Timeout timeout) {
  const absl::StatusOr<v1::Notice> next =
      Await(timeout, [&](Deadline deadline) -> absl::StatusOr<v1::Notice> {
        std::optional<v1::Notice> notice = session->NextNotice(deadline);
        if (notice.has_value()) return *std::move(notice);
        return absl::DeadlineExceededError("no notice");
      });
  if (!next.ok()) return std::nullopt;
  std::optional<double> within;
  if (next->deadline_ms() > 0) within = static_cast<double>(next->deadline_ms()) / 1000;
  return PyNotice{.kind = NameOf(v1::NoticeKind_Name(next->kind()), "NOTICE_KIND_"),
                  .on = next->on(),
                  .value = next->value(),
                  .detail = next->detail(),
                  .within = within};
}

bool CloseSession(const SessionPtr& session, double timeout) {
  const GilRelease released;
  return session->Close(DeadlineOf(timeout));
}

uint64_t CurrentStep(const SessionPtr& session) {
  return session->Use([](Session& open) { return open.current_step(); });
}

// Kernels of an unfinished step may still run, in an engine that left by an exception: then the session hangs
// up, and its blocks come free with its processes.
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
          "id", [](const SharedSession& s) { return s.shared().id(); },
          "The session's number, which the daemon's tools show.")
      .def(
          "invitation", [](const SharedSession& s) { return BytesOf(s.shared().Invitation()); },
          "Bytes that let another process join; secret.")
      .def_prop_ro("hash_seed", [](const SharedSession& s) { return BytesOf(s.shared().hash_seed()); })
      .def(
          "hasher",
          [](const SharedSession& s, const nb::bytes& salt, nb::handle salt_from) {
            return PrefixHasher(s.shared().hash_seed(), {salt.c_str(), salt.size()},
                                PositionOf(salt_from, "salt_from"));
          },
          nb::arg("salt") = nb::bytes(""), nb::kw_only(), nb::arg("salt_from") = 0,
          nb::sig("def hasher(self, salt: bytes = b'', *, salt_from: int = 0) -> PrefixHasher"),
          "Makes keys of this space. Another salt: prefixes that are not shared. salt_from: the salt counts "
          "from\n"
          "the block that holds the token at this position on, and what is in front is shared with "
          "everybody.")
      .def_prop_ro("layout", [](const SharedSession& s) { return PyLayout{s.shared().layout()}; })
      .def_prop_ro("block_stride_bytes",
                   [](const SharedSession& s) { return s.shared().block_stride_bytes(); })
      .def_prop_ro(
          "max_blocks", [](const SharedSession& s) { return s.shared().max_blocks(); },
          "The most blocks that the space can ever have, the null block included.")
      .def_prop_ro(
          "capacity_blocks", [](const SharedSession& s) { return s.shared().capacity_blocks(); },
          "So many blocks are usable now, the null block included.")
      .def_prop_ro(
          "mapped_blocks", [](const SharedSession& s) { return s.shared().mapped_blocks(); },
          "All blocks that are mapped in this process are below this one.")
      .def_prop_ro(
          "mapped_ranges", [](const SharedSession& s) { return s.shared().mapped_ranges(); },
          "Which these are, as pairs of the first one and the one behind the last: one pair, but where a "
          "slab in\n"
          "front of others was given back. What lies between two is not to be touched.")
      .def_prop_ro(
          "slabs_asked_back", [](const SharedSession& s) { return s.shared().slabs_asked_back(); },
          "Slabs that wait for give_back_slabs().")
      .def_prop_ro(
          "asked_back_within",
          [](const SharedSession& s) -> std::optional<double> {
            const auto within = s.shared().asked_back_within();
            if (!within.has_value()) return std::nullopt;
            return static_cast<double>(within->count()) / 1000;
          },
          "For how many more seconds give_back_slabs() counts: after that the daemon takes its wish back, "
          "and\n"
          "the session is late. None: nothing is asked back, or the daemon does not say.")
      .def_prop_ro(
          "sink_block", [](const SharedSession& s) { return s.shared().sink_block().Pack(); },
          "Ref of the block for padding writes.")
      .def_prop_ro(
          "base", [](const SharedSession& s) { return s.shared().base(); }, "Address of block 0.")
      .def_prop_ro(
          "free_blocks", [](const SharedSession& s) { return s.shared().free_blocks(); },
          "Blocks that lease() gets for sure.")
      .def_prop_ro("under_pressure", [](const SharedSession& s) { return s.shared().under_pressure(); })
      .def_prop_ro(
          "device_uuid", [](const SharedSession& s) { return BytesOf(s.shared().device_uuid()); },
          "16 bytes of the GPU that the memory is on; none: host memory.")
      .def_prop_ro("draining", [](const SharedSession& s) { return s.shared().draining(); })
      .def_prop_ro("views", &SharedSession::views,
                   "How many views of blocks there are, arrays made from them included.")
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
          nb::sig("def counters(self) -> dict[str, int]"), "See SessionCounters in client/session.h.")
      .def(
          "take_refusals",
          [](SharedSession& s) {
            nb::list all;
            for (const Refusal& refusal : s.shared().TakeRefusals()) {
              all.append(nb::make_tuple(refusal.verb, refusal.blocks, std::string(refusal.status.message())));
            }
            return all;
          },
          nb::sig("def take_refusals(self) -> list[tuple[str, int, str]]"),
          "(verb, blocks, why) of what was refused when no call was there to hear it: releases, pins, "
          "unpins\n"
          "and retentions, and leases and fences of the session's own. The newest 64 since the last call.");
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
          "K of the whole pool: [blocks, layers, tokens, heads, dim], without the second axis if `layer`\n"
          "is given.\n\n"
          "`blocks` is how many to show, by default those mapped now. max_blocks shows the whole range, of\n"
          "which unmapped parts must not be touched. The array keeps memory mapped and holds no block: read\n"
          "and write blocks that you hold. With give_back=\"any_time\" others may be unmapped at any time.")
      .def(
          "v",
          [](const SessionPtr& s, std::optional<uint32_t> layer, uint32_t group,
             std::optional<uint32_t> blocks) {
            s->CheckUsable();
            return PlaneOfPool(s, group, true, layer, blocks);
          },
          nb::arg("layer") = nb::none(), nb::arg("group") = 0, nb::arg("blocks") = nb::none(),
          "V of the whole pool, like k().")
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
          "Maps the pool over the scratch of a session opened with warmup=True.")
      .def(
          "give_back_slabs",
          [](const SessionPtr& s) {
            return ValueOf(s->Use([](Session& open) { return open.GiveBackSlabs(); }));
          },
          "Unmaps the slabs that the daemon has asked back of a session opened with give_back=\"by_call\", "
          "and\n"
          "returns their bytes; on a GPU, once all that this process has queued there is done.\n"
          "FailedPreconditionError: a stream captures a graph, which is broken; they stay. What is queued "
          "later touches\n"
          "no block at or above capacity_blocks, or with holes=True none that it does not hold.");
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
          "The step that all members are done with, as far as is known here.")
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
          "The same, when the work that is on the stream now is done. Steps are recorded in their order, on\n"
          "whatever streams: threads that begin steps of one session keep a lock until theirs is recorded.")
      .def("lease", Lease, nb::arg("count"), nb::arg("timeout") = 30.0,
           "Blocks to write, all or none. timeout=0: those at hand, or ResourceExhaustedError; otherwise\n"
           "waits for refills, and raises DeadlineExceededError with the daemon's reason. More than this\n"
           "session can ever have: ResourceExhaustedError at once.")
      .def(
          "release",
          [](const SessionPtr& s, nb::handle blocks, std::optional<uint64_t> after, const std::string& reuse,
             uint32_t category) {
            const ReleaseHint hint = HintOf(reuse, category);
            if (nb::isinstance<PyBlocks>(blocks)) return nb::cast<PyBlocks&>(blocks).Release(after, hint);
            const std::vector<BlockRef> refs = RefsOf(blocks);
            s->Use([&](Session&) { s->GiveBack(refs, StepOf(after), hint); });
          },
          nb::arg("blocks"), nb::arg("after") = nb::none(), nb::kw_only(), nb::arg("reuse") = "unspecified",
          nb::arg("category") = 0,
          nb::sig(
              "def release(self, blocks: Refs, after: int | None = None, *, reuse: Reuse = 'unspecified', "
              "category: int = 0) -> None"),
          "Gives back one hold on each, root first. `reuse` and `category` say what is expected of them, as "
          "for Blocks.release.")
      .def(
          "flush",
          [](const SessionPtr& s, Timeout timeout) {
            PyPending<Flushed> pending(s, ValueOf(s->Use([](Session& open) { return open.StartFlush(); })));
            pending.Wait(timeout);
          },
          nb::arg("timeout") = 30.0, "Waits until all that was queued before is answered.")
      .def("next_notice", NextNotice, nb::arg("timeout") = 0.0,
           "The oldest notice of the daemon that was not taken yet (of each kind only the newest is\n"
           "kept), or None when the timeout is over.");
}

}  // namespace

void BindSession(nb::module_& module) {
  BindNotice(module);
  SessionClass session(module, "Session", nb::dynamic_attr(), nb::is_weak_referenceable(),
                       "An engine's hold on a space of KV blocks; see client/session.h. `with` closes it.\n\n"
                       "Any number of Python threads may use it: their calls take turns, and waiting is\n"
                       "done without the GIL.");
  session.def(nb::new_(&OpenSession), nb::arg("layout"), nb::arg("fingerprint"), nb::kw_only(),
              nb::arg("facts") = std::map<std::string, std::string>(), nb::arg("socket") = "",
              nb::arg("tenant") = "", nb::arg("client_name") = "", nb::arg("rank") = 0, nb::arg("ranks") = 1,
              nb::arg("scheduler") = false, nb::arg("device_uuids") = std::vector<std::string>(),
              nb::arg("kind") = "", nb::arg("max_space_bytes") = 0, nb::arg("guaranteed_blocks") = 0,
              nb::arg("max_blocks") = 0, nb::arg("warmup") = false, nb::arg("magazine_blocks") = 256,
              nb::arg("open_timeout") = 30.0, nb::arg("invitation") = nb::none(),
              nb::arg("give_back") = "never", nb::arg("holes") = false, nb::arg("priority") = "",
              "Opens a session, or with an invitation joins one; SessionOptions in client/session.h says "
              "what each means.");
  BindFacts(session);
  BindMemory(session);
  BindVerbs(session);
  session
      .def("close", CloseSession, nb::arg("timeout") = 5.0,
           "Ends the session and gives back all that it holds: no member has work on the device any more.\n"
           "False: views of its blocks are still there, and it ends with the last of them.\n"
           "DeadlineExceededError: the daemon has not answered, and may close it at any time. From then on\n"
           "nothing but close() works, which waits again.")
      .def(
          "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> Session"))
      .def(
          "__exit__", [](const SessionPtr& s, nb::args) { LeaveSession(s); },
          nb::sig("def __exit__(self, *args: object) -> None"));
  module.def(
      "close_all",
      [] {
        const GilRelease released;
        SharedSession::CloseAll();
      },
      "Ends the process' sessions.");
}

}  // namespace kvpool::python
