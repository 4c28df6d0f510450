"""The CUDA driver, NVRTC and the cache of compiled kernels. Nothing here knows attention or torch."""
