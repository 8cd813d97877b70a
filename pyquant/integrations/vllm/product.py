"""What runs in a layer of vLLM: QLinears made of the tensors that vLLM loaded. Knows no vLLM, torch alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyquant.core.dtypes import FLOATS, code_type
from pyquant.core.names import GIVEN_CALIBRATOR
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError, CheckpointError, PyquantError
from pyquant.io.foreign.record import positive_scales
from pyquant.nn.qlinear import QLinear


@dataclass(frozen=True)
class Weights:
    """The matrix of a layer: weight[n, k] = scale[n, k / group] * (codes[n, k] - zero_point[n, k / group]).

    bits        4 or 8.
    codes       int8 [N, K].
    scale       floating point [N, groups along K], or one number for each of the matrices that were joined: [parts].
    zero_point  integers of the shape of `scale`, or None.
    widths      rows of each matrix that was joined along N (gate and up; q, k and v); their sum is N.
    scheme      where more is known of them than the numbers say (two_level); None: codes of the whole range.
    """

    bits: int
    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    widths: Sequence[int]
    scheme: TensorScheme | None = None


@dataclass(frozen=True)
class Inputs:
    """How a layer quantises what it is given: of a static scheme, one scale and zero point for each joined matrix."""

    scheme: TensorScheme
    scale: Tensor | None = None
    zero_point: Tensor | None = None


class Product(nn.Module):
    """x [..., K] -> x @ W.T + bias [..., N], by QLinears: one, or one for each joined matrix where static inputs of
    these differ.

    weights  on the device where the layer runs; not changed.
    inputs   None: floating point.
    bias     [N], added within the product; None where the caller adds one or there is none.
    name     of the layer, for errors.
    Raises CheckpointError naming layer, tensor, what it was and what is allowed.
    """

    def __init__(
        self, weights: Weights, inputs: Inputs | None, bias: Tensor | None, dtype: torch.dtype, name: str
    ) -> None:
        super().__init__()
        self.has_bias = bias is not None
        try:
            self.parts = nn.ModuleList(_layers(weights, inputs, bias, dtype))
        except PyquantError as error:
            raise CheckpointError(f"layer '{name}': {error}") from None
        self._first = self.parts[0]
        self._is_one = len(self.parts) == 1
        self.scheme = self._first.scheme

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """bias  what vLLM asks to add to this call: what was given at the beginning, or one where none was."""
        y: Tensor = self._first(x) if self._is_one else torch.cat([part(x) for part in self.parts], -1)
        if bias is None:
            if self.has_bias:
                raise ArgumentError("bias", "None", "the bias of the layer, which is part of its packed weights")
            return y
        return y if self.has_bias else y + bias


def _layers(weights: Weights, inputs: Inputs | None, bias: Tensor | None, dtype: torch.dtype) -> list[QLinear]:
    codes, rows = weights.codes, weights.codes.shape[0]
    if sum(weights.widths) != rows:
        raise ArgumentError("widths", list(weights.widths), f"rows of matrices that are {rows} together")
    scale, zero_point = _by_row(weights.scale, weights), _by_row(weights.zero_point, weights)
    if scale is None or not bool(scale.isfinite().all()):
        raise ArgumentError("weight_scale", "not a finite number everywhere", "numbers: was it in the checkpoint?")
    codes, scale, zero_point = positive_scales(codes, scale, zero_point, code_type(weights.bits).qmin)
    groups = scale.shape[1]
    if groups == 0 or codes.shape[1] % groups:
        raise ArgumentError("weight_scale", f"{groups} groups", f"a divisor of K = {codes.shape[1]}")
    granularity, size = ("per_channel", None) if groups == 1 else ("per_group", codes.shape[1] // groups)
    scheme = weights.scheme
    if scheme is None:
        given = {"narrow_range": False, "calibrator": GIVEN_CALIBRATOR}
        scheme = TensorScheme(weights.bits, zero_point is None, granularity, size, **given)  # type: ignore[arg-type]
    if inputs is not None and zero_point is not None:
        got = "zero points of weights whose inputs are quantised"
        raise ArgumentError("weight_zero_point", got, "symmetric weights, or floating-point inputs")
    by_part = [] if inputs is None else _static_inputs(inputs, len(weights.widths))
    is_one = len(set(by_part)) < 2
    ends = [rows] if is_one else torch.tensor(list(weights.widths), device="cpu").cumsum(0).tolist()
    layers, start = [], 0
    for i, end in enumerate(ends):
        one = slice(start, end)
        static, start = by_part[i] if by_part else (None, None), end
        layers.append(
            QLinear.from_codes(
                codes[one].contiguous(),
                _shaped(scale[one], size),
                scheme=QScheme(scheme, None if inputs is None else inputs.scheme),
                bias=None if bias is None else bias[one].detach().to(torch.float32, copy=True),
                weight_zero_point=None if zero_point is None else _shaped(zero_point[one], size),
                input_scale=static[0],
                input_zero_point=static[1],
                dtype=dtype if dtype in FLOATS else torch.float32,
            ).eval()
        )
    return layers


def _by_row(numbers: Tensor | None, weights: Weights) -> Tensor | None:
    """[N, groups] of numbers of that shape, or of one for each joined matrix."""
    if numbers is None or numbers.dim() == 2:
        return numbers
    widths = torch.tensor(list(weights.widths), device=numbers.device)
    if numbers.shape != widths.shape:
        raise ArgumentError("weight_scale", f"{list(numbers.shape)}", f"[N, groups] or [{len(widths)}]")
    return _filled(numbers).repeat_interleave(widths).unsqueeze(1)


def _static_inputs(inputs: Inputs, parts: int) -> list[tuple[float, int | None]]:
    """(scale, zero point) for each joined matrix; [] for inputs that each call finds the range of."""
    if inputs.scheme.dynamic:
        return []
    if inputs.scale is None:
        raise ArgumentError("input_scale", "None", "a number: the inputs are static")
    scales = _filled(inputs.scale.reshape(-1)).tolist()
    zeros = [None] * len(scales)
    if not inputs.scheme.symmetric:
        if inputs.zero_point is None:
            raise ArgumentError("input_zero_point", "None", "a whole number: the inputs are affine")
        zeros = inputs.zero_point.reshape(-1).tolist()
        if not bool(inputs.scale.reshape(-1).isfinite().all()):  # of one matrix in the file
            zeros = zeros[:1] * len(scales)
    if len(scales) == 1:
        scales, zeros = scales * parts, zeros * parts
    return list(zip(scales, zeros))


def _filled(numbers: Tensor) -> Tensor:
    """One number for each joined matrix; where the file holds them as one, the others are NaN still."""
    if bool(numbers[1:].isnan().all()):
        return numbers[:1].expand_as(numbers)
    return numbers


def _shaped(numbers: Tensor, group_size: int | None) -> Tensor:
    return (numbers if group_size else numbers.reshape(-1)).contiguous()


def input_scheme(bits: int, symmetric: bool, dynamic: bool, narrow: bool = False) -> TensorScheme:
    """Codes of inputs: by token, found at each call, or of one static scale for all.

    narrow  whether symmetric static codes leave the lowest out, as pyquant's presets do; other tools use it.
    """
    granularity = "per_token" if dynamic else "per_tensor"
    calibrator = "max" if dynamic else GIVEN_CALIBRATOR
    narrow = dynamic or narrow
    return TensorScheme(bits, symmetric, granularity, dynamic=dynamic, narrow_range=narrow, calibrator=calibrator)


def unpacked(packed: Any, bits: int) -> Tensor:
    """Codes of a parameter of int32 words, in the orientation [outputs, inputs] whatever its own is.

    packed  with data, packed_dim and output_dim, as vLLM's parameters have; element 0 in the lowest bits of a word,
            stored as code + 2^(bits-1).
    ->      int8; elements that fill up the last word included.
    """
    words = packed.data if packed.packed_dim == 1 else packed.data.t()
    values = words.contiguous().view(torch.uint8)
    if bits == 4:
        values = torch.stack([values & 15, values >> 4], -1).flatten(1)
    codes = values.view(torch.int8) - 8 if bits == 4 else (values ^ 128).view(torch.int8)
    return codes if packed.packed_dim != packed.output_dim else codes.t()


def refused(layer: str, part: str, got: str, allowed: str) -> CheckpointError:
    """What a layer of a checkpoint is and must not be."""
    return CheckpointError(f"layer '{layer}': {part}: got {got}; allowed: {allowed}")
