"""The founding experiment's space: a perceptron, a format for each layer, and what each choice can represent."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pyquant.errors import ArgumentError

Config = tuple[str, ...]  # the format of each layer

SIZES: Final = (32768, 16384, 8192, 4096, 2048, 1024, 32768)
BATCH: Final = 2048
FLOAT: Final = "float"  # float16 or bfloat16, as the run has it; records say which
BITS: Final[Mapping[str, int]] = {FLOAT: 16, "int8": 8, "int4": 4}  # the float format first
_OTHER_NAMES: Final = {"s8": "int8", "s4": "int4", "f16": FLOAT, "fp16": FLOAT, "bf16": FLOAT}
CAPACITIES: Final = ("output", "input")


def all_configs(layers: int = len(SIZES) - 1) -> list[Config]:
    """Every configuration, all float first.

    Example:
        >>> len(all_configs()), all_configs(2)[:4]
        (729, [('float', 'float'), ('float', 'int8'), ('float', 'int4'), ('int8', 'float')])
    """
    return list(itertools.product(BITS, repeat=layers))


def parse_config(text: str, layers: int) -> Config:
    """'float,s8,int4' as a configuration. Raises ArgumentError for an unknown format or another number of layers.

    Example:
        >>> parse_config("float,s8,s4", 3)
        ('float', 'int8', 'int4')
    """
    names = [_OTHER_NAMES.get(name.strip(), name.strip()) for name in text.split(",")]
    for name in names:
        if name not in BITS:
            allowed = ", ".join([*BITS, *_OTHER_NAMES])
            raise ArgumentError("--nn-config", repr(name), f"a comma-separated list of: {allowed}")
    if len(names) != layers:
        raise ArgumentError("--nn-config", f"{len(names)} formats", f"one for each of the {layers} layers")
    return tuple(names)


def parse_sizes(text: str) -> tuple[int, ...]:
    """'32768,16384,1024' as sizes. Raises ArgumentError for less than two or one that no kernel is made for.

    Example:
        >>> parse_sizes("64,32,96")
        (64, 32, 96)
    """
    words = [word.strip() for word in text.split(",")]
    if len(words) < 2 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ArgumentError("--nn-size", repr(text), "at least two whole numbers > 0, comma-separated")
    return tuple(int(word) for word in words)


def scaled(sizes: Iterable[int], divisor: int) -> tuple[int, ...]:
    """Sizes over a divisor. Raises ArgumentError where it does not divide one of them.

    Example:
        >>> scaled((64, 32), 16)
        (4, 2)
    """
    kept = tuple(sizes)
    if divisor < 1 or any(size % divisor for size in kept):
        raise ArgumentError(
            "--scale", divisor, f"a whole number >= 1 that divides every size: {', '.join(map(str, kept))}"
        )
    return tuple(size // divisor for size in kept)


def capacity(sizes: Sequence[int], config: Config, of: str = "output") -> int:
    """Representational capacity in bits: the sum over layers of output (or input) dimension times the format's bits.

    sizes   of the activations, one more than there are layers.
    of      'output' or 'input': both give the same set of values, but another order of the configurations.

    Example:
        >>> capacity(SIZES, ("int4",) * 6), capacity(SIZES, ("float",) * 6)
        (258048, 1032192)
        >>> capacity((8, 4, 2), ("float", "int4"), "input")
        144
    """
    if of not in CAPACITIES:
        raise ArgumentError("capacity", of, ", ".join(CAPACITIES))
    dimensions = sizes[1:] if of == "output" else sizes[:-1]
    return sum(n * BITS[name] for n, name in zip(dimensions, config, strict=True))
