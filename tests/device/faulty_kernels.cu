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

extern "C" __global__ void shared_of_another_block(uint32_t* words, uint32_t count) {
  __shared__ volatile uint32_t shared[kThreads];
  if (blockIdx.x == 0) shared[threadIdx.x] = words[threadIdx.x];
  __syncthreads();
  if (blockIdx.x == 1) words[threadIdx.x] = shared[count - 1 - threadIdx.x];
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

// The product of a 16 x 16 matrix of f16 (words 0 to 127, row by row) and a 16 x 8 one (the next 64, column by column), in
// the 128 words behind them, row by row. The places are those of the PTX ISA's figures, element by element: of a lane with
// groupID = lane >> 2 and threadID_in_group = lane % 4.
extern "C" __global__ void matrix_product(uint32_t* words, uint32_t count) {
  if (count == 0) return;
  const auto* const a = reinterpret_cast<const uint16_t*>(words);
  const auto* const b = a + 16 * 16;
  auto* const d = reinterpret_cast<float*>(words + 192);
  const unsigned int group = threadIdx.x >> 2, own = threadIdx.x % 4;
  uint32_t of_a[4] = {}, of_b[2] = {};
  for (unsigned int i = 0; i < 8; ++i) {
    const unsigned int row = i < 2 || (4 <= i && i < 6) ? group : group + 8;
    const unsigned int column = i < 4 ? own * 2 + (i & 1) : own * 2 + (i & 1) + 8;
    of_a[i / 2] |= uint32_t{a[row * 16 + column]} << (i % 2 * 16);
  }
  for (unsigned int i = 0; i < 4; ++i) {
    const unsigned int row = i < 2 ? own * 2 + (i & 1) : own * 2 + (i & 1) + 8;
    of_b[i / 2] |= uint32_t{b[group * 16 + row]} << (i % 2 * 16);
  }
  float of_d[4] = {};
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
      "%1, %2, %3};"
      : "+f"(of_d[0]), "+f"(of_d[1]), "+f"(of_d[2]), "+f"(of_d[3])
      : "r"(of_a[0]), "r"(of_a[1]), "r"(of_a[2]), "r"(of_a[3]), "r"(of_b[0]), "r"(of_b[1]));
  for (unsigned int i = 0; i < 4; ++i) {
    d[(i < 2 ? group : group + 8) * 8 + own * 2 + (i & 1)] = of_d[i];
  }
}

// The same of tf32, 16 x 8 and 8 x 8: a[row][k] and b[column][k] are floats, in words 0 to 127 and 128 to 191.
extern "C" __global__ void matrix_product_tf32(uint32_t* words, uint32_t count) {
  if (count == 0) return;
  const float* const a = reinterpret_cast<const float*>(words);
  const float* const b = a + 16 * 8;
  auto* const d = reinterpret_cast<float*>(words + 192);
  const unsigned int group = threadIdx.x >> 2, own = threadIdx.x % 4;
  uint32_t of_a[4], of_b[2];
  for (unsigned int i = 0; i < 4; ++i) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(of_a[i]) : "f"(a[(group + i % 2 * 8) * 8 + own + i / 2 * 4]));
  }
  for (unsigned int i = 0; i < 2; ++i) {
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(of_b[i]) : "f"(b[group * 8 + own + i * 4]));
  }
  float of_d[4] = {};
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
      "%1, %2, %3};"
      : "+f"(of_d[0]), "+f"(of_d[1]), "+f"(of_d[2]), "+f"(of_d[3])
      : "r"(of_a[0]), "r"(of_a[1]), "r"(of_a[2]), "r"(of_a[3]), "r"(of_b[0]), "r"(of_b[1]));
  for (unsigned int i = 0; i < 4; ++i) {
    d[(i < 2 ? group : group + 8) * 8 + own * 2 + (i & 1)] = of_d[i];
  }
}
