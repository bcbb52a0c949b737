// Copies between a GPU's memory and host memory, for engines that keep KV memory of their own.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include "absl/strings/str_cat.h"
#include "client/python/src/bind.h"
#include "cuda/block_copier.h"

namespace kvpool::python {
namespace {

using Ranges = nb::ndarray<const uint64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

struct PyStreamPoint {
  std::unique_ptr<FenceEvent> fence;
};

class PyBlockCopier {
 public:
  explicit PyBlockCopier(uint32_t device) {
    const GilRelease released;
    copier_ = ValueOf(OpenCudaBlockCopier(absl::StrCat(device)));
  }
  PyBlockCopier(PyBlockCopier&&) = default;
  ~PyBlockCopier() { Close(); }

  void Register(uint64_t address, uint64_t bytes) {
    BlockCopier& copier = open();
    const GilRelease released;
    Check(copier.Register(address, bytes));
  }
  void Unregister(uint64_t address) {
    BlockCopier& copier = open();
    const GilRelease released;
    Check(copier.Unregister(address));
  }
  PyStreamPoint Record(uint64_t cuda_stream) {
    BlockCopier& copier = open();
    const GilRelease released;
    return {ValueOf(copier.Record(reinterpret_cast<void*>(cuda_stream)))};
  }
  PyStreamPoint Submit(const Ranges& ranges, bool to_device, const PyStreamPoint* after) {
    BlockCopier& copier = open();
    std::vector<CopyRange> copies;
    for (size_t i = 0; i < ranges.shape(0); ++i) copies.push_back({ranges(i, 0), ranges(i, 1), ranges(i, 2)});
    const GilRelease released;
    return {ValueOf(copier.Submit(to_device ? CopyDirection::kToDevice : CopyDirection::kToHost, copies,
                                  after != nullptr ? after->fence.get() : nullptr))};
  }
  void Close() {
    std::optional<GilRelease> released;
    if (GilRelease::Held()) released.emplace();
    copier_.reset();
  }

 private:
  BlockCopier& open() {
    if (copier_ == nullptr) throw ReleasedError("the copier was closed");
    return *copier_;
  }

  std::unique_ptr<BlockCopier> copier_;
};

}  // namespace

void BindCopies(nb::module_& module) {
  nb::class_<PyStreamPoint>(module, "StreamPoint",
                            "A point of a stream of a GPU's, or the end of what a BlockCopier was told.")
      .def_prop_ro(
          "done", [](const PyStreamPoint& point) { return ValueOf(point.fence->Done()); },
          "Whether all work before it is done. Raises the error of that work, which is then never done.")
      .def(
          "wait",
          [](const PyStreamPoint& point) {
            const GilRelease released;
            Check(point.fence->Wait());
          },
          "Sleeps until all work before it is done, or raises its error. Another thread may wait, too.");
  nb::class_<PyBlockCopier>(
      module, "BlockCopier",
      "Copies between a GPU's memory and host memory, beside what an engine computes: on a stream of its\n"
      "own, of the lowest priority. Any thread may call, but none while another closes it.")
      .def(nb::init<uint32_t>(), nb::arg("device"),
           "`device`: the GPU's number in this process, as PyTorch counts. UnavailableError: no driver, or "
           "no\n"
           "GPU. UnimplementedError: built without CUDA.")
      .def(
          "register_host", &PyBlockCopier::Register, nb::arg("address"), nb::arg("bytes"),
          "Page-locks host memory until unregister_host() or close(), so that copies are fast. It must stay\n"
          "mapped as long, and no copy may lie partly in it. An error leaves copies right, and slower.")
      .def("unregister_host", &PyBlockCopier::Unregister, nb::arg("address"),
           "Unlocks what was registered from this address on. No copy of it is under way.\n"
           "InvalidArgumentError: nothing was.")
      .def(
          "record", &PyBlockCopier::Record, nb::arg("cuda_stream"),
          "The point behind what is on the stream now (a cudaStream_t). ResourceExhaustedError: 4096 points\n"
          "are held.")
      .def(
          "to_device",
          [](PyBlockCopier& copier, const Ranges& ranges, const PyStreamPoint* after) {
            return copier.Submit(ranges, true, after);
          },
          nb::arg("ranges"), nb::arg("after").none() = nb::none(),
          nb::sig(
              "def to_device(self, ranges: numpy.typing.NDArray[numpy.uint64], after: StreamPoint | None = "
              "None) -> StreamPoint"),
          "Begins to copy host memory to the GPU: `ranges` is [ranges, 3], of each its device address, host\n"
          "address and bytes; in any order, at most 65,536, and of at least one byte. None is begun before\n"
          "`after` has passed. Until the answer is done the memory is the copies'. What is told later is\n"
          "done later. InvalidArgumentError: a limit is broken. ResourceExhaustedError: as of record. After\n"
          "an error none of its copies is under way, and some may be done.")
      .def(
          "to_host",
          [](PyBlockCopier& copier, const Ranges& ranges, const PyStreamPoint* after) {
            return copier.Submit(ranges, false, after);
          },
          nb::arg("ranges"), nb::arg("after").none() = nb::none(),
          nb::sig("def to_host(self, ranges: numpy.typing.NDArray[numpy.uint64], after: StreamPoint | None = "
                  "None) -> StreamPoint"),
          "The other way: as to_device, with the same columns.")
      .def("close", &PyBlockCopier::Close,
           "Waits for what is under way, and unlocks host memory. Again is nothing. It comes before\n"
           "the close of a session whose blocks it copies, which gives them to others.");
}

}  // namespace kvpool::python
