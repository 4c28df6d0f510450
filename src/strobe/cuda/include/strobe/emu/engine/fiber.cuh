// One fiber per CUDA thread: its own stack and a switch that costs a few nanoseconds. The switch is a dozen
// instructions of assembly where we have them; elsewhere ucontext does it, at a system call each.
#pragma once
#include <sys/mman.h>
#include <cstddef>
#include <cstdint>
#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(STROBE_UCONTEXT)
#define STROBE_UCONTEXT 1
#endif

#if defined(STROBE_UCONTEXT)
#include <ucontext.h>
#elif defined(__x86_64__)
__asm__(
    ".text\n.p2align 4\n"
    "strobe_fiber_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\n"
    "ret\n");
#else  // aarch64
__asm__(
    ".text\n.p2align 4\n"
    "strobe_fiber_switch:\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp, #0]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\nstp x27, x28, "
    "[sp, #64]\n"
    "stp x29, x30, [sp, #80]\nstp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\nstp d14, d15, "
    "[sp, #144]\n"
    "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
    "ldp x19, x20, [sp, #0]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\nldp x27, x28, "
    "[sp, #64]\n"
    "ldp x29, x30, [sp, #80]\nldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\nldp d14, d15, "
    "[sp, #144]\n"
    "add sp, sp, #160\nret\n");
#endif

namespace strobe {
namespace emu {

#ifndef STROBE_UCONTEXT
extern "C" __attribute__((visibility("hidden"))) void strobe_fiber_switch(void** save,
                                                                          void* load) __asm__("strobe_fiber_switch");

struct Fiber {
  void* sp = nullptr;
  void start(char* stack_top, void (*entry)()) {
    uintptr_t top = reinterpret_cast<uintptr_t>(stack_top) & ~uintptr_t(63);
#if defined(__x86_64__)
    void** frame =
        reinterpret_cast<void**>(top - 64);  // six registers, the entry, and a return address nobody returns to
    for (int i = 0; i < 8; ++i) frame[i] = nullptr;
    frame[6] = reinterpret_cast<void*>(entry);
#else
    void** frame = reinterpret_cast<void**>(top - 160);
    for (int i = 0; i < 20; ++i) frame[i] = nullptr;
    frame[11] = reinterpret_cast<void*>(entry);  // x30
#endif
    sp = frame;
  }
  static void change(Fiber& from, Fiber& to) { strobe_fiber_switch(&from.sp, to.sp); }
};
#else
struct Fiber {
  ucontext_t context;
  void start(char* stack_top, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack_top - (1 << 16);
    context.uc_stack.ss_size = 1 << 16;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  static void change(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
};
#endif

// Stacks for all threads of a block, reused from block to block; memory is only committed where it is touched.
struct Stacks {
  static constexpr size_t kStack = 128 << 10, kGuard = 16 << 10;
  char* base = nullptr;
  size_t bytes = 0;
  explicit Stacks(unsigned threads) {
    bytes = threads * (kStack + kGuard);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return;
    base = static_cast<char*>(memory);
    for (unsigned i = 0; i < threads; ++i)
      mprotect(base + i * (kStack + kGuard), kGuard, PROT_NONE);  // overflow faults
  }
  ~Stacks() {
    if (base) munmap(base, bytes);
  }
  // Tops are staggered by a cache line each: equal offsets in every stack would all fall into one cache set.
  char* top(unsigned i) const { return base + (i + 1) * (kStack + kGuard) - (i % 61) * 64; }
};

}  // namespace emu
}  // namespace strobe
