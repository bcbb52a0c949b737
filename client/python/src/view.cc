#include "client/python/src/view.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "absl/strings/str_cat.h"
#include "cuda/device.h"
#include "proto/support/dtype.h"

namespace kvpool::python {
namespace {

constexpr v1::Dtype kUnsigned = v1::DTYPE_UNSPECIFIED;

const v1::LayerGroup& GroupOf(const Session& session, uint32_t group) {
  const v1::Layout& layout = session.layout();
  if (group >= static_cast<uint32_t>(layout.groups_size())) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("group: ", group, ", where the layout has ", layout.groups_size())));
  }
  return layout.groups(static_cast<int>(group));
}

// The axes of a plane, and the byte of the block at which it begins.
std::pair<std::vector<View::Axis>, uint64_t> PlaneAxes(const Session& session, uint32_t group, bool is_v,
                                                       std::optional<uint32_t> layer) {
  const v1::LayerGroup& layers = GroupOf(session, group);
  if (session.layout().encoding() != v1::ENCODING_STRIDED || (is_v && layers.v_head_dim() == 0)) {
    throw StatusError(absl::FailedPreconditionError(
        absl::StrCat("the layout says nothing of where ", is_v ? "V" : "K", " is: look at data()")));
  }
  if (layer.has_value() && *layer >= static_cast<uint32_t>(layers.layers_size())) {
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("layer: ", *layer, ", where group ", group, " has ", layers.layers_size())));
  }
  const v1::Plane& plane = is_v ? layers.v() : layers.k();
  std::vector<View::Axis> axes;
  if (!layer.has_value()) {
    axes.push_back({layers.layers_size(), static_cast<int64_t>(plane.layer_stride_bytes())});
  }
  axes.push_back({layers.tokens_per_block(), static_cast<int64_t>(plane.token_stride_bytes())});
  axes.push_back({layers.kv_heads(), static_cast<int64_t>(plane.head_stride_bytes())});
  axes.push_back(
      {is_v ? layers.v_head_dim() : layers.k_head_dim(), static_cast<int64_t>(plane.dim_stride_bytes())});
  return {std::move(axes), plane.offset_bytes() + layer.value_or(0) * plane.layer_stride_bytes()};
}

void CheckMapped(const SharedSession& shared) {
  const Session& session = shared.shared();
  const absl::Status status = session.status();
  // A fork has no memory mapped, but a session that ended has.
  if (absl::IsFailedPrecondition(status)) throw StatusError(status);
  if (session.base() != 0) return;
  shared.CheckUsable();
  throw StatusError(absl::FailedPreconditionError("no memory is mapped yet"));
}

uint32_t CountOf(const Session& session, std::optional<uint32_t> count) {
  const uint32_t all = session.max_blocks();
  if (count.value_or(0) > all) {
    throw StatusError(
        absl::InvalidArgumentError(absl::StrCat("blocks: ", *count, ", where the space can have ", all)));
  }
  return count.value_or(session.mapped_blocks());
}

// Checks that a block may be viewed: it is mapped, and not the null block.
void CheckBlock(const SharedSession& shared, BlockRef block) {
  CheckMapped(shared);
  if (block == kNullRef || !shared.shared().is_mapped(block.id)) {
    throw StatusError(
        absl::InvalidArgumentError(absl::StrCat("block ", Index(block.id), " has no memory to look at")));
  }
}

}  // namespace

View::View(std::shared_ptr<SharedSession> session, BlockRef block, uint64_t address, std::vector<Axis> axes,
           v1::Dtype dtype, bool writable)
    : session_(std::move(session)),
      block_(block),
      address_(address),
      axes_(std::move(axes)),
      dtype_(dtype),
      writable_(writable) {
  if (dtype != kUnsigned) element_bytes_ = ElementBytes(dtype);
  const std::string uuid = session_->shared().device_uuid();
  if (!uuid.empty()) cuda_ordinal_ = ValueOf(CudaOrdinal(uuid));
  session_->AddView(block_);
}

View::~View() { session_->DropView(block_); }

std::unique_ptr<View> View::Bits() const {
  auto bits = std::make_unique<View>(session_, block_, address_, axes_, kUnsigned, writable_);
  bits->element_bytes_ = element_bytes_;
  return bits;
}

std::string View::dtype_name() const {
  switch (dtype_) {
    case v1::DTYPE_F32:
      return "float32";
    case v1::DTYPE_F16:
      return "float16";
    case v1::DTYPE_BF16:
      return "bfloat16";
    case v1::DTYPE_FP8_E4M3:
      return "float8_e4m3fn";
    case v1::DTYPE_FP8_E5M2:
      return "float8_e5m2";
    case v1::DTYPE_UNSPECIFIED:
    case v1::Dtype_INT_MIN_SENTINEL_DO_NOT_USE_:
    case v1::Dtype_INT_MAX_SENTINEL_DO_NOT_USE_:
      break;
  }
  return absl::StrCat("uint", 8 * element_bytes_);
}

const char* View::format() const {
  if (dtype_ == v1::DTYPE_F32) return "f";
  if (dtype_ == v1::DTYPE_F16) return "e";
  if (dtype_ != kUnsigned) return nullptr;
  return element_bytes_ == 1 ? "B" : element_bytes_ == 2 ? "H" : "I";
}

nb::dlpack::dtype View::dlpack_dtype() const {
  using Code = nb::dlpack::dtype_code;
  const auto of = [this](Code code) {
    return nb::dlpack::dtype{static_cast<uint8_t>(code), static_cast<uint8_t>(8 * element_bytes_), 1};
  };
  if (dtype_ == v1::DTYPE_F32 || dtype_ == v1::DTYPE_F16) return of(Code::Float);
  if (dtype_ == v1::DTYPE_BF16) return of(Code::Bfloat);
  if (dtype_ == v1::DTYPE_FP8_E4M3) return of(Code::Float8_E4M3FN);
  if (dtype_ == v1::DTYPE_FP8_E5M2) return of(Code::Float8_E5M2);
  return of(Code::UInt);
}

bool View::c_contiguous() const {
  int64_t dense = element_bytes_;
  for (auto axis = axes_.rbegin(); axis != axes_.rend(); ++axis) {
    if (axis->size != 1 && axis->stride_bytes != dense) return false;
    dense *= axis->size;
  }
  return true;
}

std::unique_ptr<View> PlaneOfBlock(const std::shared_ptr<SharedSession>& session, BlockRef block,
                                   uint32_t group, bool is_v, std::optional<uint32_t> layer, bool writable) {
  const Session& shared = session->shared();
  CheckBlock(*session, block);
  auto [axes, offset] = PlaneAxes(shared, group, is_v, layer);
  return std::make_unique<View>(session, block, shared.address(block.id) + offset, std::move(axes),
                                GroupOf(shared, group).dtype(), writable);
}

std::unique_ptr<View> BytesOfBlock(const std::shared_ptr<SharedSession>& session, BlockRef block,
                                   bool writable) {
  const Session& shared = session->shared();
  CheckBlock(*session, block);
  std::vector<View::Axis> axes = {{static_cast<int64_t>(shared.layout().block_bytes()), 1}};
  return std::make_unique<View>(session, block, shared.address(block.id), std::move(axes), kUnsigned,
                                writable);
}

std::unique_ptr<View> PlaneOfPool(const std::shared_ptr<SharedSession>& session, uint32_t group, bool is_v,
                                  std::optional<uint32_t> layer, std::optional<uint32_t> count) {
  const Session& shared = session->shared();
  CheckMapped(*session);
  auto [axes, offset] = PlaneAxes(shared, group, is_v, layer);
  axes.insert(axes.begin(), {CountOf(shared, count), static_cast<int64_t>(shared.block_stride_bytes())});
  return std::make_unique<View>(session, kNullRef, shared.base() + offset, std::move(axes),
                                GroupOf(shared, group).dtype(), true);
}

std::unique_ptr<View> BytesOfPool(const std::shared_ptr<SharedSession>& session,
                                  std::optional<uint32_t> count) {
  const Session& shared = session->shared();
  CheckMapped(*session);
  std::vector<View::Axis> axes = {{CountOf(shared, count), static_cast<int64_t>(shared.block_stride_bytes())},
                                  {static_cast<int64_t>(shared.layout().block_bytes()), 1}};
  return std::make_unique<View>(session, kNullRef, shared.base(), std::move(axes), kUnsigned, true);
}

// -------------------------------------------------------------------------------------------- protocols

namespace {

// The arrays that a Py_buffer points to besides the memory.
struct BufferArrays {
  std::vector<Py_ssize_t> shape, strides;
};

int Refuse(Py_buffer* buffer, const std::string& why) {
  buffer->obj = nullptr;
  PyErr_SetString(PyExc_BufferError, why.c_str());
  return -1;
}

int GetBuffer(PyObject* self, Py_buffer* buffer, int flags) {
  const View& view = *nb::inst_ptr<View>(self);
  if (view.on_gpu()) return Refuse(buffer, "the memory is on a GPU: take it by DLPack");
  if (view.format() == nullptr) {
    return Refuse(buffer, absl::StrCat("buffers have no ", view.dtype_name(), ": take bits(), or DLPack"));
  }
  if ((flags & PyBUF_WRITABLE) != 0 && !view.writable())
    return Refuse(buffer, "the block is shared, or sealed: read-only");
  if ((flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS && view.axes().size() > 1)
    return Refuse(buffer, "not Fortran-contiguous");
  const bool wants_dense =
      (flags & PyBUF_STRIDES) != PyBUF_STRIDES || (flags & PyBUF_C_CONTIGUOUS) == PyBUF_C_CONTIGUOUS;
  if (wants_dense && !view.c_contiguous()) return Refuse(buffer, "the view has gaps: ask for strides");
  auto arrays = std::make_unique<BufferArrays>();
  Py_ssize_t count = 1;
  for (const View::Axis& axis : view.axes()) {
    arrays->shape.push_back(axis.size);
    arrays->strides.push_back(axis.stride_bytes);
    count *= axis.size;
  }
  buffer->buf = reinterpret_cast<void*>(view.address());
  buffer->len = count * view.element_bytes();
  buffer->itemsize = view.element_bytes();
  buffer->readonly = view.writable() ? 0 : 1;
  buffer->format = (flags & PyBUF_FORMAT) != 0 ? const_cast<char*>(view.format()) : nullptr;
  buffer->ndim = static_cast<int>(view.axes().size());
  buffer->shape = (flags & PyBUF_ND) != 0 ? arrays->shape.data() : nullptr;
  buffer->strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? arrays->strides.data() : nullptr;
  buffer->suboffsets = nullptr;
  buffer->internal = arrays.release();
  buffer->obj = Py_NewRef(self);
  return 0;
}

void ReleaseBuffer(PyObject*, Py_buffer* buffer) { delete static_cast<BufferArrays*>(buffer->internal); }

PyType_Slot kBufferSlots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(GetBuffer)},
                              {Py_bf_releasebuffer, reinterpret_cast<void*>(ReleaseBuffer)},
                              {0, nullptr}};

template <typename Array>
nb::object Export(nb::handle self, const View& view) {
  std::vector<size_t> shape;
  std::vector<int64_t> strides;  // DLPack counts elements.
  for (const View::Axis& axis : view.axes()) {
    if (axis.stride_bytes % view.element_bytes() != 0) {
      throw BufferError(absl::StrCat("a stride of ", axis.stride_bytes,
                                     " bytes is no whole number of elements of ", view.element_bytes()));
    }
    shape.push_back(static_cast<size_t>(axis.size));
    strides.push_back(axis.stride_bytes / view.element_bytes());
  }
  const Array array(reinterpret_cast<void*>(view.address()), shape.size(), shape.data(), self, strides.data(),
                    view.dlpack_dtype(), view.on_gpu() ? nb::device::cuda::value : nb::device::cpu::value,
                    view.on_gpu() ? view.cuda_ordinal() : 0);
  return nb::cast(array);
}

nb::object DlPack(nb::handle self, nb::kwargs kwargs) {
  const View& view = nb::cast<const View&>(self);
  const nb::object exported = view.writable() ? Export<nb::ndarray<nb::array_api>>(self, view)
                                              : Export<nb::ndarray<nb::array_api, nb::ro>>(self, view);
  return exported.attr("__dlpack__")(**kwargs);
}

nb::tuple DlPackDevice(const View& view) {
  return view.on_gpu() ? nb::make_tuple(nb::device::cuda::value, view.cuda_ordinal())
                       : nb::make_tuple(nb::device::cpu::value, 0);
}

nb::tuple Shape(const View& view) {
  nb::list shape;
  for (const View::Axis& axis : view.axes()) shape.append(axis.size);
  return nb::tuple(shape);
}

nb::tuple Strides(const View& view) {
  nb::list strides;
  for (const View::Axis& axis : view.axes()) strides.append(axis.stride_bytes);
  return nb::tuple(strides);
}

// Version 3. The attribute is missing for host memory and for dtypes that it has no name
// for, as consumers expect.
nb::dict CudaArrayInterface(const View& view) {
  if (!view.on_gpu()) throw nb::attribute_error("__cuda_array_interface__: the memory is on the host");
  if (view.format() == nullptr) {
    throw nb::attribute_error(
        absl::StrCat("__cuda_array_interface__ has no ", view.dtype_name(), ": take bits(), or DLPack")
            .c_str());
  }
  nb::dict interface;
  interface["shape"] = Shape(view);
  interface["strides"] = Strides(view);
  interface["typestr"] =
      absl::StrCat("<", *view.format() == 'f' || *view.format() == 'e' ? "f" : "u", view.element_bytes());
  interface["data"] = nb::make_tuple(view.address(), !view.writable());
  interface["version"] = 3;
  interface["stream"] = nb::none();
  return interface;
}

}  // namespace

void BindView(nb::module_& module) {
  nb::class_<View> view(
      module, "View", nb::type_slots(kBufferSlots),
      "Pool memory in place: numpy.asarray(view), numpy.from_dlpack(view), torch.from_dlpack(view).\n\n"
      "While a view of a block, or an array made from it, is there, the block stays held: what is released\n"
      "meanwhile goes back with the last view.");
  view.def_prop_ro("shape", Shape, nb::sig("def shape(self) -> tuple[int, ...]"), "Sizes of the axes.")
      .def_prop_ro("strides", Strides, nb::sig("def strides(self) -> tuple[int, ...]"),
                   "Distances along the axes, in bytes.")
      .def_prop_ro("dtype", &View::dtype_name,
                   "\"float32\", \"float16\", \"bfloat16\", \"float8_e4m3fn\", ...")
      .def_prop_ro(
          "readonly", [](const View& view) { return !view.writable(); },
          "Blocks that are sealed, or held by reference, are not to be written.")
      .def_prop_ro("address", &View::address, "Address of the first element, on host or device.")
      .def_prop_ro(
          "device",
          [](const View& view) {
            return view.on_gpu() ? absl::StrCat("cuda:", view.cuda_ordinal()) : std::string("cpu");
          },
          "\"cpu\" or \"cuda:N\", as this process counts.")
      .def("bits", &View::Bits,
           "The same memory as unsigned integers: for NumPy, which has no bfloat16 or float8.")
      .def_prop_ro("__cuda_array_interface__", CudaArrayInterface,
                   nb::sig("def __cuda_array_interface__(self) -> dict[str, typing.Any]"),
                   "Only on a GPU; elsewhere there is no such attribute.")
      .def("__dlpack__", DlPack, nb::sig("def __dlpack__(self, **kwargs: typing.Any) -> typing.Any"),
           "The DLPack protocol's.")
      .def("__dlpack_device__", DlPackDevice, nb::sig("def __dlpack_device__(self) -> tuple[int, int]"),
           "The DLPack protocol's: (1, 0) on the host, (2, ordinal) on a GPU.");
  // From 3.12 on Python makes this method of the slot, and would make the slot of the method: each would call the other.
  constexpr unsigned long kPython312 = 0x030c0000;
  if (Py_Version >= kPython312) return;
  view.def(
      "__buffer__", [](nb::handle self, int flags) { return nb::steal(PyMemoryView_FromObject(self.ptr())); },
      nb::arg("flags"), nb::sig("def __buffer__(self, flags: int, /) -> memoryview"), "Only on the host.");
}

}  // namespace kvpool::python
