// Where in the kernel's source something happened, and the one way to stop with a report.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

// Code that is large, and cold or called from everywhere: one copy of it keeps the compiler quick.
#define STROBE_OUTLINE __attribute__((noinline)) inline
#define STROBE_COLD __attribute__((noinline, cold)) inline

namespace strobe {
namespace emu {

// Every wrapper takes one as its last argument and leaves it to its default, which names the line of the call.
struct Site {
  const char* file = "";
  unsigned line = 0;
  static constexpr Site here(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
    return Site{file, line};
  }
  __attribute__((noinline, cold)) std::string text() const { return std::string(file) + ":" + std::to_string(line); }
};

__attribute__((format(printf, 1, 2))) STROBE_COLD std::string format(const char* pattern, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, pattern);
  vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

}  // namespace emu
using emu::Site;
}  // namespace strobe
