// The attach socket's client, whose daemon is the test: it writes every frame by hand.
#include "client/session/attachment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/session/session_state.h"
#include "cuda/device.h"
#include "proto/support/attach_socket.h"
#include "tests/client/session_fixture.h"
#include "tests/support/daemon_process.h"

namespace kvpool {
namespace {

using std::chrono::steady_clock;
using ::testing::HasSubstr;

constexpr uint64_t kStrideBytes = 64 << 10;
constexpr uint64_t kSlabBytes = 2 << 20;
constexpr uint32_t kBlocksPerSlab = kSlabBytes / kStrideBytes;
constexpr uint32_t kMaxBlocks = 4 * kBlocksPerSlab;
constexpr uint64_t kWord = 0x0123456789abcdef;

// What the system lets this process do at an address: "rw-s", "---p", …; "" where nothing is mapped.
std::string PermissionsAt(uint64_t address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    uint64_t first = 0, end = 0;
    char permissions[5] = {};
    const int fields = std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %4s", &first, &end, permissions);
    if (fields == 3 && first <= address && address < end) return permissions;
  }
  return "";
}

class AttachmentTest : public ::testing::Test {
 protected:
  void SetUp() override {
    listener_.Reset(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = {}};
    const std::string path = socket_ + kAttachSuffix;
    ASSERT_LT(path.size(), sizeof(address.sun_path));
    std::memcpy(address.sun_path, path.data(), path.size());
    ASSERT_EQ(bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(listen(listener_.get(), 4), 0);
  }
  // Its thread uses the state to the last.
  void TearDown() override {
    if (attachment_ != nullptr) attachment_->Unmap();
  }

  // Takes the next connection and its hello, and says welcome.
  v1::AttachHello Welcome(const std::string& token, uint32_t step_frames = 1) {
    peer_.Reset(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const timeval patience = {.tv_sec = 60, .tv_usec = 0};
    EXPECT_EQ(setsockopt(peer_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
    const v1::AttachFrame hello = Receive();
    v1::AttachFrame welcome;
    welcome.mutable_welcome()->set_attach_token(token);
    welcome.mutable_welcome()->set_daemon_epoch(1);
    welcome.mutable_welcome()->set_reattach_ms(60000);
    welcome.mutable_welcome()->set_step_frames(step_frames);
    Send(welcome);
    return hello.hello();
  }
  absl::StatusOr<std::unique_ptr<Attachment>> Connect(GiveBack give_back, uint32_t step_frames = 1) {
    auto connected = std::async(std::launch::async, [&] {
      return Attachment::Connect({.socket = socket_,
                                  .client_name = "test",
                                  .give_back = give_back,
                                  .holes = holes_ || give_back == GiveBack::kAnyTime},
                                 Soon());
    });
    hello_ = Welcome("token", step_frames);
    return connected.get();
  }
  // Opens an attachment that has mapped `slabs` slabs, which are ready.
  void Attach(GiveBack give_back, uint32_t slabs, bool warmup = false, bool scheduler = false) {
    auto attachment = Connect(give_back);
    ASSERT_TRUE(attachment.ok()) << attachment.status();
    attachment_ = *std::move(attachment);
    attachment_->Start({.block_stride_bytes = kStrideBytes,
                        .max_blocks = kMaxBlocks,
                        .slab_bytes = kSlabBytes,
                        .warmup = warmup,
                        .scheduler = scheduler},
                       "0123456789abcdef", &state_, [] {});
    for (uint32_t i = 0; i < slabs; ++i) {
      MakeSlab(i, absl::StrCat("slab ", i));
      SendSlab(i);
      ExpectAck(i);
      SendReady(i);
    }
    AwaitCapacity(slabs * kBlocksPerSlab);
  }
  void MakeSlab(uint32_t index, const std::string& id) {
    auto slab = device_->MakeSlab(kSlabBytes);
    ASSERT_TRUE(slab.ok()) << slab.status();
    if (slabs_.size() <= index) slabs_.resize(index + 1);
    slabs_[index] = {*std::move(slab), id};
  }

  void Send(const v1::AttachFrame& frame, int fd = -1) {
    EXPECT_EQ(SendFrame(peer_.get(), frame, fd).value(), SendOutcome::kSent);
  }
  void SendSlab(uint32_t index) { SendSlabAt(index, index * kBlocksPerSlab); }
  void SendSlabAt(uint32_t index, uint32_t first_block) {
    v1::AttachFrame frame;
    v1::Slab& slab = *frame.mutable_slab();
    slab.set_slab(index);
    slab.set_first_block(first_block);
    slab.set_block_count(kBlocksPerSlab);
    slab.set_bytes(kSlabBytes);
    slab.set_id(slabs_[index].id);
    const absl::StatusOr<UniqueFd> fd = slabs_[index].memory->Export();
    ASSERT_TRUE(fd.ok()) << fd.status();
    Send(frame, fd->get());
  }
  void SendReady(uint32_t index) {
    v1::AttachFrame frame;
    frame.mutable_slab_ready()->set_slab(index);
    frame.mutable_slab_ready()->set_capacity_blocks((index + 1) * kBlocksPerSlab);
    Send(frame);
  }
  void SendLeave(uint32_t index, uint32_t capacity_blocks) {
    v1::AttachFrame frame;
    frame.mutable_slab_leave()->set_slab(index);
    frame.mutable_slab_leave()->set_capacity_blocks(capacity_blocks);
    Send(frame);
  }
  void SendLeave(uint32_t index) { SendLeave(index, index * kBlocksPerSlab); }

  // The client's next frame; an empty one if there is none any more.
  v1::AttachFrame Receive() {
    v1::AttachFrame frame;
    const auto received = ReceiveFrame(peer_.get(), &frame, nullptr);
    EXPECT_TRUE(received.ok()) << received.status();
    if (!received.ok() || *received != ReceiveOutcome::kFrame) frame.Clear();
    return frame;
  }
  void ExpectAck(uint32_t index, const std::string& error = "") {
    const v1::AttachFrame frame = Receive();
    EXPECT_TRUE(frame.has_slab_ack()) << frame.ShortDebugString();
    EXPECT_EQ(frame.slab_ack().slab(), index);
    EXPECT_THAT(frame.slab_ack().error(), HasSubstr(error));
    EXPECT_EQ(frame.slab_ack().error().empty(), error.empty()) << frame.slab_ack().error();
  }
  void ExpectLeft(uint32_t index) {
    const v1::AttachFrame frame = Receive();
    EXPECT_TRUE(frame.has_slab_left()) << frame.ShortDebugString();
    EXPECT_EQ(frame.slab_left().slab(), index);
  }
  bool HungUp() {
    v1::AttachFrame frame;
    const auto received = ReceiveFrame(peer_.get(), &frame, nullptr);
    return received.ok() && *received == ReceiveOutcome::kHangup;
  }

  template <typename Done>
  void Await(Done done) {
    EXPECT_TRUE(state_.signal.Await(Soon(), done));
  }
  void AwaitCapacity(uint32_t blocks) {
    Await([&] { return state_.capacity_blocks.load(std::memory_order_seq_cst) == blocks; });
  }
  void AwaitAskedBack(uint32_t slabs) {
    Await([&] { return state_.slabs_asked_back.load(std::memory_order_seq_cst) == slabs; });
  }
  void AwaitEnd() {
    Await([&] { return !state_.open.load(std::memory_order_seq_cst); });
  }
  // These alone, of which each lies at the place of its index.
  void ExpectMapped(const std::set<uint32_t>& slabs) {
    EXPECT_EQ(state_.mapped_slabs.load(), slabs.size());
    EXPECT_EQ(state_.mapped_blocks.load(), (*slabs.rbegin() + 1) * kBlocksPerSlab);
    for (uint32_t i = 0; i < kMaxBlocks / kBlocksPerSlab; ++i) {
      EXPECT_EQ(PermissionsAt(AddressOf(i)), slabs.contains(i) ? "rw-s" : "---p") << "slab " << i;
      EXPECT_EQ(state_.is_mapped(i * kBlocksPerSlab), slabs.contains(i)) << "slab " << i;
      EXPECT_EQ(state_.is_mapped((i + 1) * kBlocksPerSlab - 1), slabs.contains(i)) << "slab " << i;
    }
  }
  void ExpectMapped(uint32_t slabs) {
    EXPECT_EQ(state_.mapped_slabs.load(), slabs);
    EXPECT_EQ(state_.mapped_blocks.load(), slabs * kBlocksPerSlab);
    EXPECT_LE(state_.capacity_blocks.load(), state_.mapped_blocks.load());
    for (uint32_t i = 0; i < kMaxBlocks / kBlocksPerSlab; ++i) {
      EXPECT_EQ(PermissionsAt(AddressOf(i)), i < slabs ? "rw-s" : "---p") << "slab " << i;
      EXPECT_EQ(PermissionsAt(AddressOf(i) + kSlabBytes - 1), i < slabs ? "rw-s" : "---p") << "slab " << i;
    }
  }
  // Gives back what is asked back, and expects that it is this much.
  void ExpectGivesBack(uint64_t bytes) {
    const absl::StatusOr<uint64_t> given = attachment_->GiveBackSlabs();
    ASSERT_TRUE(given.ok()) << given.status();
    EXPECT_EQ(*given, bytes);
  }
  uint64_t AddressOf(uint32_t slab) const { return attachment_->base() + slab * kSlabBytes; }
  uint64_t& WordOf(uint32_t slab) const { return *reinterpret_cast<uint64_t*>(AddressOf(slab)); }
  uint64_t& DaemonsWordOf(uint32_t slab) const {
    return *reinterpret_cast<uint64_t*>(slabs_[slab].memory->address());
  }

  struct DaemonsSlab {
    std::unique_ptr<Slab> memory;
    std::string id;
  };
  TemporaryDirectory directory_;
  const std::string socket_ = directory_.path() + "/kvpoold.sock";
  UniqueFd listener_, peer_;
  const std::unique_ptr<Device> device_ =
      MakeHostDevice({.capacity_bytes = 64 << 20, .try_huge_pages = false});
  std::vector<DaemonsSlab> slabs_;
  v1::AttachHello hello_;
  bool holes_ = false;
  SessionState state_;
  std::unique_ptr<Attachment> attachment_;
};

TEST_F(AttachmentTest, AnEngineThatGivesNothingBackSaysSo) {
  Attach(GiveBack::kNever, 1);
  EXPECT_FALSE(hello_.gives_back());
  ExpectMapped(1);
}

TEST_F(AttachmentTest, ADaemonThatSpeaksGrpcAloneIsRefused) {
  const auto attachment = Connect(GiveBack::kNever, /*step_frames=*/0);
  ASSERT_FALSE(attachment.ok());
  EXPECT_EQ(attachment.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(attachment.status().message()),
              HasSubstr("the daemon at " + socket_ + " speaks gRPC alone"));
}

// ------------------------------------------------------------------------------------------------- any time

TEST_F(AttachmentTest, ASlabLeavesAtAnyTime) {
  Attach(GiveBack::kAnyTime, 3);
  EXPECT_TRUE(hello_.gives_back());
  ExpectMapped(3);
  const uint64_t base = attachment_->base();
  WordOf(1) = kWord;
  SendLeave(2);
  ExpectLeft(2);
  EXPECT_EQ(attachment_->base(), base);
  EXPECT_EQ(state_.capacity_blocks.load(), 2 * kBlocksPerSlab);
  EXPECT_EQ(state_.slabs_asked_back.load(), 0u);
  ExpectMapped(2);
  EXPECT_EQ(WordOf(1), kWord);
  EXPECT_EQ(DaemonsWordOf(1), kWord);
  // There is nothing that a call would give back.
  ExpectGivesBack(0);
  SendLeave(1);
  ExpectLeft(1);
  SendLeave(0);
  ExpectLeft(0);
  ExpectMapped(0);
  EXPECT_EQ(attachment_->base(), base);
  EXPECT_TRUE(state_.status().ok()) << state_.status();
}

TEST_F(AttachmentTest, AnotherSlabTakesThePlaceOfOneThatHasLeft) {
  Attach(GiveBack::kAnyTime, 2);
  WordOf(1) = kWord;
  SendLeave(1);
  ExpectLeft(1);
  MakeSlab(1, "another");
  DaemonsWordOf(1) = kWord + 1;
  SendSlab(1);
  ExpectAck(1);
  EXPECT_EQ(state_.capacity_blocks.load(), kBlocksPerSlab) << "not before it is ready";
  SendReady(1);
  AwaitCapacity(2 * kBlocksPerSlab);
  ExpectMapped(2);
  EXPECT_EQ(WordOf(1), kWord + 1);
}

TEST_F(AttachmentTest, OneThatIsSentOnceMoreAfterItHasLeftIsMappedAnew) {
  Attach(GiveBack::kAnyTime, 2);
  WordOf(1) = kWord;
  SendLeave(1);
  SendSlab(1);  // The daemon has not heard of it yet.
  ExpectLeft(1);
  ExpectAck(1);
  SendReady(1);
  AwaitCapacity(2 * kBlocksPerSlab);
  ExpectMapped(2);
  EXPECT_EQ(WordOf(1), kWord);
}

TEST_F(AttachmentTest, SlabsComeAndGoUnderAnEngineThatWorks) {
  Attach(GiveBack::kAnyTime, 1);
  std::atomic<bool> stop{false};
  std::thread engine([&] {
    for (uint64_t i = 1; !stop.load(); ++i) WordOf(0) = i;
  });
  for (int round = 0; round < 50; ++round) {
    MakeSlab(1, absl::StrCat("round ", round));
    SendSlab(1);
    ExpectAck(1);
    WordOf(1) = kWord;
    SendLeave(1);
    ExpectLeft(1);
  }
  stop.store(true);
  engine.join();
  ExpectMapped(1);
}

TEST_F(AttachmentTest, ASlabLeavesDuringWarmup) {
  Attach(GiveBack::kAnyTime, 2, /*warmup=*/true);
  WordOf(0) = WordOf(1) = kWord;
  SendLeave(1);
  ExpectLeft(1);
  EXPECT_EQ(WordOf(1), kWord) << "the engine's scratch stays until its warm-up is over";
  EXPECT_EQ(DaemonsWordOf(1), 0u);
  ASSERT_TRUE(attachment_->FinishWarmup().ok());
  EXPECT_EQ(WordOf(0), 0u);
  ExpectMapped(1);
}

// -------------------------------------------------------------------------------------------------- by call

TEST_F(AttachmentTest, ASlabWaitsForTheEnginesCall) {
  Attach(GiveBack::kByCall, 2);
  EXPECT_TRUE(hello_.gives_back());
  ExpectGivesBack(0);
  SendLeave(1);
  AwaitAskedBack(1);
  // The engine is told at once, and may still touch it.
  EXPECT_EQ(state_.capacity_blocks.load(), kBlocksPerSlab);
  ExpectMapped(2);
  WordOf(1) = kWord;
  EXPECT_EQ(DaemonsWordOf(1), kWord);

  ExpectGivesBack(kSlabBytes);
  ExpectLeft(1);
  EXPECT_EQ(state_.slabs_asked_back.load(), 0u);
  ExpectMapped(1);
  // Once is enough: the next frame is about another slab.
  ExpectGivesBack(0);
  MakeSlab(1, "another");
  SendSlab(1);
  ExpectAck(1);
  SendReady(1);
  AwaitCapacity(2 * kBlocksPerSlab);
  ExpectMapped(2);
  EXPECT_EQ(WordOf(1), 0u);
}

TEST_F(AttachmentTest, ASlabThatIsSentAgainIsKept) {
  Attach(GiveBack::kByCall, 2);
  WordOf(1) = kWord;
  SendLeave(1);
  AwaitAskedBack(1);
  SendSlab(1);
  ExpectAck(1);
  EXPECT_EQ(state_.slabs_asked_back.load(), 0u);
  ExpectGivesBack(0);
  ExpectMapped(2);
  EXPECT_EQ(state_.capacity_blocks.load(), kBlocksPerSlab);
  SendReady(1);
  AwaitCapacity(2 * kBlocksPerSlab);
  EXPECT_EQ(WordOf(1), kWord);
  // The daemon may change its mind once more.
  SendLeave(1);
  AwaitAskedBack(1);
  ExpectGivesBack(kSlabBytes);
  ExpectLeft(1);
  ExpectMapped(1);
}

TEST_F(AttachmentTest, AnotherSlabDoesNotTakeThePlaceOfOneThatHasNotLeft) {
  Attach(GiveBack::kByCall, 2);
  SendLeave(1);
  AwaitAskedBack(1);
  MakeSlab(1, "another");
  SendSlab(1);
  ExpectAck(1, "is another than the one mapped here");
  AwaitEnd();
  EXPECT_EQ(state_.status().code(), absl::StatusCode::kDataLoss) << state_.status();
}

TEST_F(AttachmentTest, OneCallGivesBackAllThatIsAskedFor) {
  Attach(GiveBack::kByCall, 4);
  SendLeave(3);
  SendLeave(2);
  SendLeave(1);
  AwaitAskedBack(3);
  SendSlab(1);
  ExpectAck(1);
  EXPECT_EQ(state_.slabs_asked_back.load(), 2u);
  ExpectGivesBack(2 * kSlabBytes);
  ExpectLeft(3);
  ExpectLeft(2);
  ExpectMapped(2);
}

TEST_F(AttachmentTest, TheSessionEndsWhileASlabIsAskedBack) {
  Attach(GiveBack::kByCall, 2);
  SendLeave(1);
  AwaitAskedBack(1);
  const uint64_t address = AddressOf(1);
  attachment_->Unmap();
  EXPECT_EQ(attachment_->base(), 0u);
  EXPECT_NE(PermissionsAt(address), "rw-s");
  EXPECT_EQ(state_.slabs_asked_back.load(), 0u);
  ExpectGivesBack(0);
  EXPECT_TRUE(HungUp());
}

// ------------------------------------------------------------------------------------------ wrong frames

struct WrongLeave {
  GiveBack give_back;
  uint32_t slabs, slab, capacity_blocks;
  const char* words;
};

class WrongLeaveTest : public AttachmentTest, public ::testing::WithParamInterface<WrongLeave> {};

TEST_P(WrongLeaveTest, EndsTheSession) {
  const WrongLeave& wrong = GetParam();
  Attach(wrong.give_back, wrong.slabs);
  SendLeave(wrong.slab, wrong.capacity_blocks);
  AwaitEnd();
  EXPECT_EQ(state_.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(state_.status().message()), HasSubstr(wrong.words));
  EXPECT_EQ(state_.capacity_blocks.load(), wrong.slabs * kBlocksPerSlab);
  if (wrong.slabs > 0) ExpectMapped(wrong.slabs);
  EXPECT_TRUE(HungUp()) << "the daemon may wait for an answer";
}

INSTANTIATE_TEST_SUITE_P(
    All, WrongLeaveTest,
    ::testing::Values(
        WrongLeave{GiveBack::kNever, 2, 1, kBlocksPerSlab, "of an engine that gives nothing back"},
        WrongLeave{GiveBack::kAnyTime, 2, 2, 0, "which is not mapped"},
        WrongLeave{GiveBack::kAnyTime, 2, 0, kBlocksPerSlab + 1,
                   "33 blocks are to stay usable, where 32 stay mapped"},
        WrongLeave{GiveBack::kByCall, 2, 0, 0, "where the last one that was not is 1"},
        WrongLeave{GiveBack::kByCall, 2, 2, 2 * kBlocksPerSlab, "where the last one that was not is 1"},
        WrongLeave{GiveBack::kAnyTime, 2, UINT32_MAX, 0, "slab 4294967295 is asked back"},
        WrongLeave{GiveBack::kAnyTime, 0, 0, 0, "where none is mapped"},
        WrongLeave{GiveBack::kAnyTime, 2, 1, kBlocksPerSlab + 1,
                   "33 blocks are to stay usable, where 32 stay mapped"},
        WrongLeave{GiveBack::kByCall, 2, 1, UINT32_MAX, "4294967295 blocks are to stay usable"}));

// ---------------------------------------------------------------------------------------------------- holes

TEST_F(AttachmentTest, WhoTakesHolesSaysSo) {
  Attach(GiveBack::kByCall, 1);
  EXPECT_FALSE(hello_.holes());
}

TEST_F(AttachmentTest, AnySlabLeavesAndComesBack) {
  Attach(GiveBack::kAnyTime, 4);
  EXPECT_TRUE(hello_.holes());
  for (const uint32_t slab : {0, 2, 3}) WordOf(slab) = kWord + slab;
  SendLeave(1, 3 * kBlocksPerSlab);
  ExpectLeft(1);
  EXPECT_EQ(state_.capacity_blocks.load(), 3 * kBlocksPerSlab);
  ExpectMapped({0, 2, 3});
  SendLeave(2, 2 * kBlocksPerSlab);
  ExpectLeft(2);
  ExpectMapped({0, 3});
  ASSERT_EQ(state_.mapped_ranges().size(), 2u);
  EXPECT_EQ(state_.mapped_ranges()[1].first, 3 * kBlocksPerSlab);
  MakeSlab(2, "another");
  SendSlab(2);
  ExpectAck(2);
  ExpectMapped({0, 2, 3});
  SendReady(2);
  AwaitCapacity(3 * kBlocksPerSlab);
  EXPECT_EQ(WordOf(2), 0u) << "it is another slab";
  EXPECT_EQ(WordOf(3), kWord + 3);
  EXPECT_EQ(DaemonsWordOf(3), kWord + 3);
}

TEST_F(AttachmentTest, AnEngineComesIntoASpaceWithAHole) {
  Attach(GiveBack::kAnyTime, 1);
  for (const uint32_t slab : {3, 1}) {
    MakeSlab(slab, "slab");
    SendSlab(slab);
    ExpectAck(slab);
  }
  ExpectMapped({0, 1, 3});
}

TEST_F(AttachmentTest, ByCallASlabInTheMiddleIsKeptUntilTheCall) {
  holes_ = true;
  Attach(GiveBack::kByCall, 4);
  EXPECT_TRUE(hello_.holes());
  SendLeave(1, 3 * kBlocksPerSlab);
  SendLeave(2, 2 * kBlocksPerSlab);
  AwaitAskedBack(2);
  ExpectMapped({0, 1, 2, 3});
  SendSlab(1);  // It is the space's again.
  ExpectAck(1);
  EXPECT_EQ(state_.slabs_asked_back.load(), 1u);
  ExpectGivesBack(kSlabBytes);
  ExpectLeft(2);
  ExpectMapped({0, 1, 3});
  SendLeave(2, 2 * kBlocksPerSlab);
  AwaitEnd();
  EXPECT_THAT(std::string(state_.status().message()), HasSubstr("slab 2 is asked back, which is not mapped"));
}

TEST_F(AttachmentTest, NoSlabIsMappedOverAnother) {
  Attach(GiveBack::kAnyTime, 3);
  SendLeave(1, 2 * kBlocksPerSlab);
  ExpectLeft(1);
  WordOf(2) = kWord;
  MakeSlab(1, "another");
  SendSlabAt(1, 2 * kBlocksPerSlab);
  ExpectAck(1, "is mapped at offset");
  AwaitEnd();
  EXPECT_EQ(state_.status().code(), absl::StatusCode::kInvalidArgument) << state_.status();
  EXPECT_EQ(WordOf(2), kWord);
  EXPECT_EQ(DaemonsWordOf(2), kWord);
}

TEST_F(AttachmentTest, NoSlabLiesBeyondTheSpace) {
  Attach(GiveBack::kAnyTime, 1);
  MakeSlab(1, "slab");
  SendSlabAt(1, kMaxBlocks - 1);
  ExpectAck(1, "slab 1 has 32 blocks from 127 on");
  AwaitEnd();
  EXPECT_EQ(state_.status().code(), absl::StatusCode::kInvalidArgument) << state_.status();
}

TEST_F(AttachmentTest, ASlabIsAskedBackOnce) {
  Attach(GiveBack::kByCall, 2);
  SendLeave(1);
  SendLeave(1);
  AwaitEnd();
  EXPECT_THAT(std::string(state_.status().message()), HasSubstr("where the last one that was not is 0"));
}

TEST_F(AttachmentTest, SlabsComeInOrder) {
  Attach(GiveBack::kNever, 1);
  MakeSlab(2, "slab 2");
  SendSlab(2);
  ExpectAck(2, "slab 2 was sent, where 1 comes next");
  AwaitEnd();
  EXPECT_EQ(state_.status().code(), absl::StatusCode::kInvalidArgument) << state_.status();
}

TEST_F(AttachmentTest, WhatIsTheDaemonsToHearIsNotForClients) {
  Attach(GiveBack::kAnyTime, 1);
  v1::AttachFrame left;
  left.mutable_slab_left()->set_slab(0);
  Send(left);
  AwaitEnd();
  EXPECT_THAT(std::string(state_.status().message()), HasSubstr("is not for clients"));
}

// ---------------------------------------------------------------------------------------------- schedulers

TEST_F(AttachmentTest, ASchedulerHearsHowMuchIsLeft) {
  Attach(GiveBack::kByCall, 0, /*warmup=*/false, /*scheduler=*/true);
  SendReady(2);
  AwaitCapacity(3 * kBlocksPerSlab);
  SendLeave(2);
  ExpectLeft(2);
  EXPECT_EQ(state_.capacity_blocks.load(), 2 * kBlocksPerSlab);
  EXPECT_EQ(state_.slabs_asked_back.load(), 0u);
  ExpectGivesBack(0);
}

// ----------------------------------------------------------------------------------------------- come-backs

TEST_F(AttachmentTest, ComingBackMakesNothingLess) {
  Attach(GiveBack::kByCall, 2);
  WordOf(1) = kWord;
  peer_.Reset();
  const v1::AttachHello hello = Welcome("");
  EXPECT_EQ(hello.member_token(), "0123456789abcdef");
  EXPECT_TRUE(hello.gives_back());
  SendSlab(0);
  ExpectAck(0);
  SendReady(0);
  SendSlab(1);
  ExpectAck(1);  // It has read what came before.
  EXPECT_EQ(state_.capacity_blocks.load(), 2 * kBlocksPerSlab);
  ExpectMapped(2);
  EXPECT_EQ(WordOf(1), kWord);
}

TEST_F(AttachmentTest, NoSessionComesBackToADaemonThatSpeaksGrpcAlone) {
  Attach(GiveBack::kNever, 1);
  peer_.Reset();
  Welcome("", /*step_frames=*/0);
  AwaitEnd();
  EXPECT_EQ(state_.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(state_.status().message()), HasSubstr("speaks gRPC alone"));
}

TEST_F(AttachmentTest, TheNextDaemonKnowsOfNothingThatWasAskedBack) {
  Attach(GiveBack::kByCall, 2);
  WordOf(1) = kWord;
  SendLeave(1);
  AwaitAskedBack(1);
  peer_.Reset();
  EXPECT_TRUE(Welcome("").gives_back());
  EXPECT_EQ(state_.slabs_asked_back.load(), 0u);
  ExpectGivesBack(0);
  for (const uint32_t slab : {0, 1}) {
    SendSlab(slab);
    ExpectAck(slab);
    SendReady(slab);
  }
  AwaitCapacity(2 * kBlocksPerSlab);
  ExpectMapped(2);
  EXPECT_EQ(WordOf(1), kWord);
  SendLeave(1);
  AwaitAskedBack(1);
  ExpectGivesBack(kSlabBytes);
  ExpectLeft(1);
  ExpectMapped(1);
}

TEST_F(AttachmentTest, ASlabThatHadLeftAndWasNotDestroyedIsMappedForTheNextDaemon) {
  Attach(GiveBack::kAnyTime, 2);
  WordOf(1) = kWord;
  SendLeave(1);
  ExpectLeft(1);
  peer_.Reset();
  EXPECT_TRUE(Welcome("").gives_back());
  for (const uint32_t slab : {0, 1}) {
    SendSlab(slab);
    ExpectAck(slab);
    SendReady(slab);
  }
  AwaitCapacity(2 * kBlocksPerSlab);
  ExpectMapped(2);
  EXPECT_EQ(WordOf(1), kWord);
}

}  // namespace
}  // namespace kvpool
