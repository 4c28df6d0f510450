"""Lessons that run anywhere: a grid simulator in Python, exercises that check themselves, small CUDA C++ kernels."""
