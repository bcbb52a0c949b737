#include "server/rpc/audit.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "server/base/log.h"

namespace kvpool {
namespace {

namespace pb = google::protobuf;

constexpr size_t kMostTextBytes = 256;

// The fields of one line. Values are kept here, as a LogField only refers to them.
class Line {
 public:
  Line(const Peer& peer, std::string_view method, const absl::Status& status) {
    Text("method", std::string(method));
    if (peer.process.has_value()) {
      fields_.emplace_back("uid", peer.process->uid);
      fields_.emplace_back("pid", peer.process->pid);
    } else if (peer.address.empty()) {
      Text("peer", "gone");
    } else {
      Text("peer", peer.address);
      Text("certificate", peer.certificate);
    }
    Text("code", absl::StatusCodeToString(status.code()));
    if (!status.ok()) Text("error", std::string(status.message()));
  }

  void Number(std::string_view name, uint64_t value) { fields_.emplace_back(name, value); }
  void Text(std::string_view name, std::string value) {
    if (value.size() > kMostTextBytes) value.resize(kMostTextBytes);
    fields_.emplace_back(name, texts_.emplace_back(std::move(value)));
  }
  // A name that is there already, as of a session in a request and in its answer, is not added again.
  void Message(const pb::Message& message) {
    std::vector<const pb::FieldDescriptor*> set;
    message.GetReflection()->ListFields(message, &set);
    for (const pb::FieldDescriptor* field : set) Field(message, *field);
  }
  void Write(std::string_view event) const { LogAudit(event, fields_); }

 private:
  void Field(const pb::Message& message, const pb::FieldDescriptor& field) {
    const pb::Reflection& reflection = *message.GetReflection();
    const std::string& name = field.name();
    if (field.cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE && !field.is_repeated()) {
      return Message(reflection.GetMessage(message, &field));
    }
    if (std::any_of(fields_.begin(), fields_.end(), [&](const LogField& has) { return has.name == name; }))
      return;
    if (field.is_repeated())
      return Number(name, static_cast<uint64_t>(reflection.FieldSize(message, &field)));
    switch (field.cpp_type()) {
      case pb::FieldDescriptor::CPPTYPE_INT32:
        fields_.emplace_back(name, reflection.GetInt32(message, &field));
        break;
      case pb::FieldDescriptor::CPPTYPE_INT64:
        fields_.emplace_back(name, reflection.GetInt64(message, &field));
        break;
      case pb::FieldDescriptor::CPPTYPE_UINT32:
        fields_.emplace_back(name, reflection.GetUInt32(message, &field));
        break;
      case pb::FieldDescriptor::CPPTYPE_UINT64:
        fields_.emplace_back(name, reflection.GetUInt64(message, &field));
        break;
      case pb::FieldDescriptor::CPPTYPE_DOUBLE:
        fields_.emplace_back(name, reflection.GetDouble(message, &field));
        break;
      case pb::FieldDescriptor::CPPTYPE_FLOAT:
        fields_.emplace_back(name, static_cast<double>(reflection.GetFloat(message, &field)));
        break;
      case pb::FieldDescriptor::CPPTYPE_BOOL:
        fields_.emplace_back(name, reflection.GetBool(message, &field));
        break;
      case pb::FieldDescriptor::CPPTYPE_ENUM:
        Text(name, reflection.GetEnum(message, &field)->name());
        break;
      case pb::FieldDescriptor::CPPTYPE_STRING: {
        const std::string value = reflection.GetString(message, &field);
        Text(name, field.type() == pb::FieldDescriptor::TYPE_BYTES ? absl::BytesToHexString(value) : value);
        break;
      }
      case pb::FieldDescriptor::CPPTYPE_MESSAGE:
        break;
    }
  }

  std::deque<std::string> texts_;
  std::vector<LogField> fields_;
};

}  // namespace

void AuditOperatorCall(const Peer& peer, std::string_view method, const pb::Message& request,
                       const pb::Message& response, const absl::Status& status) {
  Line line(peer, method, status);
  line.Message(request);
  line.Message(response);
  line.Write("operator call");
}

void RefusedOpenings::Audit(const Peer& peer, std::string_view method, const absl::Status& status) {
  uint64_t left_out = 0;
  {
    MutexLock lock(&mu_);
    Reason& reason = reasons_[std::min(static_cast<size_t>(status.code()), reasons_.size() - 1)];
    const auto now = std::chrono::steady_clock::now();
    if (now - reason.window_begin >= kWindow) {
      reason.window_begin = now;
      reason.lines = 0;
    }
    if (reason.lines == kMostLines) {
      ++reason.left_out;
      return;
    }
    ++reason.lines;
    left_out = std::exchange(reason.left_out, 0);
  }
  Line line(peer, method, status);
  if (left_out > 0) line.Number("left_out", left_out);
  line.Write("opening refused");
}

}  // namespace kvpool
