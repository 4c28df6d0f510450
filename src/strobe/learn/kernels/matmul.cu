// C = A B, one thread per number of C, everything straight from global memory: each number of A is read `n` times, each
// of B `m` times.
#include <strobe/ptx/memory.cuh>
using namespace strobe;

struct Params {
  const float* a;  // (m, k)
  const float* b;  // (k, n)
  float* c;        // (m, n)
  int m, n, k;
};

constexpr int kSide = 16;  // a block computes 16 x 16 numbers of C

STROBE_KERNEL(256, 1)
matmul(STROBE_GRID_CONSTANT Params p) {
  const int across = (p.n + kSide - 1) / kSide;
  const int row = block_idx() / across * kSide + thread_idx() / kSide;
  const int column = block_idx() % across * kSide + thread_idx() % kSide;
  if (row >= p.m || column >= p.n) return;
  float sum = 0.f;
  for (int i = 0; i < p.k; ++i) sum += ld_global(p.a + row * p.k + i) * ld_global(p.b + i * p.n + column);
  st_global(p.c + row * p.n + column, sum);
}
