"""Our own CUDA kernels: their sources, the compiler, its cache, and the driver calls that launch them.

Nothing is imported here, so that `import strobe` stays free of every CUDA package.
"""
