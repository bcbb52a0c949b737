#include "server/access/audit_line.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_join.h"

namespace kvpool {
namespace {

constexpr size_t kMostTextBytes = 256;

}  // namespace

AuditLine::AuditLine(const Peer& peer, std::string_view method, const absl::Status& status) {
  AddText("method", std::string(method));
  if (peer.process != nullptr) {
    Add({"uid", peer.process->uid});
    Add({"pid", peer.process->pid});
  } else {
    AddText("peer", peer.address);
    AddText("certificate", absl::StrJoin(peer.names, ","));
  }
  AddText("code", absl::StatusCodeToString(status.code()));
  if (!status.ok()) AddText("error", std::string(status.message()));
}

void AuditLine::AddText(std::string_view name, std::string value) {
  if (value.size() > kMostTextBytes) value.resize(kMostTextBytes);
  fields_.emplace_back(name, texts_.emplace_back(std::move(value)));
}

bool AuditLine::has(std::string_view name) const {
  return std::any_of(fields_.begin(), fields_.end(),
                     [&](const LogField& field) { return field.name == name; });
}

}  // namespace kvpool
