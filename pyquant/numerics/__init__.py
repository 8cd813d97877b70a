"""The executable specification of docs/numerics.md in plain torch: what every kernel must equal and what
runs where there is none.

Every float step is one torch operation on float32 tensors, so it rounds once. Never a Python number as divisor: torch
turns division by a scalar into multiplication by its reciprocal on some devices.
"""
