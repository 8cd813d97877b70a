"""What tests/hostile/limits.py must not let pass, and one case that it must."""

from __future__ import annotations

from pyquant.errors import ArgumentError


def computes() -> None:
    while True:
        pass


def allocates() -> None:
    bytearray(200 * 2**20)


def raises() -> None:
    raise ValueError("not ours")


def refuses() -> None:
    raise ArgumentError("x", 1, 2)


CASES = {"computes": computes, "allocates": allocates, "raises": raises, "refuses": refuses}
