"""What every measurement shares: clocks, stopwatch, memory, statistics, provenance."""
