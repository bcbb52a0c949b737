// What a test may tell the fake driver that its own process has loaded. FindDriverFunction (tests/device/driver_function.h) finds
// these; a real driver has none of them.
#ifndef KVPOOL_TESTS_SUPPORT_FAKE_CUDA_CONTROLS_H_
#define KVPOOL_TESTS_SUPPORT_FAKE_CUDA_CONTROLS_H_

extern "C" {

// From now on these calls fail, in place of those that failed before: KVPOOL_FAKE_CUDA_FAIL (state.h) has how it is written, and
// calls are counted from now.
void cuFakeFail(const char* faults);
// A stream calls this, on its thread, before each copy between host and device moves a byte: like a copy engine that is busy, or
// just to hear of it. Null: it calls nothing.
void cuFakeBeforeCopy(void (*function)(void* argument), void* argument);
}

#endif  // KVPOOL_TESTS_SUPPORT_FAKE_CUDA_CONTROLS_H_
