// Appended to a kernel's source: the C entry that runs all blocks of one launch. STROBE_ENTRY is the name of the
// kernel. Includes nothing of its own.
namespace strobe {
namespace emu {

inline void call_kernel(const void* params) { ::STROBE_ENTRY(*static_cast<const Params*>(params)); }

extern "C" __attribute__((visibility("default"))) int strobe_emulator_run(const Launch* launch) {
  return run(*launch, Kernel{sizeof(Params), strobe_launch_bound, call_kernel});
}

}  // namespace emu
}  // namespace strobe
