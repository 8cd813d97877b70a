"""Benchmarks of `pyquant bench`: layers and kernels beside those of others, training steps, calibrators, an MLP."""
