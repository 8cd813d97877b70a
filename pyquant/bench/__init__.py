"""Benchmarks of `pyquant bench`: layers and kernels against other libraries, training steps, calibrators, an MLP."""
