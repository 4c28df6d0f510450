// FlashAttention in one file, to be read from top to bottom.
//
//     nvcc flash_attention.cu -o flash_attention && ./flash_attention
//     ./flash_attention --seq-len 1024 --head-dim 128 --block-q 32 --block-k 32 --init normal --causal
//     ./flash_attention --help
//
// It fills Q, K and V, computes softmax(Q K^T / sqrt(d)) V on the GPU without ever storing the N x N matrix, prints the
// matrices, checks the result against a plain computation on the CPU, and times the kernel with CUDA events. It is
// written to be understood, not to be fast.
//
// Without a GPU: g++ -std=c++17 -x c++ -DON_CPU flash_attention.cu -o flash_attention   (threads_on_cpu.h stands in for
// CUDA)
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>
#ifdef ON_CPU
#include "threads_on_cpu.h"
#else
#include <cuda_runtime.h>
#endif

// ---- the kernel -----------------------------------------------------------------------------------------------------
//
// A block of threads owns `block_q` queries and goes over the keys, `block_k` at a time. All that it works on lies in
// shared memory:
//     Q tile [block_q][dim] | K tile [block_k][dim] | V tile [block_k][dim] | S [block_q][block_k] | O [block_q][dim] |
//     m, l, alpha [block_q]
// and the threads share out the numbers of each matrix: thread t takes number t, t + threads, t + 2 threads, ...
__host__ __device__ inline size_t shared_floats(int dim, int block_q, int block_k) {
  return size_t(2 * block_q + 2 * block_k) * dim + size_t(block_q) * block_k + 3 * block_q;
}

__global__ void flash_attention(const float* q, const float* k, const float* v, float* o, int seq_len, int dim,
                                int block_q, int block_k, bool causal, float scale) {
  extern __shared__ float shared[];
  float* q_tile = shared;
  float* k_tile = q_tile + block_q * dim;
  float* v_tile = k_tile + block_k * dim;
  float* s = v_tile + block_k * dim;
  float* o_tile = s + block_q * block_k;
  float* m = o_tile + block_q * dim;  // of each row: the largest score so far,
  float* l = m + block_q;             // the sum of exp(score - m) so far,
  float* alpha = l + block_q;         // and what the past has to be multiplied by when m grows

  const int thread = threadIdx.x, threads = blockDim.x;
  const int row0 = blockIdx.x * block_q, rows = min(block_q, seq_len - row0);
  for (int i = thread; i < rows * dim; i += threads) {
    q_tile[i] = q[size_t(row0) * dim + i];
    o_tile[i] = 0.f;
  }
  for (int row = thread; row < rows; row += threads) {
    m[row] = -INFINITY;
    l[row] = 0.f;
  }

  const int seen = causal ? row0 + rows : seq_len;  // keys that the last of these queries sees
  for (int key0 = 0; key0 < seen; key0 += block_k) {
    const int keys = min(block_k, seq_len - key0);
    for (int i = thread; i < keys * dim; i += threads) {
      k_tile[i] = k[size_t(key0) * dim + i];
      v_tile[i] = v[size_t(key0) * dim + i];
    }
    __syncthreads();  // the tiles are complete

    // S = scale * Q K^T
    for (int i = thread; i < rows * keys; i += threads) {
      const int row = i / keys, key = i % keys;
      float sum = 0.f;
      for (int d = 0; d < dim; ++d) sum += q_tile[row * dim + d] * k_tile[key * dim + d];
      const bool visible = !causal || key0 + key <= row0 + row;
      s[row * block_k + key] = visible ? sum * scale : -INFINITY;
    }
    __syncthreads();  // S is complete

    // The online softmax, a thread for each row. O and l were summed up with the old maximum in their exponents. If a
    // larger one turns up, exp(x - new) = exp(x - old) * exp(old - new): everything that was summed before is
    // multiplied by alpha = exp(old - new).
    for (int row = thread; row < rows; row += threads) {
      float* scores = s + row * block_k;
      const float m_old = m[row];
      float m_new = m_old;
      for (int key = 0; key < keys; ++key) m_new = fmaxf(m_new, scores[key]);
      alpha[row] =
          expf(m_old - m_new);  // 0 for the first tile: exp(-infinity). Every query sees key 0, so that m_new is finite
      float sum = 0.f;
      for (int key = 0; key < keys; ++key) {
        scores[key] = expf(scores[key] - m_new);
        sum += scores[key];
      }
      l[row] = l[row] * alpha[row] + sum;
      m[row] = m_new;
    }
    __syncthreads();  // P, which took the place of S, is complete

    // O = alpha * O + P V
    for (int i = thread; i < rows * dim; i += threads) {
      const int row = i / dim, d = i % dim;
      float sum = o_tile[i] * alpha[row];
      for (int key = 0; key < keys; ++key) sum += s[row * block_k + key] * v_tile[key * dim + d];
      o_tile[i] = sum;
    }
    __syncthreads();  // nobody reads K, V and P any more
  }

  for (int i = thread; i < rows * dim; i += threads)
    o[size_t(row0) * dim + i] = o_tile[i] / l[i / dim];  // one division, at the end
}

// ---- what it should compute: textbook attention on the CPU, in double precision -------------------------------------
static std::vector<double> standard_attention(const std::vector<float>& q, const std::vector<float>& k,
                                              const std::vector<float>& v, int seq_len, int dim, bool causal,
                                              double scale) {
  std::vector<double> o(q.size(), 0.0), weights(seq_len);
  for (int row = 0; row < seq_len; ++row) {
    const int keys = causal ? row + 1 : seq_len;
    double top = -INFINITY, sum = 0.0;
    for (int key = 0; key < keys; ++key) {
      weights[key] = 0.0;
      for (int d = 0; d < dim; ++d) weights[key] += double(q[size_t(row) * dim + d]) * k[size_t(key) * dim + d];
      weights[key] *= scale;
      top = fmax(top, weights[key]);
    }
    for (int key = 0; key < keys; ++key) sum += weights[key] = exp(weights[key] - top);
    for (int key = 0; key < keys; ++key)
      for (int d = 0; d < dim; ++d) o[size_t(row) * dim + d] += weights[key] / sum * v[size_t(key) * dim + d];
  }
  return o;
}

// ---- arguments ------------------------------------------------------------------------------------------------------
[[noreturn]] static void fail(const std::string& message) {
  fprintf(stderr, "flash_attention: %s\n", message.c_str());
  exit(2);
}

#define CHECK(call)                                                                                              \
  do {                                                                                                           \
    const cudaError_t error = (call);                                                                            \
    if (error != cudaSuccess) {                                                                                  \
      fprintf(stderr, "flash_attention: %s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error)); \
      exit(1);                                                                                                   \
    }                                                                                                            \
  } while (0)

struct Options {
  int seq_len = 256, head_dim = 64, block_q = 32, block_k = 32;
  uint64_t seed = 0;
  std::string init = "normal";
  bool causal = false, print = false, sizes_given = false;
};

static const char* kHelp =
    "usage: flash_attention [options]\n"
    "  --seq-len N     tokens: rows of Q, K and V (256)\n"
    "  --head-dim D    columns of Q, K and V (64)\n"
    "  --block-q B     queries of a tile (32)\n"
    "  --block-k B     keys of a tile (32)\n"
    "  --init HOW      uniform, normal, ones, ramp, or a FILE with a line of numbers for each token,\n"
    "                  separated by blanks or commas, which then serves as Q, K and V (normal)\n"
    "  --seed N        of the random numbers (0)\n"
    "  --causal        queries do not see later keys\n"
    "  --print         print all of Query, Key, Value and Output, not only their corners\n"
    "  --help          print this\n";

static long number(const std::string& flag, const char* text, long least, long most) {
  char* end = nullptr;
  const long value = text ? strtol(text, &end, 10) : 0;
  if (!text || end == text || *end || value < least || value > most)
    fail(flag + " must be a whole number from " + std::to_string(least) + " to " + std::to_string(most) + ", got " +
         (text ? text : "nothing"));
  return value;
}

static Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const char* next = i + 1 < argc ? argv[i + 1] : nullptr;
    if (flag == "--help") {
      fputs(kHelp, stdout);
      exit(0);
    }
    if (flag == "--causal") {
      options.causal = true;
      continue;
    }
    if (flag == "--print") {
      options.print = true;
      continue;
    }
    ++i;
    if (flag == "--seq-len") options.seq_len = number(flag, next, 1, 1 << 20), options.sizes_given = true;
    else if (flag == "--head-dim") options.head_dim = number(flag, next, 1, 1024), options.sizes_given = true;
    else if (flag == "--block-q") options.block_q = number(flag, next, 1, 1024);
    else if (flag == "--block-k") options.block_k = number(flag, next, 1, 1024);
    else if (flag == "--seed") options.seed = number(flag, next, 0, INT32_MAX);
    else if (flag == "--init" && next) options.init = next;
    else if (flag == "--init") fail("--init must be uniform, normal, ones, ramp or a file, got nothing");
    else fail("unknown option " + flag + "; --help lists them");
  }
  return options;
}

// ---- inputs ---------------------------------------------------------------------------------------------------------
struct Random {  // splitmix64: a few lines, the same numbers everywhere
  uint64_t state;
  double uniform() {  // from 0 to 1, never 1
    uint64_t x = state += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return double((x ^ (x >> 31)) >> 11) * 0x1p-53;
  }
  double normal() { return sqrt(-2.0 * log(1.0 - uniform())) * cos(6.283185307179586 * uniform()); }
};

static std::vector<float> read_file(Options& options) {
  std::ifstream file(options.init);
  if (!file) fail("--init must be uniform, normal, ones, ramp or a file that can be read, got " + options.init);
  if (options.sizes_given)
    fail("--init " + options.init + " is a file, which has sizes of its own: leave out --seq-len and --head-dim");
  std::vector<float> numbers;
  std::string line;
  size_t columns = 0, lines = 0;
  for (int where = 1; std::getline(file, line); ++where) {
    line = line.substr(0, line.find('#'));  // a comment
    for (char& c : line)
      if (c == ',') c = ' ';
    std::istringstream words(line);
    std::string word;
    size_t count = 0;
    for (; words >> word; ++count) {
      char* end = nullptr;
      numbers.push_back(strtof(word.c_str(), &end));
      if (*end) fail(options.init + ":" + std::to_string(where) + ": " + word + " is not a number");
    }
    if (!count) continue;
    if (lines && count != columns)
      fail(options.init + ":" + std::to_string(where) + ": " + std::to_string(count) +
           " numbers, the lines before have " + std::to_string(columns));
    columns = count;
    ++lines;
  }
  if (!lines) fail("--init " + options.init + " holds no numbers");
  options.seq_len = int(lines);
  options.head_dim = int(columns);
  return numbers;
}

static std::vector<float> make(const Options& options, int which) {  // 0, 1, 2: Q, K, V
  std::vector<float> x(size_t(options.seq_len) * options.head_dim);
  Random random{options.seed * 3 + which};
  for (size_t i = 0; i < x.size(); ++i) {
    if (options.init == "uniform") x[i] = float(2.0 * random.uniform() - 1.0);
    else if (options.init == "normal") x[i] = float(random.normal());
    else if (options.init == "ones") x[i] = 1.f;
    else x[i] = x.size() > 1 ? float(double(i) / (x.size() - 1)) : 0.f;  // a ramp from 0 to 1
  }
  return x;
}

// ---- output ---------------------------------------------------------------------------------------------------------
static void print_matrix(const char* name, const std::vector<float>& x, int rows, int columns, bool all) {
  const int edge = 3;
  printf("%s, %d x %d\n", name, rows, columns);
  for (int row = 0; row < rows; ++row) {
    if (!all && rows > 2 * edge + 1 && row == edge) {
      printf("  ...\n");
      row = rows - edge;
    }
    printf(" ");
    for (int column = 0; column < columns; ++column) {
      if (!all && columns > 2 * edge + 1 && column == edge) {
        printf("     ...");
        column = columns - edge;
      }
      printf(" %9.6f", x[size_t(row) * columns + column]);
    }
    printf("\n");
  }
  printf("\n");
}

int main(int argc, char** argv) {
  Options options = parse(argc, argv);
  std::vector<float> q, k, v;
  if (options.init == "uniform" || options.init == "normal" || options.init == "ones" || options.init == "ramp") {
    q = make(options, 0), k = make(options, 1), v = make(options, 2);
  } else {
    q = k = v = read_file(options);
  }
  const int seq_len = options.seq_len, dim = options.head_dim, threads = 128;
  const float scale = 1.f / sqrtf(float(dim));

  // The tiles must fit into the shared memory of one multiprocessor.
  const size_t bytes = shared_floats(dim, options.block_q, options.block_k) * sizeof(float);
  int device = 0, most = 0;
  cudaDeviceProp properties;
  CHECK(cudaGetDevice(&device));
  CHECK(cudaGetDeviceProperties(&properties, device));
  CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  if (bytes > size_t(most))
    fail("tiles of " + std::to_string(options.block_q) + " queries and " + std::to_string(options.block_k) +
         " keys need " + std::to_string(bytes) + " bytes of shared memory, a block has " + std::to_string(most) +
         ": make --block-q or --block-k smaller");
  CHECK(cudaFuncSetAttribute(flash_attention, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));

  const size_t size = q.size() * sizeof(float);
  float *d_q, *d_k, *d_v, *d_o;
  CHECK(cudaMalloc(&d_q, size));
  CHECK(cudaMalloc(&d_k, size));
  CHECK(cudaMalloc(&d_v, size));
  CHECK(cudaMalloc(&d_o, size));
  CHECK(cudaMemcpy(d_q, q.data(), size, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(d_k, k.data(), size, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(d_v, v.data(), size, cudaMemcpyHostToDevice));

  const int blocks = (seq_len + options.block_q - 1) / options.block_q;
  const auto launch = [&] {
#ifdef ON_CPU
    run_on_cpu(blocks, threads, bytes, [&] {
      flash_attention(d_q, d_k, d_v, d_o, seq_len, dim, options.block_q, options.block_k, options.causal, scale);
    });
#else
    // clang-format off
    flash_attention<<<blocks, threads, bytes>>>(d_q, d_k, d_v, d_o, seq_len, dim, options.block_q, options.block_k,
                                                options.causal, scale);
    // clang-format on
#endif
    CHECK(cudaGetLastError());
  };
  launch();  // the first launch also loads the code
  CHECK(cudaDeviceSynchronize());

  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  const int repeats = 10;
  CHECK(cudaEventRecord(begin));
  for (int i = 0; i < repeats; ++i) launch();
  CHECK(cudaEventRecord(end));
  CHECK(cudaEventSynchronize(end));
  float milliseconds = 0.f;
  CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
  milliseconds /= repeats;

  std::vector<float> o(q.size());
  CHECK(cudaMemcpy(o.data(), d_o, size, cudaMemcpyDeviceToHost));
  print_matrix("Query", q, seq_len, dim, options.print);
  print_matrix("Key", k, seq_len, dim, options.print);
  print_matrix("Value", v, seq_len, dim, options.print);
  print_matrix("Output", o, seq_len, dim, options.print);

  const std::vector<double> exact = standard_attention(q, k, v, seq_len, dim, options.causal, scale);
  double error = 0.0, largest = 0.0;
  for (size_t i = 0; i < o.size(); ++i) {
    const double difference = fabs(o[i] - exact[i]);
    error = difference <= error ? error : difference;  // a NaN stays
    largest = fmax(largest, fabs(exact[i]));
  }
  const double allowed = 1e-5 * fmax(largest, 1.0);
  const bool right = error <= allowed;
  const double flops = 4.0 * dim * (options.causal ? 0.5 * seq_len * (seq_len + 1.0) : double(seq_len) * seq_len);
  printf("%s: %d tokens, head dim %d%s, tiles of %d queries x %d keys, %zu bytes of shared memory\n", properties.name,
         seq_len, dim, options.causal ? ", causal" : "", options.block_q, options.block_k, bytes);
  printf("the N x N matrix would take %zu bytes; it was never stored\n", size_t(seq_len) * seq_len * sizeof(float));
  printf("time: %.4f ms a launch, %.2f GFLOP/s\n", milliseconds, flops / milliseconds / 1e6);
  printf("largest difference from the CPU's computation: %.3g, allowed %.3g: %s\n", error, allowed,
         right ? "right" : "WRONG");

  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  for (float* memory : {d_q, d_k, d_v, d_o}) CHECK(cudaFree(memory));
  return right ? 0 : 1;
}
