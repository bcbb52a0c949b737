// The options of a session.
#ifndef KVPOOL_CLIENT_SESSION_OPTIONS_H_
#define KVPOOL_CLIENT_SESSION_OPTIONS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kvpool/v1/engine.pb.h"
#include "kvpool/v1/layout.pb.h"

namespace kvpool {

// Whether the daemon may take memory back that it has mapped in this process, for other spaces. It asks for a slab once no block
// of it is held: any where the engine takes holes, else the last one. The engine's addresses stay, and those of the slab are not
// to be touched.
enum class GiveBack {
  // What is mapped stays mapped, as long as the session lives.
  kNever,
  // A slab that is asked back is counted in Session::slabs_asked_back(), and unmapped by Session::GiveBackSlabs(). Such engines
  // may read and write blocks that they don't hold, if they do so only below capacity_blocks() from each call to the next; or
  // with `holes` in Session::mapped_ranges().
  kByCall,
  // Slabs are unmapped as soon as they are asked back, while the engine works. REQUIRES: it reads and writes blocks that the session
  // holds, its sink and the null block, and nothing else; no kernel reads ahead in a table with stale entries.
  kAnyTime,
};

struct SessionOptions {
  std::string socket;  // kvpoold's; empty: see proto/support/default_socket.h.
  std::string tenant;  // Empty: "default".
  std::string client_name;
  v1::Layout layout;            // See client/layouts.h.
  v1::Fingerprint fingerprint;  // A digest of weights, code, dtype, …; see layout.proto.
  v1::Role role;                // Rank 0 unless told otherwise.
  uint32_t ranks = 1;
  std::vector<std::string> device_uuids;  // See v1::OpenSession.
  v1::SpaceKind kind = v1::SPACE_KIND_UNSPECIFIED;
  uint64_t max_space_bytes = 0;    // 0: all that the device has.
  uint32_t guaranteed_blocks = 0;  // So many can always be leased, whatever others do.
  uint32_t max_blocks = 0;         // Cap on blocks held at once; 0: none.
  // Who is served first where several spaces want memory; at most the rule's, and none: that.
  v1::PriorityClass priority_class = v1::PRIORITY_CLASS_UNSPECIFIED;
  bool warmup = false;  // The range is private scratch until FinishWarmup.
  GiveBack give_back = GiveBack::kNever;
  // The memory of the space may have holes, in front of which and behind which there are blocks (Session::mapped_ranges). With
  // kAnyTime it is so anyway, but for a scheduler, which says what those that join its session do. Without it a space that has
  // some is filled up first, or refuses the session.
  bool holes = false;
  bool takes_holes() const { return holes || (give_back == GiveBack::kAnyTime && !role.scheduler()); }
  // The most leased blocks that the magazine keeps: it starts with 16, and keeps twice as many after each
  // refill. A refill is due when fewer than half are left; beyond twice this number the surplus goes back. 0
  // to 65536; 0 makes every lease a round trip. Members that join keep none.
  uint32_t magazine_blocks = 256;
  std::chrono::milliseconds open_timeout{30000};
  // Called on the session's own threads for every notice; must not call into the session.
  std::function<void(const v1::Notice&)> on_notice;
};

}  // namespace kvpool

#endif  // KVPOOL_CLIENT_SESSION_OPTIONS_H_
