// The device that a run of the scorers' tests is about: that of KVPOOL_TEST_DEVICE
// (tests/device/test_device.h).
#ifndef KVPOOL_TESTS_SCORERS_TEST_COMPUTE_H_
#define KVPOOL_TESTS_SCORERS_TEST_COMPUTE_H_

#include <cstdint>
#include <memory>

#include "cuda/kv_compute.h"

namespace kvpool {

// nullptr for the host, with as many threads as a test asks for. REQUIRES: the main function is that of
// test_compute_main.cc, which ends where there is no such device.
KvCompute* TestCompute();

// The same, and for the host what it puts into `host`, with so many threads.
KvCompute* TestOrHostCompute(std::unique_ptr<KvCompute>* host, uint32_t threads = 3);

// 8 bytes at an address of the device.
uint64_t ReadWord(uint64_t address);

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SCORERS_TEST_COMPUTE_H_
