// What a keeper and its daemon say to each other: frames of one size, one packet each, over a socket pair or a connection.
//
//   daemon                                       keeper
//   kHello, with its version                ->
//                                           <-   kHeld, with a descriptor, for each thing that it keeps
//                                           <-   kAllHeld, with what became of the last upgrade, and why
//   kKeep, with a descriptor                ->
//                                           <-   kKept, or kRefused with the reason in `facts`
//   kDrop                                   ->
//   kServing                                ->
//   kHandOver, with the program to come     ->
//                                           <-   kKept: it comes next, once this daemon ends with kHandsOver
//   kEnding, where the keeper knows it      ->
//
// One who is not to be served, as another daemon is, has kRefused for an answer to kHello.
// The daemon is answered in the order in which it asks, and has one question at a time. What it has sent is read even if
// it is killed right after.
#ifndef KVPOOL_SERVER_KEEPER_KEEPER_FRAMES_H_
#define KVPOOL_SERVER_KEEPER_KEEPER_FRAMES_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/support/unique_fd.h"

namespace kvpool {

// Frames of another version have another form, and are refused.
inline constexpr uint16_t kKeeperVersion = 2;
inline constexpr size_t kMaxKeptFacts = 232;

enum class KeeperVerb : uint16_t {
  kHello,
  kHeld,
  kAllHeld,
  kKeep,
  kKept,
  kRefused,
  kDrop,
  kServing,
  kHandOver,
  kEnding  // This end is meant: there is no daemon to follow. One that the keeper has not started can't say it by its status.
};

// Bits of kAllHeld's `keeper`, 0 of a keeper of before they were there.
inline constexpr uint32_t kKnowsEnding = 1;
inline constexpr uint32_t kStartsNoProgram = 2;

// Of kAllHeld, its kind.
enum class UpgradeOutcome : uint16_t { kNone, kDone, kFailed };
// Of kHandOver, its kind: what happens to all that is kept.
enum class HandOver : uint16_t { kWarm, kCold };

struct KeeperFrame {
  uint32_t magic = kMagic;
  uint16_t version = kKeeperVersion;
  KeeperVerb verb = KeeperVerb::kHello;
  uint64_t id = 0;    // The thing's; the daemon gives them out.
  uint16_t kind = 0;  // What a thing is, and with `facts` which one, means nothing to the keeper.
  uint16_t facts_bytes = 0;
  uint32_t keeper = 0;
  char facts[kMaxKeptFacts] = {};

  static constexpr uint32_t kMagic = 0x6b76706b;
  std::string_view text() const { return {facts, facts_bytes}; }
  // What is too long is cut, as only words for people are.
  void set_text(std::string_view text);
};
static_assert(sizeof(KeeperFrame) == 256);

// Waits until the frame is sent. `fd` travels with it if it is not -1. UNAVAILABLE: nobody is at the other end.
absl::Status SendKeeperFrame(int socket, const KeeperFrame& frame, int fd = -1);
// Waits for a frame. UNAVAILABLE: nobody is at the other end. FAILED_PRECONDITION names both versions.
// INVALID_ARGUMENT: what came is no frame. RESOURCE_EXHAUSTED: a descriptor came, and this process can have no more.
absl::Status ReceiveKeeperFrame(int socket, KeeperFrame* frame, UniqueFd* fd);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_KEEPER_KEEPER_FRAMES_H_
