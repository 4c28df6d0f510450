"""The parts that every measurement shares: cases, tolerance, stopwatch and methods, clocks and energy, memory,
statistics, units."""
