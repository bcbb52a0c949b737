// Host memory in small slabs of the heap: a sanitizer sees each byte that a scorer reads beyond them, and a slab costs
// microseconds where a memfd with its pages costs a story's time.
#ifndef KVPOOL_TESTS_FUZZ_HEAP_DEVICE_H_
#define KVPOOL_TESTS_FUZZ_HEAP_DEVICE_H_

#include <memory>
#include <string>

#include "cuda/device.h"

namespace kvpool::fuzz {

std::unique_ptr<Device> MakeHeapDevice(std::string id, size_t granularity_bytes);

}  // namespace kvpool::fuzz

#endif  // KVPOOL_TESTS_FUZZ_HEAP_DEVICE_H_
