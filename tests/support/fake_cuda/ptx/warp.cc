#include "tests/support/fake_cuda/ptx/warp.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace kvpool::fake::ptx {
namespace {

constexpr uint64_t kSectorBytes = 32;
constexpr uint32_t kNever = UINT32_MAX;

}  // namespace

const Region* Launch::Find(uint64_t address, uint32_t bytes) const {
  const auto after = std::ranges::upper_bound(regions, address, {}, &Region::begin);
  if (after == regions.begin()) return nullptr;
  const Region& region = *std::prev(after);
  return address + bytes <= region.end ? &region : nullptr;
}

void Warp::Start(uint32_t thread_count) {
  const Kernel& kernel = *launch->kernel;
  if (registers.size() < kernel.register_bytes) registers.resize(kernel.register_bytes);
  constants = kernel.constants.data();
  pc = 0;
  lanes = thread_count >= kLanes ? kAllLanes : (1u << thread_count) - 1;
  ended = ~lanes;
  pick_at = kNever;
  groups.clear();
}

void Warp::Run() {
  const Kernel& kernel = *launch->kernel;
  Counts& counts = *launch->counts;
  uint64_t instructions = 0, lane_instructions = 0;
  while (!launch->fault.has_value()) {
    if ((lanes == 0 || pc >= pick_at) && !Pick()) break;
    const Instruction& instruction = kernel.code[pc++];
    ++instructions;
    active = lanes;
    if (instruction.guard != kNoPlace) {
      const uint32_t guard = *at<uint32_t>(instruction.guard);
      active &= instruction.guard_negated ? ~guard : guard;
      if (active == 0) continue;
    }
    lane_instructions += std::popcount(active);
    instruction.execute(*this, instruction);
  }
  counts.instructions += instructions;
  counts.lane_instructions += lane_instructions;
}

// Chooses the group that goes on. False: none can.
bool Warp::Pick() {
  if (lanes != 0) groups.push_back({pc, lanes, Wait::kNothing});
  lanes = 0;
  // Groups at the same place are one again, and what one of them waited for may have come.
  for (size_t i = 0; i < groups.size(); ++i) {
    for (size_t j = i + 1; j < groups.size();) {
      const bool at_barrier = groups[i].wait == Wait::kBarrier;
      if (groups[i].pc != groups[j].pc || at_barrier != (groups[j].wait == Wait::kBarrier)) {
        ++j;
        continue;
      }
      groups[i].lanes |= groups[j].lanes;
      if (!at_barrier) groups[i].wait = Wait::kNothing;
      groups.erase(groups.begin() + static_cast<ptrdiff_t>(j));
    }
  }
  auto chosen = groups.end();
  for (auto group = groups.begin(); group != groups.end(); ++group) {
    if (group->wait == Wait::kNothing && (chosen == groups.end() || group->pc < chosen->pc)) chosen = group;
  }
  if (chosen == groups.end()) {
    const auto waiting = std::ranges::find(groups, Wait::kOtherLanes, &Group::wait);
    if (waiting != groups.end()) {
      pc = waiting->pc + 1;
      Fail(CUDA_ERROR_LAUNCH_FAILED, static_cast<uint32_t>(std::countr_zero(waiting->lanes)),
           "waits for lanes of its warp that never come here");
    }
    return false;
  }
  pc = chosen->pc;
  lanes = chosen->lanes;
  groups.erase(chosen);
  pick_at = kNever;
  for (const Group& group : groups) {
    if (group.wait != Wait::kBarrier && group.pc > pc) pick_at = std::min(pick_at, group.pc);
  }
  return true;
}

void Warp::PassBarrier() {
  for (Group& group : groups) group.wait = Wait::kNothing;
}

bool Warp::HaveMet(uint32_t mask) {
  const uint32_t first = static_cast<uint32_t>(std::countr_zero(active));
  if ((active & ~mask) != 0) {
    Fail(CUDA_ERROR_LAUNCH_FAILED, first, "is not in the mask of lanes that it passes");
    return false;
  }
  if (active == (mask & ~ended)) return true;
  groups.push_back({pc - 1, active, Wait::kOtherLanes});
  lanes &= ~active;
  pick_at = 0;
  return false;
}

void Warp::Fail(CUresult result, uint32_t lane, std::string what) {
  launch->fault = {result, first_thread + lane, &launch->kernel->code[pc - 1], std::move(what)};
}

bool Warp::Resolve(const Instruction& instruction, Touch touch, uint32_t bytes, uint64_t* addresses) {
  if (instruction.short_address) {
    const auto* base = at<uint32_t>(instruction.from[0]);
    Each([&](uint32_t i) { addresses[i] = base[i] + static_cast<uint64_t>(instruction.displacement); });
  } else {
    const auto* base = at<uint64_t>(instruction.from[0]);
    Each([&](uint32_t i) { addresses[i] = base[i] + static_cast<uint64_t>(instruction.displacement); });
  }
  uint64_t misaligned = 0;
  Each([&](uint32_t i) { misaligned |= addresses[i] & (bytes - 1); });
  if (misaligned != 0) {
    uint32_t lane = static_cast<uint32_t>(std::countr_zero(active));
    while ((active >> lane & 1) == 0 || (addresses[lane] & (bytes - 1)) == 0) ++lane;
    Fail(CUDA_ERROR_MISALIGNED_ADDRESS, lane,
         "accesses " + std::to_string(bytes) + " bytes at an address that is no multiple of that");
    return false;
  }
  if (instruction.space == Space::kParam || instruction.space == Space::kShared) {
    const bool shared = instruction.space == Space::kShared;
    std::vector<std::byte>& memory = shared ? launch->shared : launch->parameters;
    for (uint32_t rest = active; rest != 0; rest &= rest - 1) {
      const auto lane = static_cast<uint32_t>(std::countr_zero(rest));
      const uint64_t offset = addresses[lane];
      if (offset > memory.size() || bytes > memory.size() - offset) {
        Fail(CUDA_ERROR_ILLEGAL_ADDRESS, lane, shared ? "leaves shared memory" : "leaves the parameters");
        return false;
      }
      if (shared) {
        Footprint of_shared;  // It says nothing: the memory begins with each thread block.
        if (const char* wrong = launch->shared_shadow->Check(offset, bytes, touch, first_thread + lane,
                                                             launch->moment, &of_shared)) {
          Fail(CUDA_ERROR_LAUNCH_FAILED, lane, wrong);
          return false;
        }
      }
      addresses[lane] = reinterpret_cast<uint64_t>(memory.data()) + offset;
    }
    return true;
  }
  const Region* region = nullptr;
  const int needed = touch == Touch::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  for (uint32_t rest = active; rest != 0; rest &= rest - 1) {
    const auto lane = static_cast<uint32_t>(std::countr_zero(rest));
    const uint64_t address = addresses[lane];
    if (region == nullptr || address < region->begin || address + bytes > region->end) {
      region = launch->Find(address, bytes);
      if (region == nullptr || (region->protection & needed) != needed) {
        Fail(CUDA_ERROR_ILLEGAL_ADDRESS, lane,
             region == nullptr ? "accesses memory that is not mapped"
                               : "writes memory that is mapped read-only");
        return false;
      }
    }
    if (region->shadow == nullptr) continue;
    if (const char* wrong = region->shadow->Check(address - region->begin, bytes, touch, first_thread + lane,
                                                  launch->moment, &launch->counts->footprint)) {
      Fail(CUDA_ERROR_LAUNCH_FAILED, lane, wrong);
      return false;
    }
  }
  Count(addresses, bytes, touch);
  return true;
}

void Warp::Count(const uint64_t* addresses, uint32_t bytes, Touch touch) {
  uint64_t places[kLanes];
  uint32_t count = 0;
  bool sorted = true;
  for (uint32_t rest = active; rest != 0; rest &= rest - 1) {
    const uint64_t address = addresses[std::countr_zero(rest)];
    if (count > 0 && places[count - 1] == address) continue;
    sorted &= count == 0 || places[count - 1] < address;
    places[count++] = address;
  }
  if (!sorted) {
    std::sort(places, places + count);
    count = static_cast<uint32_t>(std::unique(places, places + count) - places);
  }
  // An access is aligned to its size, at most 16 bytes, and thus in one sector.
  uint32_t sectors = 1;
  for (uint32_t i = 1; i < count; ++i) sectors += places[i] / kSectorBytes != places[i - 1] / kSectorBytes;
  Counts& counts = *launch->counts;
  if (touch != Touch::kWrite) counts.read_bytes += uint64_t{count} * bytes, counts.read_sectors += sectors;
  if (touch != Touch::kRead)
    counts.written_bytes += uint64_t{count} * bytes, counts.written_sectors += sectors;
}

}  // namespace kvpool::fake::ptx
