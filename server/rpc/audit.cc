#include "server/rpc/audit.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "server/access/audit_line.h"

namespace kvpool {
namespace {

namespace pb = google::protobuf;

// Parts of one field of an answer that have a line.
constexpr int kMostParts = 32;

void AddMessage(const pb::Message& message, AuditLine* line);

void AddField(const pb::Message& message, const pb::FieldDescriptor& field, AuditLine* line) {
  const pb::Reflection& reflection = *message.GetReflection();
  const std::string& name = field.name();
  if (field.cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE && !field.is_repeated()) {
    return AddMessage(reflection.GetMessage(message, &field), line);
  }
  // A session is in a request and in its answer.
  if (line->has(name)) return;
  if (field.is_repeated()) return line->Add({name, reflection.FieldSize(message, &field)});
  switch (field.cpp_type()) {
    case pb::FieldDescriptor::CPPTYPE_INT32:
      return line->Add({name, reflection.GetInt32(message, &field)});
    case pb::FieldDescriptor::CPPTYPE_INT64:
      return line->Add({name, reflection.GetInt64(message, &field)});
    case pb::FieldDescriptor::CPPTYPE_UINT32:
      return line->Add({name, reflection.GetUInt32(message, &field)});
    case pb::FieldDescriptor::CPPTYPE_UINT64:
      return line->Add({name, reflection.GetUInt64(message, &field)});
    case pb::FieldDescriptor::CPPTYPE_DOUBLE:
      return line->Add({name, reflection.GetDouble(message, &field)});
    case pb::FieldDescriptor::CPPTYPE_FLOAT:
      return line->Add({name, static_cast<double>(reflection.GetFloat(message, &field))});
    case pb::FieldDescriptor::CPPTYPE_BOOL:
      return line->Add({name, reflection.GetBool(message, &field)});
    case pb::FieldDescriptor::CPPTYPE_ENUM:
      return line->AddText(name, reflection.GetEnum(message, &field)->name());
    case pb::FieldDescriptor::CPPTYPE_STRING: {
      const std::string value = reflection.GetString(message, &field);
      const bool bytes = field.type() == pb::FieldDescriptor::TYPE_BYTES;
      return line->AddText(name, bytes ? absl::BytesToHexString(value) : value);
    }
    case pb::FieldDescriptor::CPPTYPE_MESSAGE:
      return;
  }
}

void AddMessage(const pb::Message& message, AuditLine* line) {
  std::vector<const pb::FieldDescriptor*> set;
  message.GetReflection()->ListFields(message, &set);
  for (const pb::FieldDescriptor* field : set) AddField(message, *field, line);
}

// Each part of an answer whose numbers its size does not tell, such as what was erased in which tier.
void WriteParts(const Peer& peer, std::string_view method, const pb::Message& request,
                const pb::Message& response, const absl::Status& status) {
  const pb::Reflection& reflection = *response.GetReflection();
  std::vector<const pb::FieldDescriptor*> set;
  reflection.ListFields(response, &set);
  for (const pb::FieldDescriptor* field : set) {
    if (!field->is_repeated()) continue;
    const bool message = field->cpp_type() == pb::FieldDescriptor::CPPTYPE_MESSAGE;
    if (!message && field->cpp_type() != pb::FieldDescriptor::CPPTYPE_STRING) continue;
    const int size = reflection.FieldSize(response, field);
    for (int i = 0; i < std::min(size, kMostParts); ++i) {
      AuditLine line(peer, method, status);
      AddMessage(request, &line);
      line.AddText("part", field->name());
      if (message) {
        const pb::Message& part = reflection.GetRepeatedMessage(response, field, i);
        // None that is 0 is left out: nothing failed, which is a number as well.
        for (int f = 0; f < part.GetDescriptor()->field_count(); ++f) {
          AddField(part, *part.GetDescriptor()->field(f), &line);
        }
      } else {
        line.AddText("text", reflection.GetRepeatedString(response, field, i));
      }
      line.Write("operator call part");
    }
  }
}

}  // namespace

void AuditOperatorCall(const Peer& peer, std::string_view method, const pb::Message& request,
                       const pb::Message& response, const absl::Status& status) {
  AuditLine line(peer, method, status);
  AddMessage(request, &line);
  AddMessage(response, &line);
  line.Write("operator call");
  WriteParts(peer, method, request, response, status);
}

}  // namespace kvpool
