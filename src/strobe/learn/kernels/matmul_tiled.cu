// C = A B in tiles: a block fetches 16 x 16 numbers of A and of B into shared memory, and each is used 16 times before
// the next two come.
#include <strobe/ptx/memory.cuh>
#include <strobe/ptx/warp.cuh>
using namespace strobe;

struct Params {
  const float* a;  // (m, k)
  const float* b;  // (k, n)
  float* c;        // (m, n)
  int m, n, k;
};

constexpr int kSide = 16;

// Two tiles of 16 x 16 floats; shared memory is addressed in bytes.
STROBE_DEVICE u32 cell(int tile, int row, int column) {
  return smem_base() + ((tile * kSide + row) * kSide + column) * 4;
}

STROBE_KERNEL(256, 1)
matmul_tiled(STROBE_GRID_CONSTANT Params p) {
  const int across = (p.n + kSide - 1) / kSide;
  const int y = thread_idx() / kSide, x = thread_idx() % kSide;
  const int row = block_idx() / across * kSide + y, column = block_idx() % across * kSide + x;
  float sum = 0.f;
  for (int start = 0; start < p.k; start += kSide) {
    st_shared(cell(0, y, x), row < p.m && start + x < p.k ? ld_global(p.a + row * p.k + start + x) : 0.f);
    st_shared(cell(1, y, x), start + y < p.k && column < p.n ? ld_global(p.b + (start + y) * p.n + column) : 0.f);
    sync_block();  // the tiles are complete
    for (int i = 0; i < kSide; ++i) sum += ld_shared_f32(cell(0, y, i)) * ld_shared_f32(cell(1, i, x));
    sync_block();  // nobody needs them any more
  }
  if (row < p.m && column < p.n) st_global(p.c + row * p.n + column, sum);
}
