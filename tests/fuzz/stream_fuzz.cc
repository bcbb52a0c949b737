// Bytes of peers on the gRPC socket that we parse ourselves: nothing of them ends the daemon, leaves a descriptor or a call behind, or
// has an answer lost, repeated or out of order.
#include <google/protobuf/stubs/logging.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "proto/support/check.h"
#include "server/base/log.h"
#include "tests/fuzz/descriptors.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/stream_story.h"

namespace kvpool::fuzz {
namespace {

// The folder of the socket, which each story makes anew.
class Folder {
 public:
  Folder() { KVPOOL_CHECK(mkdtemp(path_.data()) != nullptr, "%s: errno %d", path_.c_str(), errno); }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string socket() const { return path_ + "/socket"; }

 private:
  std::string path_ = "/dev/shm/kvpool-fuzz-XXXXXX";
};

}  // namespace
}  // namespace kvpool::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace kvpool::fuzz;
  static const bool quiet = (kvpool::SetLog({.level = kvpool::LogLevel::kError, .fd = AnyFile()}),
                             google::protobuf::SetLogHandler(nullptr), true);
  (void)quiet;
  static const Folder folder;
  const int open = OpenDescriptors();
  {
    Input input(data, size);
    StreamStory(&input, folder.socket()).Run();
  }
  KVPOOL_CHECK(OpenDescriptors() == open, "%d descriptors were open, and %d are", open, OpenDescriptors());
  return 0;
}
