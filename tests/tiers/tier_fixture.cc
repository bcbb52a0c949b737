#include "tests/tiers/tier_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace kvpool {
namespace {

uint64_t WordOf(uint32_t number, uint64_t at) { return (number + 1) * 0x9e3779b97f4a7c15u ^ at; }

}  // namespace

TierFolder::TierFolder(On on) {
  path_ = on == On::kMemory ? "/dev/shm/tier.XXXXXX" : testing::TempDir() + "tier.XXXXXX";
  if (mkdtemp(path_.data()) == nullptr) std::abort();
}

TierFolder::~TierFolder() { std::filesystem::remove_all(path_); }

std::vector<std::string> TierFolder::Segments() const {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(path_)) {
    if (entry.path().extension() == ".slots") paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

TierKey KeyOf(uint32_t number) {
  TierKey key;
  key.space.fill(7);
  std::memcpy(key.block.data(), &number, sizeof(number));
  key.owner = OwnerOf(number);
  return key;
}

TierOwner OwnerOf(uint32_t number) {
  TierOwner owner;
  owner.fill(static_cast<uint8_t>(1 + number % 2));
  return owner;
}

std::shared_ptr<TierBuffer> ValueOf(uint32_t number, uint64_t bytes) {
  auto buffer = BufferStock(0).Take(bytes);
  for (uint64_t at = 0; at < bytes; at += sizeof(uint64_t)) {
    const uint64_t word = WordOf(number, at);
    std::memcpy(buffer->data() + at, &word, std::min(sizeof(word), bytes - at));
  }
  return buffer;
}

std::vector<TierResult> Store(Tier* tier, const std::vector<uint32_t>& numbers, uint64_t bytes) {
  std::vector<TierStore> stores;
  for (const uint32_t number : numbers) stores.push_back({KeyOf(number), ValueOf(number, bytes)});
  std::vector<TierResult> results(numbers.size());
  tier->Store(std::move(stores), [&](size_t index, TierResult result) { results[index] = result; });
  tier->Drain();
  return results;
}

Loaded Load(Tier* tier, const std::vector<uint32_t>& numbers, uint64_t bytes, Tier::Deadline deadline) {
  std::vector<TierLoad> loads;
  std::vector<std::shared_ptr<TierBuffer>> buffers;
  for (const uint32_t number : numbers) {
    buffers.push_back(BufferStock(0).Take(bytes));
    loads.push_back({KeyOf(number), buffers.back()});
  }
  Loaded loaded;
  loaded.results.resize(numbers.size());
  tier->Load(std::move(loads), deadline,
             [&](size_t index, TierResult result) { loaded.results[index] = result; });
  tier->Drain();
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (loaded.results[i] != TierResult::kDone) continue;
    ++loaded.right;
    if (std::memcmp(buffers[i]->data(), ValueOf(numbers[i], bytes)->data(), bytes) != 0) ++loaded.wrong;
  }
  loaded.right -= loaded.wrong;
  return loaded;
}

std::vector<bool> Exists(Tier* tier, const std::vector<uint32_t>& numbers) {
  std::vector<TierKey> keys;
  for (const uint32_t number : numbers) keys.push_back(KeyOf(number));
  std::vector<TierPresence> found(keys.size());
  tier->Exists(keys, absl::MakeSpan(found));
  std::vector<bool> yes;
  for (const TierPresence presence : found) yes.push_back(presence == TierPresence::kYes);
  return yes;
}

std::vector<uint32_t> Numbers(uint32_t count, uint32_t first) {
  std::vector<uint32_t> numbers(count);
  for (uint32_t i = 0; i < count; ++i) numbers[i] = first + i;
  return numbers;
}

}  // namespace kvpool
