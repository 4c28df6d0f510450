// The words of a report.
#pragma once
#include <cstdio>
#include <string>
#include <strobe/emu/base.cuh>

#define STROBE_COLD __attribute__((noinline, cold))

namespace strobe {
namespace emu {

std::string place_of(Site site);  // file:line
__attribute__((format(printf, 1, 2))) std::string format(const char* pattern, ...);

}  // namespace emu
}  // namespace strobe
