// One audit line of the log while it is put together: who, what, and what came of it.
#ifndef KVPOOL_SERVER_ACCESS_AUDIT_LINE_H_
#define KVPOOL_SERVER_ACCESS_AUDIT_LINE_H_

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "server/access/peer.h"
#include "server/base/log.h"

namespace kvpool {

class AuditLine {
 public:
  // Begins with method, peer, code and, if it is not OK, the error.
  AuditLine(const Peer& peer, std::string_view method, const absl::Status& status);
  AuditLine(const AuditLine&) = delete;
  AuditLine& operator=(const AuditLine&) = delete;

  // `name` outlives the line. Text is copied, and cut after 256 bytes.
  void Add(LogField number) { fields_.push_back(number); }
  void AddText(std::string_view name, std::string value);
  bool has(std::string_view name) const;
  void Write(std::string_view event) const { LogAudit(event, fields_); }

 private:
  std::deque<std::string> texts_;  // The fields refer to them.
  std::vector<LogField> fields_;
};

}  // namespace kvpool

#endif  // KVPOOL_SERVER_ACCESS_AUDIT_LINE_H_
