#ifndef KVPOOL_PROTO_SUPPORT_DTYPE_H_
#define KVPOOL_PROTO_SUPPORT_DTYPE_H_

#include <cstdint>

#include "kvpool/v1/layout.pb.h"

namespace kvpool {

// The size of an element in bytes; 0: there is no such type.
inline uint32_t ElementBytes(v1::Dtype dtype) {
  switch (dtype) {
    case v1::DTYPE_F32:
      return 4;
    case v1::DTYPE_F16:
    case v1::DTYPE_BF16:
      return 2;
    case v1::DTYPE_FP8_E4M3:
    case v1::DTYPE_FP8_E5M2:
      return 1;
    case v1::DTYPE_UNSPECIFIED:
    case v1::Dtype_INT_MIN_SENTINEL_DO_NOT_USE_:
    case v1::Dtype_INT_MAX_SENTINEL_DO_NOT_USE_:
      return 0;
  }
  return 0;
}

}  // namespace kvpool

#endif  // KVPOOL_PROTO_SUPPORT_DTYPE_H_
