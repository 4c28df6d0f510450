// RGB to grey: one thread per pixel. `rgb` holds three floats a pixel, `gray` one.
#include <strobe/ptx/memory.cuh>
using namespace strobe;

struct Params {
  const float* rgb;
  float* gray;
  int pixels;
  int block_dim;  // threads of a block
};

STROBE_KERNEL(1024, 1)
grayscale(STROBE_GRID_CONSTANT Params p) {
  const int i = block_idx() * p.block_dim + thread_idx();
  if (i >= p.pixels) return;  // the last block is rarely full
  const float r = ld_global(p.rgb + 3 * i), g = ld_global(p.rgb + 3 * i + 1), b = ld_global(p.rgb + 3 * i + 2);
  st_global(p.gray + i, 0.299f * r + 0.587f * g + 0.114f * b);
}
