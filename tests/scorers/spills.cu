// Keeps 48 numbers at once where a thread has 32 registers: the gate of cuda/toolkit.cmake must refuse it.
extern "C" __global__ void __launch_bounds__(1024, 2) spills(const float* from, float* to) {
  float x[48];
#pragma unroll
  for (int i = 0; i < 48; ++i) x[i] = from[i * 1024 + threadIdx.x];
#pragma unroll
  for (int round = 0; round < 4; ++round) {
#pragma unroll
    for (int i = 0; i < 48; ++i) x[i] = x[i] * x[(i + 17) % 48] + x[(i + 31) % 48];
  }
#pragma unroll
  for (int i = 0; i < 48; ++i) to[i * 1024 + threadIdx.x] = x[i];
}
