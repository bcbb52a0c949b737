// The parts of MakeNaive. Each answers null for a name that is not of its family.
#ifndef KVPOOL_TESTS_REPLACEMENT_NAIVE_FAMILIES_H_
#define KVPOOL_TESTS_REPLACEMENT_NAIVE_FAMILIES_H_

#include <memory>
#include <string_view>

#include "tests/replacement/naive.h"

namespace kvpool {

std::unique_ptr<NaivePolicy> MakeNaiveCompared(std::string_view name, const PolicyOptions& options);
std::unique_ptr<NaivePolicy> MakeNaiveQueues(std::string_view name, const PolicyOptions& options);
std::unique_ptr<NaivePolicy> MakeNaiveTurned(std::string_view name, const PolicyOptions& options);

}  // namespace kvpool

#endif  // KVPOOL_TESTS_REPLACEMENT_NAIVE_FAMILIES_H_
