// A peer of a TCP port here, in bytes.
#ifndef KVPOOL_TESTS_PROCESS_RAW_PEER_H_
#define KVPOOL_TESTS_PROCESS_RAW_PEER_H_

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <string>

#include "proto/support/unique_fd.h"

namespace kvpool {

// It has said so much. What it reads it waits for, but not for ever.
inline UniqueFd SayTo(int port, const std::string& words) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  UniqueFd peer(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(peer.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  const timeval patience{.tv_sec = 20, .tv_usec = 0};
  EXPECT_EQ(setsockopt(peer.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
  EXPECT_EQ(send(peer.get(), words.data(), words.size(), MSG_NOSIGNAL), static_cast<ssize_t>(words.size()));
  return peer;
}

// All that comes until the server closes the connection.
inline std::string Rest(const UniqueFd& peer) {
  std::string answer;
  char bytes[4096];
  for (ssize_t got = 0; (got = recv(peer.get(), bytes, sizeof(bytes), 0)) > 0;)
    answer.append(bytes, static_cast<size_t>(got));
  return answer;
}

}  // namespace kvpool

#endif  // KVPOOL_TESTS_PROCESS_RAW_PEER_H_
