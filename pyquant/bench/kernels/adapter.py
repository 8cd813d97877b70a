"""What a candidate of the GPU benchmark is: a name, what it moves, and a way to build it for one layer.

Everything about one rival is in its adapter; the engine knows none of them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pyquant.bench.peers import PeerUnavailable
from pyquant.bench.problem import Inputs, Weights

Run = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Built:
    """A candidate for one (K, N).

    state      the prepared weights: tensors or modules; the engine makes copies of it at other addresses.
    bind       inputs -> a callable that takes the state (or a copy) and returns y [m, n].
    reference  inputs and row numbers -> the rows of y that the specification gives, bit for bit; None outside of the
               exact contract.
    kernel     rows -> the name of the kernel that runs, where the candidate reports it.
    """

    state: Any
    bind: Callable[[Inputs], Run]
    reference: Callable[[Inputs, Tensor], Tensor] | None = None
    kernel: Callable[[int], str] = lambda m: ""


@dataclass(frozen=True)
class Adapter:
    """A candidate.

    build      for one layer; raises PeerUnavailable with the reason.
    w_bits     of a weight in memory, scales counted in; x_bits of an element of the input; the output has 16.
    peak       the ceiling that binds it: 'bf16', 'fp16', 'int8', 'fp8'.
    ours       pyquant's own.   has_bias  its result contains the bias.
    min_sqnr   dB against the float64 product below which it computes something else.
    products   GEMMs of this size that one call does (a chain: 2).
    """

    name: str
    build: Callable[[Weights], Built]
    w_bits: float
    x_bits: int
    peak: str
    ours: bool = False
    has_bias: bool = True
    min_sqnr: float = 15.0
    products: int = 1


def bound(take: Callable[[Inputs], Any], call: Callable[[Any, Any], Tensor]) -> Callable[[Inputs], Run]:
    """The `bind` of a candidate that computes call(state, x), where x is what `take` finds in the inputs."""

    def bind(inputs: Inputs) -> Run:
        x = take(inputs)
        return lambda state: call(state, x)

    return bind


def bf16(inputs: Inputs) -> Tensor:
    return inputs.bf16


def module_call(module: Any) -> Built:
    """A module from bf16 to bf16."""
    return Built(module, bound(bf16, lambda state, x: state(x)))


def package(module: str, distribution: str) -> ModuleType:
    """An optional rival's module; PeerUnavailable says why it is not there."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise PeerUnavailable(f"{distribution} is not installed (`make gpu-peers` installs it)") from None
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise PeerUnavailable(f"{distribution} cannot be imported: {type(error).__name__}: {error}") from None


def needs_multiple(name: str, value: int, of: int) -> None:
    """PeerUnavailable with both numbers unless value is a multiple."""
    if value % of:
        raise PeerUnavailable(f"{name} = {value}, needs a multiple of {of}")


def rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor[rows.to(tensor.device)]


def device_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
