// An engine in a process of its own. Reads a command a line, answers one line each:
//
//   (empty)            "open" once the session is open
//   share SEED COUNT   stamps and seals COUNT blocks of a sequence, gives them back: "ok"
//   match SEED COUNT   matches them and looks at what they hold: "HITS STAMPED", and keeps the hits
//   lease COUNT        leases blocks and keeps them: "ok", or the error
//   fork               leaves a child behind that lives on without doing anything: its pid
//   id                 the session's number
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "client/session.h"
#include "tests/client/session_fixture.h"

namespace kvpool {
namespace {

std::string Match(Session* session, const std::vector<PrefixKey>& keys, std::vector<Blocks>* kept) {
  const GroupKeys asked{.keys = KeyBytes(keys)};
  auto pending = session->Match({&asked, 1});
  if (!pending.ok()) return pending.status().ToString();
  auto hit = pending->Wait(Soon());
  if (!hit.ok()) return hit.status().ToString();
  size_t stamped = 0;
  const Blocks& blocks = hit->groups[0];
  for (size_t i = 0; i < blocks.size(); ++i) stamped += HasStamp(session->data(blocks[i]), keys[i]);
  const std::string answer = std::to_string(blocks.size()) + " " + std::to_string(stamped);
  kept->push_back(std::move(hit->groups[0]));
  return answer;
}

std::string Obey(Session* session, const std::string& line, std::vector<Blocks>* kept) {
  std::istringstream words(line);
  std::string command;
  uint32_t first = 0, second = 0;
  words >> command >> first >> second;
  const PrefixHasher hasher(session->hash_seed());
  if (command.empty()) return "open";
  if (command == "id") return std::to_string(session->id());
  if (command == "invite") return absl::BytesToHexString(session->Invitation());
  if (command == "share") {
    Share(session, hasher.Chain(TokensOf(first, second), kTokensPerBlock));
    return ::testing::Test::HasFailure() ? "failed" : "ok";
  }
  if (command == "match") return Match(session, hasher.Chain(TokensOf(first, second), kTokensPerBlock), kept);
  if (command == "lease") {
    auto blocks = session->LeaseWithin(first, Soon());
    if (!blocks.ok()) return blocks.status().ToString();
    kept->push_back(*std::move(blocks));
    return "ok";
  }
  if (command == "fork") {
    const pid_t child = fork();
    if (child == 0) {
      // Its parent's parent reads these until they close.
      close(STDIN_FILENO);
      close(STDOUT_FILENO);
      while (true) pause();
    }
    return std::to_string(child);
  }
  return "no such command: " + line;
}

int Run(const char* socket) {
  auto session = Session::Open(OptionsFor(socket));
  if (!session.ok()) {
    std::cout << session.status() << std::endl;
    return 1;
  }
  std::vector<Blocks> kept;
  std::string line;
  while (std::getline(std::cin, line)) std::cout << Obey(session->get(), line, &kept) << std::endl;
  return 0;
}

}  // namespace
}  // namespace kvpool

int main(int argc, char** argv) { return argc == 2 ? kvpool::Run(argv[1]) : 2; }
