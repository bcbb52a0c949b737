// One message after another in the same memory, so that a small one costs no allocation.
#ifndef KVPOOL_SERVER_RPC_RPC_ARENA_H_
#define KVPOOL_SERVER_RPC_RPC_ARENA_H_

#include <google/protobuf/arena.h>

#include <cstddef>
#include <memory>

namespace kvpool {

// Holds one message. Renew() empties it and gives back the memory beyond the first block.
template <typename Message>
class ArenaMessage {
 public:
  explicit ArenaMessage(size_t block_bytes)
      : block_(new char[block_bytes]), arena_(Options(block_.get(), block_bytes)) {
    Renew();
  }
  void Renew() {
    arena_.Reset();
    message_ = google::protobuf::Arena::CreateMessage<Message>(&arena_);
  }
  Message* get() { return message_; }
  Message* operator->() { return message_; }
  Message& operator*() { return *message_; }

 private:
  static google::protobuf::ArenaOptions Options(char* block, size_t bytes) {
    google::protobuf::ArenaOptions options;
    options.initial_block = block;
    options.initial_block_size = bytes;
    return options;
  }

  const std::unique_ptr<char[]> block_;
  google::protobuf::Arena arena_;
  Message* message_ = nullptr;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_RPC_RPC_ARENA_H_
