// A program that has kvpoold's mark and never serves. Its file's name says how it fails: "hangs" does nothing for ever, any
// other ends with status 3.
#include <unistd.h>

#include <filesystem>

#include "server/program.h"

int main() {
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe");
  while (self.filename() == "hangs") pause();
  return kvpool::OpenProgram("", {}).ok() ? 0 : 3;
}
