"""Benchmarks: one driver per claim that a user can check. From the repository's root: `python -m bench.<name>`."""
