#include "server/rpc/reflection_service.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>

#include <set>

#include "absl/strings/str_cat.h"

namespace kvpool {
namespace {

namespace reflection = grpc::reflection::v1alpha;
namespace pb = google::protobuf;
using ReflectionSite = RpcSite<reflection::ServerReflection::AsyncService>;

// Appends the file and everything that it imports, each once.
void AppendFile(const pb::FileDescriptor* file, std::set<const pb::FileDescriptor*>* seen,
                reflection::FileDescriptorResponse* response) {
  if (!seen->insert(file).second) return;
  pb::FileDescriptorProto proto;
  file->CopyTo(&proto);
  proto.SerializeToString(response->add_file_descriptor_proto());
  for (int i = 0; i < file->dependency_count(); ++i) AppendFile(file->dependency(i), seen, response);
}

void AnswerFile(const pb::FileDescriptor* file, const std::string& what,
                reflection::ServerReflectionResponse* response) {
  if (file == nullptr) {
    response->mutable_error_response()->set_error_code(static_cast<int>(grpc::StatusCode::NOT_FOUND));
    response->mutable_error_response()->set_error_message(absl::StrCat("no ", what));
    return;
  }
  std::set<const pb::FileDescriptor*> seen;
  AppendFile(file, &seen, response->mutable_file_descriptor_response());
}

// One call: reads a request, answers it, reads the next. It belongs to its queue's thread.
class ReflectionCall final : public RpcCall {
 public:
  static void Accept(const ReflectionSite& site, const std::vector<std::string>* services) {
    auto* call = new ReflectionCall(site, services);
    site.service->RequestServerReflectionInfo(&call->context_, &call->stream_, site.queue->cq(),
                                              site.queue->cq(), static_cast<RpcTag*>(&call->accept_tag_));
  }

  // Nothing is to be done: the read or write under way was cancelled, and its return ends the call.
  void Abandon() override {}
  void OnRest() override {}

 private:
  ReflectionCall(const ReflectionSite& site, const std::vector<std::string>* services)
      : site_(site), services_(services) {}
  ~ReflectionCall() = default;

  void OnAccepted(bool ok) {
    if (!ok) {
      delete this;  // The server stops.
      return;
    }
    if (!site_.queue->stopping()) Accept(site_, services_);
    site_.queue->Begin(this);
    stream_.Read(&request_, static_cast<RpcTag*>(&read_tag_));
  }
  void OnRead(bool ok) {
    if (!ok) return stream_.Finish(grpc::Status::OK, static_cast<RpcTag*>(&finish_tag_));
    stream_.Write(Reflect(request_, *services_), static_cast<RpcTag*>(&write_tag_));
  }
  void OnWritten(bool ok) {
    if (!ok) return stream_.Finish(grpc::Status::CANCELLED, static_cast<RpcTag*>(&finish_tag_));
    stream_.Read(&request_, static_cast<RpcTag*>(&read_tag_));
  }
  void OnFinished(bool ok) {
    site_.queue->End(this);
    delete this;
  }

  const ReflectionSite site_;
  const std::vector<std::string>* const services_;
  grpc::ServerContext context_;
  reflection::ServerReflectionRequest request_;
  grpc::ServerAsyncReaderWriter<reflection::ServerReflectionResponse, reflection::ServerReflectionRequest>
      stream_{&context_};
  MethodTag<ReflectionCall> accept_tag_{this, &ReflectionCall::OnAccepted};
  MethodTag<ReflectionCall> read_tag_{this, &ReflectionCall::OnRead};
  MethodTag<ReflectionCall> write_tag_{this, &ReflectionCall::OnWritten};
  MethodTag<ReflectionCall> finish_tag_{this, &ReflectionCall::OnFinished};
};

}  // namespace

reflection::ServerReflectionResponse Reflect(const reflection::ServerReflectionRequest& request,
                                             const std::vector<std::string>& services) {
  const pb::DescriptorPool& pool = *pb::DescriptorPool::generated_pool();
  reflection::ServerReflectionResponse response;
  response.set_valid_host(request.host());
  *response.mutable_original_request() = request;
  switch (request.message_request_case()) {
    case reflection::ServerReflectionRequest::kFileByFilename:
      AnswerFile(pool.FindFileByName(request.file_by_filename()),
                 absl::StrCat("file \"", request.file_by_filename(), "\""), &response);
      break;
    case reflection::ServerReflectionRequest::kFileContainingSymbol:
      AnswerFile(pool.FindFileContainingSymbol(request.file_containing_symbol()),
                 absl::StrCat("symbol \"", request.file_containing_symbol(), "\""), &response);
      break;
    case reflection::ServerReflectionRequest::kFileContainingExtension: {
      const auto& asked = request.file_containing_extension();
      const pb::Descriptor* type = pool.FindMessageTypeByName(asked.containing_type());
      const pb::FieldDescriptor* extension =
          type == nullptr ? nullptr : pool.FindExtensionByNumber(type, asked.extension_number());
      AnswerFile(
          extension == nullptr ? nullptr : extension->file(),
          absl::StrCat("extension ", asked.extension_number(), " of \"", asked.containing_type(), "\""),
          &response);
      break;
    }
    case reflection::ServerReflectionRequest::kAllExtensionNumbersOfType: {
      const std::string& name = request.all_extension_numbers_of_type();
      const pb::Descriptor* type = pool.FindMessageTypeByName(name);
      if (type == nullptr) {
        AnswerFile(nullptr, absl::StrCat("message type \"", name, "\""), &response);
        break;
      }
      std::vector<const pb::FieldDescriptor*> extensions;
      pool.FindAllExtensions(type, &extensions);
      response.mutable_all_extension_numbers_response()->set_base_type_name(name);
      for (const pb::FieldDescriptor* extension : extensions) {
        response.mutable_all_extension_numbers_response()->add_extension_number(extension->number());
      }
      break;
    }
    case reflection::ServerReflectionRequest::kListServices:
      for (const std::string& service : services) {
        response.mutable_list_services_response()->add_service()->set_name(service);
      }
      break;
    case reflection::ServerReflectionRequest::MESSAGE_REQUEST_NOT_SET:
      response.mutable_error_response()->set_error_code(static_cast<int>(grpc::StatusCode::INVALID_ARGUMENT));
      response.mutable_error_response()->set_error_message("message_request is not set");
      break;
  }
  return response;
}

void AcceptReflectionCalls(const ReflectionSite& site, const std::vector<std::string>* services) {
  ReflectionCall::Accept(site, services);
}

}  // namespace kvpool
