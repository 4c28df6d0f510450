"""Small experiments beside the benchmark: `python -m benchmarks.studies`, `python -m benchmarks.studies.ideas`."""
