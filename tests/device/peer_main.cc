// The process of tests/device/peer.h: serves requests on fd 3 until the test closes it.
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/support/status_macros.h"
#include "tests/device/peer.h"
#include "tests/device/test_device.h"

namespace kvpool {
namespace {

constexpr int kSocket = 3;
constexpr size_t kCapacityBytes = size_t{1} << 30;

class PeerProcess {
 public:
  explicit PeerProcess(std::unique_ptr<TestDevice> test_device) : test_device_(std::move(test_device)) {}

  absl::Status Do(const PeerRequest& request, UniqueFd fd, PeerAnswer* answer, UniqueFd* answer_fd) {
    switch (request.op) {
      case PeerRequest::Op::kReserve: {
        ASSIGN_OR_RETURN(member_, test_device_->Reserve({.reserve_bytes = request.bytes,
                                                         .warmup_scratch = request.warmup_scratch,
                                                         .scratch_bytes = request.offset_bytes}));
        return absl::OkStatus();
      }
      case PeerRequest::Op::kMap:
        return member_->MapSlab(std::move(fd), request.offset_bytes, request.bytes);
      case PeerRequest::Op::kMapIpc:
        return member_->MapIpcSlab(request.handle, request.bytes);
      case PeerRequest::Op::kFinishWarmup:
        return member_->FinishWarmup();
      case PeerRequest::Op::kRead: {
        ASSIGN_OR_RETURN(answer->word, test_device_->Read(Base() + request.offset_bytes));
        return absl::OkStatus();
      }
      case PeerRequest::Op::kWrite:
        return test_device_->Write(Base() + request.offset_bytes, request.word);
      case PeerRequest::Op::kMakeSlab: {
        ASSIGN_OR_RETURN(slab_, test_device_->device().MakeSlab(request.bytes));
        ASSIGN_OR_RETURN(*answer_fd, slab_->Export());
        return absl::OkStatus();
      }
      case PeerRequest::Op::kMakeIpcSlab: {
        ASSIGN_OR_RETURN(slab_, test_device_->device().MakeIpcSlab(request.bytes));
        ASSIGN_OR_RETURN(answer->handle, slab_->ipc_handle());
        return absl::OkStatus();
      }
      case PeerRequest::Op::kOpenFds:
        answer->word = CountOpenFds();
        return absl::OkStatus();
    }
    return absl::InternalError(absl::StrCat("unknown op ", static_cast<int>(request.op)));
  }

 private:
  uint64_t Base() const { return member_ != nullptr ? member_->base() : slab_->address(); }

  const std::unique_ptr<TestDevice> test_device_;
  std::unique_ptr<MemberMemory> member_;
  std::unique_ptr<Slab> slab_;
};

int Serve() {
  absl::StatusOr<std::unique_ptr<TestDevice>> test_device = OpenTestDevice(kCapacityBytes);
  if (!test_device.ok()) {
    std::fprintf(stderr, "device peer: %s\n", test_device.status().ToString().c_str());
    return 1;
  }
  PeerProcess process(std::move(*test_device));
  while (true) {
    PeerRequest request;
    UniqueFd fd;
    if (!ReceivePacket(kSocket, &request, sizeof request, &fd).ok()) return 0;
    PeerAnswer answer = {};
    UniqueFd answer_fd;
    const absl::Status status = process.Do(request, std::move(fd), &answer, &answer_fd);
    answer.code = static_cast<int>(status.code());
    std::snprintf(answer.message, sizeof answer.message, "%s", std::string(status.message()).c_str());
    if (!SendPacket(kSocket, &answer, sizeof answer, answer_fd.get()).ok()) return 0;
  }
}

}  // namespace
}  // namespace kvpool

int main() { return kvpool::Serve(); }
