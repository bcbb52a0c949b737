#include "tests/support/fake_cuda/ptx/launch.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/fake_cuda/ptx/image.h"
#include "tests/support/fake_cuda/ptx/program.h"
#include "tests/support/fake_cuda/ptx/warp.h"
#include "tests/support/fake_cuda/state.h"

namespace kvpool::fake::ptx {
namespace {

constexpr uint64_t kWordBytes = 4;

struct Module;

class PtxKernel : public FakeKernel {
 public:
  PtxKernel(Module* module, const Kernel* kernel) : module_(module), kernel_(kernel) {}
  ~PtxKernel() override;
  uint32_t max_threads() const override {
    return kernel_->max_threads != 0 ? kernel_->max_threads : FakeKernel::max_threads();
  }
  Work Bind(const Grid& grid, void** arguments) const override;

 private:
  CUresult Run(const Grid& grid, const std::vector<std::byte>& parameters) const;
  void LoseContext(const Fault& fault, uint32_t x, uint32_t y) const;

  Module* const module_;
  const Kernel* const kernel_;
  mutable Counts counts_;
};

struct Module {
  std::unique_ptr<const Program> program;
  std::unique_ptr<Shadow> shared_shadow;  // kept, since pages of memory cost more than most launches
  std::map<std::string, std::unique_ptr<PtxKernel>, std::less<>> kernels;
};

// All that kernels share. One is executed at a time, in any process's streams.
struct Machine {
  std::mutex mu;
  std::map<const void*, std::unique_ptr<Module>> modules;  // They are made once for each image, and kept.
  uint32_t moments = 0;
  std::vector<Warp> warps;  // Their registers are allocated once.
};
Machine& TheMachine() {
  static Machine machine;  // destroyed at the end of the process, which is when kernels tell their counts
  return machine;
}

// One write, so that the lines of several processes don't mix.
void AppendToFile(const char* path, const std::string& line) {
  const int fd = ::open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0 || ::write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
    Die(std::string("can't write ") + path);
  ::close(fd);
}

PtxKernel::~PtxKernel() {
  const char* path = std::getenv("KVPOOL_FAKE_KERNELS_COUNTS");
  if (path == nullptr) return;
  std::string line = kernel_->name;
  for (const uint64_t number :
       {uint64_t{kernel_->code.size()}, counts_.launches, counts_.thread_blocks, counts_.threads,
        counts_.instructions, counts_.lane_instructions, counts_.matrix_products, counts_.barriers,
        counts_.read_bytes, counts_.read_sectors, counts_.written_bytes, counts_.written_sectors,
        kWordBytes * counts_.footprint.read_words, kWordBytes * counts_.footprint.written_words}) {
    line += '\t' + std::to_string(number);
  }
  AppendToFile(path, line + '\n');
}

// What is mapped now. A kernel's memory stays mapped while it runs: whoever unmaps waits for that.
std::vector<Region> MappedRegions() {
  State& state = TheState();
  const std::lock_guard lock(state.mu);
  std::vector<Region> regions;
  for (const auto& [start, mapping] : state.mappings) {
    regions.push_back({start, start + mapping.bytes, mapping.protection, mapping.memory->shadow.get()});
  }
  for (const auto& [start, import] : state.imports) {
    regions.push_back({start, start + import.mapping.bytes, PROT_READ | PROT_WRITE, nullptr});
  }
  std::ranges::sort(regions, {}, &Region::begin);
  return regions;
}

void SetSpecial(Warp* warp, Special special, uint32_t value) {
  std::fill_n(warp->at<uint32_t>(0) + special * kLanes, kLanes, value);
}

void StartWarp(Warp* warp, const Grid& grid, uint32_t x, uint32_t y) {
  warp->Start(grid.threads - warp->first_thread);
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    warp->at<uint32_t>(0)[Special::kTidX * kLanes + lane] = warp->first_thread + lane;
  }
  SetSpecial(warp, Special::kNtidX, grid.threads);
  SetSpecial(warp, Special::kCtaidX, x);
  SetSpecial(warp, Special::kCtaidY, y);
  SetSpecial(warp, Special::kNctaidX, grid.x);
  SetSpecial(warp, Special::kNctaidY, grid.y);
  SetSpecial(warp, Special::kZero, 0);
}

// Lets the warps pass a barrier if all threads of the block wait at it. False: there is nothing left to do.
bool PassBarrier(Launch* launch, Warp* warps, size_t count) {
  const Warp* waiting = nullptr;
  for (Warp* warp = warps; warp != warps + count; ++warp) {
    if (!warp->IsOver()) waiting = warp;
  }
  if (waiting == nullptr) return false;
  for (Warp* warp = warps; warp != warps + count; ++warp) {
    const uint32_t lanes = std::min(kLanes, launch->threads - warp->first_thread);
    if (warp->groups.size() == 1 && warp->groups[0].pc == waiting->groups[0].pc &&
        warp->groups[0].lanes == (lanes == kLanes ? kAllLanes : (1u << lanes) - 1)) {
      warp->PassBarrier();
      continue;
    }
    warp->pc = waiting->groups[0].pc;
    warp->Fail(CUDA_ERROR_LAUNCH_FAILED, 0,
               "is not here, and will not be, when others of its block wait at this barrier");
    return false;
  }
  ++launch->counts->barriers;
  return true;
}

// A GPU promises no order, neither of thread blocks nor of the warps of one between two barriers. Launches take turns: from
// the first to the last, from the last to the first, and scattered.
class Order {
 public:
  // REQUIRES: count > 0
  Order(uint64_t count, uint64_t launches_before) : count_(count) {
    if (launches_before % 3 == 0) return;
    step_ = launches_before % 3 == 1 ? count - 1 : count * 5 / 8 + 1;
    while (std::gcd(step_, count) != 1) ++step_;
    begin_ = launches_before % 3 == 1 ? count - 1 : launches_before % count;
  }
  // What is i-th of `count`: each is once.
  uint64_t operator[](uint64_t i) const { return (begin_ + i * step_) % count_; }

 private:
  const uint64_t count_;
  uint64_t begin_ = 0;
  uint64_t step_ = 1;
};

Work PtxKernel::Bind(const Grid& grid, void** arguments) const {
  std::vector<std::byte> parameters(kernel_->parameter_bytes);
  for (size_t i = 0; i < kernel_->parameters.size(); ++i) {
    std::memcpy(parameters.data() + kernel_->parameters[i].offset, arguments[i],
                kernel_->parameters[i].bytes);
  }
  return [this, grid, parameters = std::move(parameters)] { return Run(grid, parameters); };
}

void PtxKernel::LoseContext(const Fault& fault, uint32_t x, uint32_t y) const {
  const std::string words = kernel_->name + ": thread " + std::to_string(fault.thread) + " of block (" +
                            std::to_string(x) + ", " + std::to_string(y) + ") " + fault.what + ": PTX line " +
                            std::to_string(fault.at->line) + ": " + module_->program->LineOf(*fault.at);
  std::fprintf(stderr, "fake libcuda: %s\n", words.c_str());
  State& state = TheState();
  const std::lock_guard lock(state.mu);
  state.lost_words = words;
}

CUresult PtxKernel::Run(const Grid& grid, const std::vector<std::byte>& parameters) const {
  Machine& machine = TheMachine();
  const std::lock_guard lock(machine.mu);
  ++counts_.launches;
  Launch launch = {.kernel = kernel_,
                   .counts = &counts_,
                   .regions = MappedRegions(),
                   .parameters = parameters,
                   .shared = std::vector<std::byte>(module_->program->shared_bytes),
                   .shared_shadow = module_->shared_shadow.get(),
                   .threads = grid.threads,
                   .moment = {.launch = machine.moments + 1}};
  const size_t warps = (grid.threads + kLanes - 1) / kLanes;
  if (machine.warps.size() < warps) machine.warps.resize(warps);
  for (size_t i = 0; i < warps; ++i) {
    machine.warps[i].launch = &launch;
    machine.warps[i].first_thread = static_cast<uint32_t>(i) * kLanes;
  }
  const uint64_t blocks = uint64_t{grid.x} * grid.y;
  const uint64_t before = counts_.launches - 1;
  const Order block_order(blocks, before), warp_order(warps, before);
  for (uint64_t turn = 0; turn < blocks; ++turn) {
    const uint64_t block = block_order[turn];
    const auto x = static_cast<uint32_t>(block % grid.x), y = static_cast<uint32_t>(block / grid.x);
    ++counts_.thread_blocks;
    counts_.threads = std::max<uint64_t>(counts_.threads, grid.threads);
    launch.moment.block = launch.moment.now = ++machine.moments;
    module_->shared_shadow->Forget();
    for (size_t i = 0; i < warps; ++i) StartWarp(&machine.warps[i], grid, x, y);
    do {
      launch.moment.now = ++machine.moments;
      for (size_t i = 0; i < warps && !launch.fault.has_value(); ++i) machine.warps[warp_order[i]].Run();
    } while (!launch.fault.has_value() && PassBarrier(&launch, machine.warps.data(), warps));
    if (!launch.fault.has_value()) continue;
    LoseContext(*launch.fault, x, y);
    return launch.fault->result;
  }
  return CUDA_SUCCESS;
}

}  // namespace

const FakeKernel* FindKernel(const void* image, const char* name) {
  Machine& machine = TheMachine();
  const std::lock_guard lock(machine.mu);
  std::unique_ptr<Module>& module = machine.modules[image];
  if (module == nullptr) {
    module = std::make_unique<Module>();
    module->program = Parse(TextOf(image));
    module->shared_shadow = std::make_unique<Shadow>(std::max<size_t>(module->program->shared_bytes, 1));
    for (const auto& [kernel_name, kernel] : module->program->kernels) {
      module->kernels[kernel_name] = std::make_unique<PtxKernel>(module.get(), kernel.get());
    }
  }
  const auto found = module->kernels.find(name);
  return found != module->kernels.end() ? found->second.get() : nullptr;
}

}  // namespace kvpool::fake::ptx
