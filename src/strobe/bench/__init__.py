"""The benchmark: suites as data, providers checked against float64 before they are timed, results with full provenance.

Nothing is imported here, so that the command line can show its help without torch's profiler, rich tables or plots.
"""
