// Writes the answers to batches, as Protocol Buffers writes them, byte for byte.
//
// Nearly all answers are some dozens of results of leases, seals, matches and releases. Protocol Buffers asks each of
// their messages for its size and then writes it, some 300 instructions a result, a sixth of what a batch costs in all.
// Such results are written here in one pass; any other, and whatever has a message or a refusal in it, is left to Protocol Buffers.
#ifndef KVPOOL_SERVER_WIRE_STEP_WRITER_H_
#define KVPOOL_SERVER_WIRE_STEP_WRITER_H_

#include <cstddef>
#include <string>

#include "kvpool/v1/engine.pb.h"

namespace kvpool {

// Makes of `bytes` what `response` is on the wire. Its memory is used again.
void WriteStep(const v1::StepResponse& response, std::string* bytes);
// As many bytes as WriteStep needs for the results at most, if nothing else is in the response.
size_t MostOfStep(const v1::StepResponse& response);

}  // namespace kvpool

#endif  // KVPOOL_SERVER_WIRE_STEP_WRITER_H_
