"""Ordinary CUDA C++ for learners: a kernel as one would write it for nvcc, run on a GPU or on the emulator."""
