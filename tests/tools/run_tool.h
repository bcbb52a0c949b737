// Runs one of the tools to its end.
#ifndef KVPOOL_TESTS_TOOLS_RUN_TOOL_H_
#define KVPOOL_TESTS_TOOLS_RUN_TOOL_H_

#include <string>
#include <vector>

#include "google/protobuf/struct.pb.h"

namespace kvpool {

struct ToolResult {
  int exit_status = -1;  // -1: it did not exit by itself.
  std::string out, err;
};

ToolResult RunTool(const std::string& program, const std::vector<std::string>& arguments);

// The numbers and objects of a JSON text; fails the test if the text is no JSON.
google::protobuf::Struct ParseJson(const std::string& json);
double Number(const google::protobuf::Struct& json, const std::string& field);

}  // namespace kvpool

#endif  // KVPOOL_TESTS_TOOLS_RUN_TOOL_H_
