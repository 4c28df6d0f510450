// As much of CUDA as flash_attention.cu needs, on the CPU: blocks run one after the other, and the threads of a block
// in turns, each until it reaches __syncthreads() or its end. So a barrier that is missing shows: the threads that come
// later have not done their part yet.
#pragma once
#include <ucontext.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __host__
#define __device__
#define __shared__

using std::min;

struct Index {
  int x = 0;
};
inline Index threadIdx, blockIdx, blockDim;
constexpr int kSharedBytes = 160 << 10;
float shared[kSharedBytes / sizeof(float)];  // what `extern __shared__ float shared[]` refers to

namespace on_cpu {

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false, waiting = false;
};
inline ucontext_t scheduler;
inline std::vector<Thread>* threads;
inline const std::function<void()>* body;

inline void yield() { swapcontext(&(*threads)[threadIdx.x].context, &scheduler); }
inline void run_thread() {
  (*body)();
  (*threads)[threadIdx.x].done = true;
  yield();
}

inline void run_block(int count, const std::function<void()>& kernel) {
  constexpr size_t kStack = 64 << 10;
  std::vector<Thread> all(count);
  threads = &all;
  body = &kernel;
  for (Thread& thread : all) {
    thread.stack.reset(new char[kStack]);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, run_thread, 0);
  }
  for (int done = 0; done < count;) {
    done = 0;
    int waiting = 0;
    for (int i = 0; i < count; ++i) {
      Thread& thread = all[i];
      if (!thread.done) {
        thread.waiting = false;
        threadIdx.x = i;
        swapcontext(&scheduler, &thread.context);
      }
      done += thread.done;
      waiting += thread.waiting;
    }
    if (done && waiting) {
      fprintf(stderr, "%d threads wait at __syncthreads() for %d that have ended\n", waiting, done);
      exit(1);
    }
  }
}

}  // namespace on_cpu

inline void __syncthreads() {
  (*on_cpu::threads)[threadIdx.x].waiting = true;
  on_cpu::yield();
}

inline void run_on_cpu(int blocks, int threads, size_t shared_bytes, const std::function<void()>& kernel) {
  blockDim.x = threads;
  for (int block = 0; block < blocks; ++block) {
    blockIdx.x = block;
    memset(shared, 0xff, shared_bytes);  // NaN: shared memory does not begin as zero
    on_cpu::run_block(threads, kernel);
  }
}

// ---- the runtime's functions ----------------------------------------------------------------------------------------
enum cudaError_t { cudaSuccess };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaDeviceProp {
  char name[64] = "CPU";
};
using cudaEvent_t = std::chrono::steady_clock::time_point*;

inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  return *properties = cudaDeviceProp(), cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = kSharedBytes, cudaSuccess;
}
template <class Kernel> cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) { return cudaSuccess; }
inline cudaError_t cudaMalloc(float** memory, size_t bytes) {
  return *memory = static_cast<float*>(malloc(bytes)), cudaSuccess;
}
inline cudaError_t cudaFree(float* memory) { return free(memory), cudaSuccess; }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return *event = new std::chrono::steady_clock::time_point, cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event) { return *event = std::chrono::steady_clock::now(), cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  return *milliseconds = std::chrono::duration<float, std::milli>(*end - *begin).count(), cudaSuccess;
}
