// An operation of each verb that a Step batch may have: for tests and benchmarks of what concerns all of them.
#ifndef KVPOOL_TESTS_SUPPORT_EACH_VERB_H_
#define KVPOOL_TESTS_SUPPORT_EACH_VERB_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kvpool/v1/engine.pb.h"

namespace kvpool {

inline constexpr uint64_t kVerbBlockBytes = 4096;

// What a session has for its verbs to name.
struct VerbSubject {
  uint64_t sealed = 0;
  std::string key;               // It names `sealed`, and has 32 bytes.
  std::vector<uint64_t> leased;  // Two.
};

// A session whose K and V can be scored, in blocks of kVerbBlockBytes.
v1::OpenSession VerbSession();
// Makes a block findable. `key` has 32 bytes.
v1::Operation SealOne(uint64_t block, const std::string& key);
// What the row of put_episode has: that of choose_episode finds it.
v1::Operation PutEpisodeOf(const VerbSubject& subject);

using VerbRow = std::function<v1::Operation(const VerbSubject&)>;
// By the field of v1::Operation. Those of open_session and add_member, which a session does not send, are empty.
const std::map<std::string, VerbRow>& VerbRows();

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SUPPORT_EACH_VERB_H_
