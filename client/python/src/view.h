// Pool memory as Python sees it, in place: DLPack, the buffer protocol, __cuda_array_interface__.
#ifndef KVPOOL_CLIENT_PYTHON_SRC_VIEW_H_
#define KVPOOL_CLIENT_PYTHON_SRC_VIEW_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/python/src/convert.h"
#include "client/python/src/shared_session.h"

namespace kvpool::python {

// A strided array in the pool. Keeps the memory mapped; a view of one block also keeps that block held (see
// SharedSession). Arrays made from a view keep the view.
class View {
 public:
  struct Axis {
    int64_t size = 0;
    int64_t stride_bytes = 0;
  };
  // `block`: null for views of the whole pool.
  View(std::shared_ptr<SharedSession> session, BlockRef block, uint64_t address, std::vector<Axis> axes,
       v1::Dtype dtype, bool writable);
  ~View();
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  // The same array with elements that NumPy has no type for shown as their bits.
  std::unique_ptr<View> Bits() const;

  const std::vector<Axis>& axes() const { return axes_; }
  uint64_t address() const { return address_; }
  bool writable() const { return writable_; }
  uint32_t element_bytes() const { return element_bytes_; }
  bool on_gpu() const { return cuda_ordinal_ >= 0; }
  int cuda_ordinal() const { return cuda_ordinal_; }
  std::string dtype_name() const;
  // The struct module's letter; null: there is none.
  const char* format() const;
  bool c_contiguous() const;
  nb::dlpack::dtype dlpack_dtype() const;

 private:
  const std::shared_ptr<SharedSession> session_;
  const BlockRef block_;
  const uint64_t address_;
  const std::vector<Axis> axes_;
  const v1::Dtype dtype_;  // UNSPECIFIED: unsigned integers, as many bytes as element_bytes_.
  uint32_t element_bytes_ = 1;
  const bool writable_;
  int cuda_ordinal_ = -1;
};

// K or V of one block, [layers][tokens][heads][dim]; with `layer`, of that layer alone.
std::unique_ptr<View> PlaneOfBlock(const std::shared_ptr<SharedSession>& session, BlockRef block,
                                   uint32_t group, bool is_v, std::optional<uint32_t> layer, bool writable);
std::unique_ptr<View> BytesOfBlock(const std::shared_ptr<SharedSession>& session, BlockRef block,
                                   bool writable);
// The same for blocks 0 to count - 1, whoever holds them.
std::unique_ptr<View> PlaneOfPool(const std::shared_ptr<SharedSession>& session, uint32_t group, bool is_v,
                                  std::optional<uint32_t> layer, std::optional<uint32_t> count);
std::unique_ptr<View> BytesOfPool(const std::shared_ptr<SharedSession>& session,
                                  std::optional<uint32_t> count);

void BindView(nb::module_& module);

}  // namespace kvpool::python

#endif  // KVPOOL_CLIENT_PYTHON_SRC_VIEW_H_
