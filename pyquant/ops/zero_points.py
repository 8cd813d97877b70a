"""Zero points are codes: beyond those the bounds of docs/numerics.md 3 would not hold.

The compiled ops look at them on the CPU (csrc/bind/check.cpp is the twin); this is for the fallback, and for other
devices with set_checks(True).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyquant.core.dtypes import INT4, INT8, KERNEL_BITS, ONE_A_BYTE, UINT8, code_type
from pyquant.errors import ArgumentError
from pyquant.ops import linear_shapes, rows_layout
from pyquant.ops.spec import LinearSpec
from pyquant.ops.values import readable


@functools.cache
def _parameters(op: str) -> dict[str, Any]:
    """The arguments of an op and their defaults; nothing where no zero point can be among them."""
    arguments = {a.name: a.default_value for a in getattr(torch.ops.pyquant, op).default._schema.arguments}
    return arguments if any(name == "spec" or name.endswith("zero_point") for name in arguments) else {}


def check(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """The zero points among the arguments of an op. Raises ArgumentError naming the first bad one."""
    parameters = _parameters(op)
    if not parameters:
        return
    given = {**parameters, **dict(zip(parameters, args, strict=False)), **kwargs}
    if "spec" in given:
        _check_layer(op, given)
        return
    x, w_bits = given.get("q", given.get("x")), given.get("w_bits")
    limits: tuple[Any, Any] = (-8, 255)  # ops.gemm: uint8 may be codes, or two of int4
    if "qmin" in given:
        limits = (given["qmin"], given["qmax"])
    elif isinstance(x, Tensor) and (op != "gemm" or x.dtype == torch.int8):
        limits = INT4.range if op == "gemm_s4s4" else ONE_A_BYTE.get(x.dtype, INT8).range
    limits_of = {
        "zero_point": limits,
        "x_zero_point": limits,
        "out_zero_point": (given.get("out_qmin"), given.get("out_qmax")),
        "w_zero_point": code_type(w_bits).range if w_bits in KERNEL_BITS else INT8.range,
    }
    for argument, (low, high) in limits_of.items():
        if isinstance(low, int) and isinstance(high, int):
            _among(argument, given.get(argument), low, high)


def _check_layer(op: str, given: dict[str, Any]) -> None:
    s = linear_shapes.linear_spec(given["spec"])
    if op == "pack_linear":
        # uint8 codes have a zero point in their own terms (docs/numerics.md 3); each call compares it with its codes
        _among("x_zero_point", given["x_zero_point"], 0 if s.x_symmetric else min(s.x_qmin, 0), UINT8.qmax)
        _among("out_zero_point", given["out_zero_point"], s.out_qmin, s.out_qmax)
    elif op in ("qlinear", "qconv2d") and isinstance(given["x"], Tensor) and isinstance(given["packed"], Tensor):
        of_call(s, given["x"], given["packed"], given["x_zero_point"])


def of_call(s: LinearSpec, x: Tensor, packed: Tensor, x_zero_point: Tensor | None) -> None:
    """The zero point that the codes of a qlinear (qconv2d) have, in the buffer or with them. Raises ArgumentError."""
    if s.input == "static" and s.layout != "cpu_blocked" and packed.shape == (rows_layout.sections(s).total,):
        low, high = (0, 0) if s.x_symmetric else (s.x_qmin, s.x_qmax)
        if x.dtype == torch.uint8 and not linear_shapes.x_is_packed(s, x):
            low, high = UINT8.range
        _among("x_zero_point", rows_layout.input_zero_point(s, packed), low, high)
    _among("x_zero_point", x_zero_point, s.x_qmin, s.x_qmax)


def _among(argument: str, zero_point: Tensor | None, low: int, high: int) -> None:
    if not isinstance(zero_point, Tensor) or zero_point.dtype != torch.int32 or not readable(zero_point):
        return
    bad = zero_point.reshape(-1)[((zero_point < low) | (zero_point > high)).reshape(-1)]
    if bad.numel():
        raise ArgumentError(argument, f"a zero point of {int(bad[0])}", f"codes from {low} to {high}")
