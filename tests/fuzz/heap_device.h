// Host memory in small slabs of the heap: a sanitizer sees each byte that a scorer reads beyond them, and a slab costs
// microseconds where a memfd with its pages costs a story's time. The scorer is the daemon's own.
#ifndef KVPOOL_TESTS_FUZZ_HEAP_DEVICE_H_
#define KVPOOL_TESTS_FUZZ_HEAP_DEVICE_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "cuda/device.h"

namespace kvpool::fuzz {

// `on_call` comes before whatever the scorer is to allocate, copy or compute, and may make it fail.
std::unique_ptr<Device> MakeHeapDevice(std::string id, size_t granularity_bytes,
                                       std::function<absl::Status()> on_call);

}  // namespace kvpool::fuzz

#endif  // KVPOOL_TESTS_FUZZ_HEAP_DEVICE_H_
