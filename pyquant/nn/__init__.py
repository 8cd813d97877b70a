"""Quantised modules, and the functions that put them into a model."""
