// The notices that a member's stream should get: at most one of each kind, the newest.
//
//   off     nothing to say
//   posted  waits for a stream to take it
//   told    a stream took it; a new stream is told again what still holds (`on`)
//
// Not thread-safe: the space's mutex is around it.
#ifndef KVPOOL_SERVER_SPACE_NOTICE_BOARD_H_
#define KVPOOL_SERVER_SPACE_NOTICE_BOARD_H_

#include <array>
#include <cstdint>
#include <string>

#include "kvpool/v1/engine.pb.h"

namespace kvpool {

class NoticeBoard {
 public:
  struct Text {
    bool on = true;
    uint64_t value = 0;
    std::string detail;
    uint64_t until_ms = 0;  // An answer counts until then; 0: whenever it comes.
  };
  void Post(v1::NoticeKind kind, Text text) {
    notices_[kind] = std::move(text);
    posted_ |= 1u << kind;
    known_ |= 1u << kind;
  }
  bool posted() const { return posted_ != 0; }
  void Take(uint64_t now, v1::StepResponse* response) {
    for (int kind = 1; posted_ != 0 && kind < v1::NoticeKind_ARRAYSIZE; ++kind) {
      if ((posted_ & 1u << kind) == 0) continue;
      posted_ &= ~(1u << kind);
      v1::Notice* notice = response->add_notices();
      notice->set_kind(static_cast<v1::NoticeKind>(kind));
      notice->set_on(notices_[kind].on);
      notice->set_value(notices_[kind].value);
      notice->set_detail(notices_[kind].detail);
      // One that is over says so by the least that it can say.
      if (const uint64_t until = notices_[kind].until_ms; until != 0)
        notice->set_deadline_ms(until > now ? until - now : 1);
    }
  }
  // For a new stream: posts again what the one before may have lost. A revoke is not asked for twice.
  void PostAgain() {
    for (int kind = 1; kind < v1::NoticeKind_ARRAYSIZE; ++kind) {
      if (kind != v1::NOTICE_KIND_REVOKE && (known_ & 1u << kind) != 0 && notices_[kind].on)
        posted_ |= 1u << kind;
    }
  }

 private:
  std::array<Text, v1::NoticeKind_ARRAYSIZE> notices_;
  uint32_t posted_ = 0;  // Bit k: notices_[k] waits.
  uint32_t known_ = 0;   // Bit k: notices_[k] was ever posted.
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_SPACE_NOTICE_BOARD_H_
