// Weights of policies that compare keys with statistics of a model's queries, from a dump of these queries.
#ifndef KVPOOL_CUDA_LAB_CALIBRATE_H_
#define KVPOOL_CUDA_LAB_CALIBRATE_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "cuda/lab/tensor.h"

namespace kvpool::lab {

// NAME=VALUE:
//   kv_heads=0            query heads are shared by so many kv heads; 0: each has its own
//   sinks=4               first queries that are left out
//   theta=10000           RoPE's frequencies are theta^(-2 f / dim), f = 0 … dim / 2 - 1, unless the input has inv_freq
//   pairing=half          RoPE turns elements f and f + dim / 2 together; or interleaved: 2 f and 2 f + 1
//   scale=1               factor of RoPE's cosines and sines (attention_factor of YaRN)
//   position=0            expected_attention: the first of the positions to come
//   future=512            expected_attention: how many positions there are to come
//   use_covariance=true   expected_attention: covariances too, not only means
//   farthest=65536        triattention: offsets are the powers of 2 up to this, unless the input has offsets
using CalibrationSettings = std::vector<std::pair<std::string, std::string>>;

// Returns `weights` for `policy`, in the order that its header states. It reads queries [layer][query][query head][dim],
// or [query][query head][dim] of one layer: the i-th is at position i of a text.
//
//   policy               the queries are     weights
//   expected_attention   before RoPE         [layer][query head][dim, dim * dim]: mean and covariance (over the number
//                                            of queries), turned by RoPE averaged over the positions to come
//   triattention         before RoPE         [layer][kv head][3 * dim / 2], [dim / 2]
//   qfilters             as they meet keys   [layer][kv head][dim]
//
// The input may have inv_freq [dim / 2] in radians for each position, and offsets, in positions. INVALID_ARGUMENT names
// a tensor or a parameter, and what it must be.
absl::StatusOr<Tensors> Calibrate(const Tensors& tensors, const std::string& policy,
                                  const CalibrationSettings& settings);

}  // namespace kvpool::lab

#endif  // KVPOOL_CUDA_LAB_CALIBRATE_H_
