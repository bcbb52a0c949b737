// Episodes: named block sets, found again by their topic.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "client/python/src/scoring.h"

namespace kvpool::python {
namespace {

using SessionPtr = std::shared_ptr<SharedSession>;
using SessionClass = nb::class_<SharedSession>;

struct PyPutEpisodeResult {
  uint32_t episodes = 0, released = 0;
};

struct PyEpisodeHit {
  std::string name;
  float similarity = 0;
  std::vector<nb::object> tables;  // Block tables.

  void Release() {
    for (const nb::object& table : tables) nb::cast<PyBlockTable&>(table).held().Release(std::nullopt);
  }
};

PyEpisodeHit WaitForHit(PyPending<EpisodeHit>& pending, Timeout timeout) {
  EpisodeHit found = pending.Wait(timeout);
  PyEpisodeHit hit{.name = found.name, .similarity = found.similarity};
  for (EpisodeTable& table : found.tables) {
    hit.tables.push_back(
        nb::cast(PyBlockTable{.blocks = BlocksObject(pending.session(), std::move(table.blocks)),
                              .group = table.group,
                              .last_block_tokens = table.last_block_tokens}));
  }
  return hit;
}

PyPending<v1::PutEpisodeResult> PutEpisode(const SessionPtr& session, const std::string& name,
                                           nb::handle centroid, const std::vector<nb::object>& tables,
                                           std::optional<uint64_t> after) {
  if (tables.empty()) {
    throw StatusError(
        absl::InvalidArgumentError("tables: none, where a set has at least one; remove_episode removes it"));
  }
  v1::PutEpisode request;
  request.set_name(name);
  const std::vector<float> values = FloatsOf(centroid, "centroid");
  request.mutable_centroid()->Add(values.begin(), values.end());
  for (size_t i = 0; i < tables.size(); ++i) {
    *request.add_sequences() = SequenceOf(EntryOf("tables", i), tables[i], session);
  }
  return {session,
          ValueOf(session->Use([&](Session& open) { return open.PutEpisode(request, StepOf(after)); }))};
}

PyPending<v1::PutEpisodeResult> RemoveEpisode(const SessionPtr& session, const std::string& name,
                                              std::optional<uint64_t> after) {
  v1::PutEpisode request;
  request.set_name(name);
  return {session,
          ValueOf(session->Use([&](Session& open) { return open.PutEpisode(request, StepOf(after)); }))};
}

PyPending<EpisodeHit> ChooseEpisode(const SessionPtr& session, nb::handle embedding,
                                    const std::optional<std::string>& name) {
  v1::ChooseEpisode request;
  request.set_name(name.value_or(""));
  if (!embedding.is_none()) {
    const std::vector<float> values = FloatsOf(embedding, "embedding");
    request.mutable_embedding()->Add(values.begin(), values.end());
  }
  return {session, ValueOf(session->Use([&](Session& open) { return open.ChooseEpisode(request); }))};
}

void BindAnswers(nb::module_& module) {
  nb::class_<PyPutEpisodeResult>(module, "PutEpisodeResult", "What became of a session's episodes.")
      .def_ro("episodes", &PyPutEpisodeResult::episodes, "How many the session has now.")
      .def_ro("released", &PyPutEpisodeResult::released,
              "Holds given back: those of the episode that was replaced or removed.");

  nb::class_<PyPending<v1::PutEpisodeResult>>(module, "PendingPutEpisode",
                                              "A set on its way under its name. May be dropped.")
      .def_prop_ro("ready", &PyPending<v1::PutEpisodeResult>::ready)
      .def(
          "wait",
          [](PyPending<v1::PutEpisodeResult>& pending, Timeout timeout) {
            const v1::PutEpisodeResult result = pending.Wait(timeout);
            return PyPutEpisodeResult{.episodes = result.episodes(), .released = result.released()};
          },
          nb::arg("timeout") = 30.0,
          "Takes the answer, once. FailedPreconditionError: a block is stale, not held, or the set that\n"
          "is replaced is in use by an operation that is not over; ResourceExhaustedError: 64 sets or\n"
          "65536 blocks of a session, with the numbers.");

  nb::class_<PyEpisodeHit>(module, "EpisodeHit",
                           "The episode that was chosen, with holds of its own. `with` releases it.")
      .def_ro("name", &PyEpisodeHit::name)
      .def_ro("similarity", &PyEpisodeHit::similarity, "The cosine, -1 to 1; 0 if it was asked for by name.")
      .def_prop_ro(
          "tables", [](const PyEpisodeHit& hit) { return hit.tables; },
          nb::sig("def tables(self) -> list[BlockTable]"),
          "The tables that were put, one for each layer group.")
      .def("release", &PyEpisodeHit::Release, "Gives back what was found and not moved elsewhere.")
      .def(
          "__enter__", [](nb::object self) { return self; }, nb::sig("def __enter__(self) -> EpisodeHit"))
      .def(
          "__exit__", [](PyEpisodeHit& hit, nb::args) { hit.Release(); },
          nb::sig("def __exit__(self, *args: object) -> None"));

  nb::class_<PyPending<EpisodeHit>>(module, "PendingEpisode",
                                    "A choice on its way. May be dropped: then what comes is given back.")
      .def_prop_ro("ready", &PyPending<EpisodeHit>::ready)
      .def("wait", WaitForHit, nb::arg("timeout") = 30.0,
           "Takes the answer, once. NotFoundError: there is no set, or none of the name; "
           "ResourceExhaustedError:\n"
           "the tables of choices in one answer would have more than a MiB, choose again.");
}

}  // namespace

void BindEpisodes(nb::module_& module) {
  BindAnswers(module);
  auto session = nb::borrow<SessionClass>(nb::type<SharedSession>());
  session.def(
      "put_episode", PutEpisode, nb::arg("name"), nb::arg("centroid"), nb::arg("tables"), nb::kw_only(),
      nb::arg("after") = nb::none(),
      nb::sig("def put_episode(self, name: str, centroid: Floats, tables: "
              "collections.abc.Sequence[LiveSequence | BlockTable], *, after: int | None = None) -> "
              "PendingPutEpisode"),
      "Keeps the blocks of a sequence, one table for each layer group, groups ascending, under a name of 1\n"
      "to 128 bytes with an embedding of its topic: 1 to 4096 finite numbers, as many as the session's\n"
      "other episodes have. The episode has holds of its own on its blocks, until it is replaced by one of\n"
      "the same name, removed, or the session ends. See PutEpisode in score.proto.");
  session.def(
      "remove_episode", RemoveEpisode, nb::arg("name"), nb::kw_only(), nb::arg("after") = nb::none(),
      nb::sig("def remove_episode(self, name: str, *, after: int | None = None) -> PendingPutEpisode"),
      "Removes the episode of this name, if there is one, and gives its holds back.");
  session.def(
      "choose_episode", ChooseEpisode, nb::arg("embedding").none() = nb::none(), nb::kw_only(),
      nb::arg("name") = nb::none(),
      nb::sig("def choose_episode(self, embedding: Floats | None = None, *, name: str | None = None) -> "
              "PendingEpisode"),
      "Finds the episode whose centroid has the largest cosine with a question's embedding, and among\n"
      "equals the first by name; or the one called `name`. Takes holds of its own on the blocks.");
}

}  // namespace kvpool::python
