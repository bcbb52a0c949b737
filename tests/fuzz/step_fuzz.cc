// Batches, calls and all that happens around them: nothing that a peer says ends the daemon, or gives a block two owners.
#include <google/protobuf/stubs/logging.h>

#include <cstddef>
#include <cstdint>

#include "server/base/log.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/world.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool quiet =
      (kvpool::SetLog({.level = kvpool::LogLevel::kError}), google::protobuf::SetLogHandler(nullptr), true);
  (void)quiet;
  kvpool::fuzz::Input input(data, size);
  kvpool::fuzz::World(&input).Run();
  return 0;
}
