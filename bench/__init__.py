"""Benchmarks: one driver per claim that a user can check. Run them from the repository's root with `python -m bench.<name>`."""
