#include "tests/support/fake_cuda/controls.h"

#include "tests/support/fake_cuda/state.h"

using namespace kvpool::fake;  // NOLINT: entry points must be in the global namespace

void cuFakeFail(const char* faults) {
  State& state = TheState();
  const std::lock_guard lock(state.mu);
  state.settings.faults = ReadFaults("cuFakeFail", faults);
  state.calls.clear();
}

void cuFakeBeforeCopy(void (*function)(void* argument), void* argument) {
  State& state = TheState();
  const std::lock_guard lock(state.mu);
  state.before_copy = function == nullptr ? std::function<void()>() : [=] { function(argument); };
}
