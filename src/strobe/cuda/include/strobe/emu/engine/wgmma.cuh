// Hopper's warpgroup matrix product.
#include <strobe/emu/engine/block.cuh>
#include <strobe/emu/wgmma.cuh>

namespace strobe {
namespace emu {

struct Accumulator {  // D in flight; row r, column n at value[r * n_columns + n]
  float* d[128];
  std::vector<float> value;
  int columns;
  u32 uses;
};

struct Product {
  WgmmaLane lanes[128];
  Site site;
  u32 group;
  Accumulator* accumulator;
  bool zero;
  WgmmaShape shape;
};

struct Wgmmas {
  std::vector<std::unique_ptr<Product>> products;
  std::vector<std::unique_ptr<Accumulator>> accumulators;
  u32 groups = 0;
  bool fenced = false;
};

inline u32 descriptor_field(u64 descriptor, int shift) { return static_cast<u32>((descriptor >> shift) & 0x3fff) << 4; }

// Address of a chunk of 16 bytes: of row `row` of a K-major operand, the first or the second half of its columns; of k
// row `k` of an MN-major one, columns n.. (of 16 bits)
inline u32 k_major_chunk(u64 descriptor, u32 row, u32 half) {
  return swizzled(
      descriptor_field(descriptor, 0) + row / 8 * descriptor_field(descriptor, 32) + row % 8 * 128 + 16 * half, 128);
}
inline u32 mn_major_chunk(u64 descriptor, u32 k, u32 n) {
  return swizzled(descriptor_field(descriptor, 0) + n / 64 * descriptor_field(descriptor, 16) +
                      k / 8 * descriptor_field(descriptor, 32) + k % 8 * 128 + n % 64 * 2,
                  128);
}

template <class Visit> inline void visit_chunks(WgmmaShape shape, const WgmmaLane* lanes, Visit visit) {
  const u64 a = lanes[0].a_desc, b = lanes[0].b_desc;
  const u32 columns = static_cast<u32>(shape.n);
  if (shape.from == A::shared)
    for (u32 row = 0; row < 64; ++row)
      for (u32 half = 0; half < 2; ++half) visit(row / 16, k_major_chunk(a, row, half), true, row, half);
  if (shape.from == A::shared_mn)
    for (u32 k = 0; k < 16; ++k)
      for (u32 m = 0; m < 64; m += 8) visit(m / 16, mn_major_chunk(a, k, m), true, k, m);
  if (shape.major == B::k_major)
    for (u32 n = 0; n < columns; ++n)
      for (u32 half = 0; half < 2; ++half) visit(4u, k_major_chunk(b, n, half), false, n, half);
  else
    for (u32 k = 0; k < 16; ++k)
      for (u32 n = 0; n < columns; n += 8) visit(4u, mn_major_chunk(b, k, n), false, k, n);
}

// D[64][n] (+)= A B
inline void multiply(WgmmaShape shape, const WgmmaLane* lanes, float* d, bool zero) {
  const int chunk = 16 / shape.bytes, steps = 2 * chunk;
  float a[64][32], b[32][256], x[16];
  visit_chunks(shape, lanes, [&](u32, u32 address, bool is_a, u32 row, u32 at) {
    shape.widen(shared_at(address), x);
    for (int i = 0; i < chunk; ++i) {
      if (is_a && shape.from == A::shared_mn) a[at + i][row] = x[i];
      else if (is_a) a[row][chunk * at + i] = x[i];
      else if (shape.major == B::k_major) b[chunk * at + i][row] = x[i];
      else b[row][at + i] = x[i];
    }
  });
  const int word = chunk / 4;  // elements of a register
  if (shape.from == A::registers)
    for (int i = 0; i < 128; ++i) {
      shape.widen(lanes[i].a, x);
      for (int j = 0; j < 4; ++j)
        for (int h = 0; h < word; ++h)
          a[i / 32 * 16 + i % 32 / 4 + 8 * (j & 1)][word * (i % 4 + 4 * (j >> 1)) + h] = x[word * j + h];
    }
  constexpr int kColumns = 8;  // at a time, so that their sums stay in registers
  for (int row = 0; row < 64; ++row)
    for (int first = 0; first < shape.n; first += kColumns) {
      float sum[kColumns] = {}, *to = d + row * shape.n + first;
      for (int k = 0; k < steps; ++k)
        for (int n = 0; n < kColumns; ++n) sum[n] += a[row][k] * b[k][first + n];
      for (int n = 0; n < kColumns; ++n) to[n] = zero ? sum[n] : to[n] + sum[n];
    }
}

// Register i of thread t: row 16*(t/32) + (t%32)/4 + 8*((i>>1)&1), column 8*(i>>2) + 2*(t%4) + (i&1).
inline int accumulator_row(int t, int i) { return t / 32 * 16 + t % 32 / 4 + 8 * ((i >> 1) & 1); }
inline int accumulator_column(int t, int i) { return 8 * (i >> 2) + 2 * (t % 4) + (i & 1); }
void gather(float* const (&d)[128], float* matrix, int columns) {
  for (int t = 0; t < 128; ++t)
    for (int i = 0; i < columns / 2; ++i) matrix[accumulator_row(t, i) * columns + accumulator_column(t, i)] = d[t][i];
}
void scatter(float* const (&d)[128], const float* matrix, int columns) {
  for (int t = 0; t < 128; ++t)
    for (int i = 0; i < columns / 2; ++i) d[t][i] = matrix[accumulator_row(t, i) * columns + accumulator_column(t, i)];
}

inline Wgmmas& products_of_this_warpgroup() {
  std::shared_ptr<Wgmmas>& products = block().products[block().running / 128];
  if (!products) products = std::make_shared<Wgmmas>();
  return *products;
}

inline void check_descriptor(u64 descriptor, const char* which, Site site) {
  if (descriptor >> 62 != 1)
    block().fail(format("wgmma: descriptor of %s does not ask for the 128-byte swizzle (bits 62-63 are %u)", which,
                        static_cast<u32>(descriptor >> 62)),
                 site);
  if (descriptor >> 49 & 7)
    block().fail(
        format("wgmma: descriptor of %s has a base offset; tiles start at multiples of 1024 bytes here", which), site);
}

void wgmma(WgmmaLane lane, WgmmaShape shape, bool zero, Site site) {
  block().converge(Scope::warpgroup, "wgmma", true, site, &lane, [=](void** lanes) {
    Block& b = block();
    ++b.counters.wgmma;
    b.counters.flops += 2ull * 64 * shape.n * 32 / shape.bytes;
    auto product = std::make_unique<Product>();
    Accumulator in_place;
    for (int i = 0; i < 128; ++i) {
      product->lanes[i] = *static_cast<WgmmaLane*>(lanes[i]);
      in_place.d[i] = product->lanes[i].d;
      if (product->lanes[i].b_desc != product->lanes[0].b_desc || product->lanes[i].a_desc != product->lanes[0].a_desc)
        b.fail("wgmma: the descriptor differs between the threads of the warpgroup", site,
               static_cast<int>(b.running / 128 * 128 + i));
    }
    if (shape.from != A::registers) check_descriptor(lane.a_desc, "A", site);
    check_descriptor(lane.b_desc, "B", site);
    const u32 first = b.running / 128 * 128, lane_number = b.running % 32;
    visit_chunks(shape, product->lanes, [&](u32 warp, u32 address, bool, u32, u32) {
      check_shared(address, 16, 16, "wgmma", site);
      b.counters.shared_bytes_read += 16;
      if (!b.async) return;  // each warp reads its own rows of A; all of them read all of B
      note_read(warp < 4 ? first + 32 * warp + lane_number : b.running, address, 16, Proxy::async, "wgmma", site);
      note_reader_in_flight(address, 16, 1);
    });
    if (!b.async) {
      float d[64 * 256];
      if (!zero) gather(in_place.d, d, shape.n);
      multiply(shape, product->lanes, d, zero);
      return scatter(in_place.d, d, shape.n);
    }
    Wgmmas& flight = products_of_this_warpgroup();
    if (!flight.fenced) b.fail("wgmma: no wgmma_fence() since the last wait", site);
    Accumulator* accumulator = nullptr;
    for (auto& candidate : flight.accumulators)
      if (candidate->d[0] == in_place.d[0]) accumulator = candidate.get();
    if (!accumulator) {
      flight.accumulators.push_back(std::make_unique<Accumulator>());
      accumulator = flight.accumulators.back().get();
      memcpy(accumulator->d, in_place.d, sizeof in_place.d);
      accumulator->columns = shape.n;
      accumulator->uses = 0;
      accumulator->value.resize(64 * shape.n);
      gather(in_place.d, accumulator->value.data(), shape.n);
      for (float* d : in_place.d)
        for (int i = 0; i < shape.n / 2; ++i) d[i] = as_float(kPoison);
    }
    if (accumulator->columns != shape.n) b.fail("wgmma: the accumulator is in flight with another N", site);
    ++accumulator->uses;
    product->site = site, product->group = flight.groups + 1, product->accumulator = accumulator, product->zero = zero;
    product->shape = shape;
    flight.products.push_back(std::move(product));
  });
}

void retire(Wgmmas& flight, Product& product, Site site) {
  Block& b = block();
  const u32 first = b.running / 128 * 128;
  for (u32 i = 0; i < 128; ++i)
    for (u32 j = 0; j < 4; ++j)
      if (product.lanes[i].a_where[j] && *product.lanes[i].a_where[j] != product.lanes[i].a[j])
        b.fail(
            format("wgmma: register operand a%u was overwritten while the product was in flight (before the wait at ",
                   j) +
                place_of(site) + ")",
            product.site, static_cast<int>(first + i));
  multiply(product.shape, product.lanes, product.accumulator->value.data(), product.zero);
  visit_chunks(product.shape, product.lanes, [&](u32 warp, u32 address, bool, u32, u32) {
    note_reader_in_flight(address, 16,
                          -1);  // from now on it counts as read by the (first thread of the) warp that waited
    const u32 reader = first + (warp < 4 ? 32 * warp : 0);
    for (u32 i = 0; i < 4; ++i) {
      Word& word = b.words[(address - kSharedBase) / 4 + i];
      word.read_slot = static_cast<u16>(reader), word.read_clock = b.clock(reader)[reader];
    }
  });
  Accumulator* accumulator = product.accumulator;
  if (--accumulator->uses) return;
  for (u32 t = 0; t < 128; ++t)
    for (int i = 0; i < accumulator->columns / 2; ++i)
      if (as_bits(accumulator->d[t][i]) != kPoison)
        b.fail(format("wgmma: accumulator register %d was written while the product was in flight (before the wait at ",
                      i) +
                   place_of(site) + ")",
               product.site, static_cast<int>(first + t));
  scatter(accumulator->d, accumulator->value.data(), accumulator->columns);
  for (auto& candidate : flight.accumulators)
    if (candidate.get() == accumulator) {
      candidate.swap(flight.accumulators.back());
      flight.accumulators.pop_back();
      break;
    }
}

void wgmma_fence(Site site) {
  if (!block().async) return;
  block().converge(Scope::warpgroup, "wgmma_fence", true, site, nullptr,
                   [](void**) { products_of_this_warpgroup().fenced = true; });
}
void wgmma_commit(Site site) {
  if (!block().async) return;
  block().converge(Scope::warpgroup, "wgmma_commit", true, site, nullptr,
                   [](void**) { ++products_of_this_warpgroup().groups; });
}
void wgmma_wait(u32 pending, Site site) {
  if (!block().async) return;
  block().converge(Scope::warpgroup, "wgmma_wait", true, site, nullptr, [=](void**) {
    Wgmmas& flight = products_of_this_warpgroup();
    std::vector<std::unique_ptr<Product>> kept;
    for (auto& product : flight.products) {
      if (product->group + pending > flight.groups) kept.push_back(std::move(product));
      else retire(flight, *product, site);
    }
    flight.products.swap(kept);
    flight.fenced = false;
  });
}

}  // namespace emu
}  // namespace strobe
