// Files of certificates that a test makes: NAME.pem, and NAME.key with its key.
#ifndef KVPOOL_TESTS_SUPPORT_CERTIFICATES_H_
#define KVPOOL_TESTS_SUPPORT_CERTIFICATES_H_

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/support/daemon_process.h"

namespace kvpool {

class Certificates {
 public:
  // False: the openssl program, which makes them, is not installed.
  static bool CanBeMade() { return RunProgram({"/bin/sh", "-c", "command -v openssl"}).exit_code == 0; }
  // Runs a script in their folder, which may say `authorities NAME...` and `sign NAME AUTHORITY DAYS [SAN [CN]]`. Without a SAN
  // it is that of this machine; an empty one is none.
  void Make(const std::string& script) const {
    const ProgramEnd made = RunProgram({"/bin/sh", "-ec",
                                        absl::StrCat("cd ", directory_.path(), R"(
      new="openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -batch"
      authorities() { for ca; do $new -x509 -days 2 -subj /CN=$ca -keyout $ca.key -out $ca.pem; done; }
      sign() {
        san=${4-DNS:localhost,IP:127.0.0.1}
        echo ${san:+subjectAltName=$san} > san
        $new -subj /CN=${5:-$1} -keyout $1.key -out $1.csr
        openssl x509 -req -days $3 -in $1.csr -CA $2.pem -CAkey $2.key -CAcreateserial -extfile san -out $1.pem
      }
      )",
                                                     script)});
    ASSERT_EQ(made.exit_code, 0) << made.output;
  }
  std::string File(const std::string& name) const { return directory_.path() + "/" + name; }
  std::string Text(const std::string& name) const {
    std::stringstream text;
    text << std::ifstream(File(name)).rdbuf();
    return text.str();
  }
  // "tls.pem" and "tls.key" are those of this name from now on.
  void Use(const std::string& name) const {
    std::ofstream(File("tls.key")) << Text(name + ".key");
    std::ofstream(File("tls.pem")) << Text(name + ".pem");
  }

 private:
  const TemporaryDirectory directory_;
};

}  // namespace kvpool

#endif  // KVPOOL_TESTS_SUPPORT_CERTIFICATES_H_
