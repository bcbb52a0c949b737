// Kernels with one mistake each, and a sound one. They take an array of `count` words, and a thread for each of them.
#include <cstdint>

namespace {

constexpr unsigned int kAllLanes = 0xffffffffu;
constexpr unsigned int kThreads = 64;  // a thread block's

}  // namespace

// words[i] += words[count - 1 - i], through shared memory and in the array itself.
extern "C" __global__ void sound(uint32_t* words, uint32_t count) {
  __shared__ uint32_t shared[kThreads];
  const uint32_t i = threadIdx.x;
  shared[i] = words[i];
  __syncthreads();
  words[i] += shared[count - 1 - i];
}

extern "C" __global__ void empty(uint32_t* words, uint32_t count) {}

extern "C" __global__ void misaligned(uint32_t* words, uint32_t count) {
  reinterpret_cast<uint64_t*>(words + 1)[threadIdx.x / 4] = count;
}

extern "C" __global__ void outside(uint32_t* words, uint32_t count) {
  words[threadIdx.x + (uint64_t{count} << 40)] = 1;
}

extern "C" __global__ void unwritten(uint32_t* words, uint32_t count) {
  words[threadIdx.x] = words[threadIdx.x + count];
}

extern "C" __global__ void unwritten_shared(uint32_t* words, uint32_t count) {
  __shared__ uint32_t shared[kThreads];
  if (threadIdx.x != 5) shared[threadIdx.x] = words[threadIdx.x];
  __syncthreads();
  words[threadIdx.x] = shared[count - 1 - threadIdx.x];
}

extern "C" __global__ void no_barrier(uint32_t* words, uint32_t count) {
  __shared__ uint32_t shared[kThreads];
  shared[threadIdx.x] = words[threadIdx.x];
  words[threadIdx.x] = shared[count - 1 - threadIdx.x];
}

extern "C" __global__ void no_barrier_in_array(uint32_t* words, uint32_t count) {
  words[threadIdx.x] += words[count - 1 - threadIdx.x];
}

extern "C" __global__ void blocks_race(uint32_t* words, uint32_t count) { words[threadIdx.x] = blockIdx.x; }

extern "C" __global__ void barrier_for_some(uint32_t* words, uint32_t count) {
  if (threadIdx.x < count / 2) __syncthreads();
  words[threadIdx.x] = 1;
}

extern "C" __global__ void shuffle_of_some(uint32_t* words, uint32_t count) {
  uint32_t x = words[threadIdx.x];
  if (x % 2 == 1) x += __shfl_xor_sync(kAllLanes, x, 1);
  words[threadIdx.x] = x;
}
