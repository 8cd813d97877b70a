"""What the suite and the benchmarks compute on: boundary-biased shapes, a catalogue of values, a catalogue of layouts.

Everything follows from (seed, index); a failure prints `problem.repeat`, which rebuilds the case. PYQUANT_TEST_SEED
changes the seed of a whole run.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyquant.core.names import ACTIVATIONS

BASE_SEED = int(os.environ.get("PYQUANT_TEST_SEED", "20261121"))
T = TypeVar("T")


class Draw:
    """A stream of choices that depends on (seed, path) alone, not on what was drawn elsewhere."""

    def __init__(self, seed: int, *path: object) -> None:
        digest = hashlib.sha256(repr((seed, *path)).encode()).digest()
        self.generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))

    def integer(self, low: int, high: int) -> int:
        """Uniform in [low, high]."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def choice(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def chance(self, probability: float) -> bool:
        return float(torch.rand((), generator=self.generator)) < probability

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def codes(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self.generator, dtype=torch.int32)


# ---- shapes

# What kernels unroll and cannot split, per dimension: sizes gather around their multiples.
TILES: dict[str, tuple[int, ...]] = {"m": (4, 16, 64, 128), "n": (8, 16, 64, 128), "k": (4, 16, 32, 64)}


@dataclass(frozen=True)
class Shape:
    m: int
    n: int
    k: int

    @property
    def is_empty(self) -> bool:
        return 0 in (self.m, self.n, self.k)


def shape(index: int, seed: int = BASE_SEED, tiles: dict[str, tuple[int, ...]] = TILES) -> Shape:
    """Case `index`: every size is below one tile or tile x (1..3) + (-1, 0, 1); one case in ten has a zero size, one in
    ten a single row, one in twenty a long K."""
    draw = Draw(seed, "shape", index)
    size = {d: _near_tile(draw, draw.choice(tiles[d])) for d in ("m", "n", "k")}
    if index % 10 == 9:
        size[draw.choice(("m", "n", "k"))] = 0
    elif index % 10 == 4:
        size["m"] = 1
    elif index % 20 == 7:
        size["k"] = draw.choice((512, 1024, 2048)) + draw.integer(-1, 1)
    return Shape(**size)


def _near_tile(draw: Draw, tile: int) -> int:
    multiple = draw.integer(0, 3)
    return max(1, tile * multiple + draw.integer(-1, 1)) if multiple else draw.integer(1, tile)


def shapes(count: int, seed: int = BASE_SEED, tiles: dict[str, tuple[int, ...]] = TILES) -> Iterator[Shape]:
    return (shape(index, seed, tiles) for index in range(count))


# ---- codes

CODE_RANGES = {"s8": (-128, 127), "u8": (0, 255), "s4": (-8, 7)}
PAIRS = (("s8", "s8"), ("u8", "s8"), ("s8", "s4"), ("u8", "s4"), ("s4", "s4"))
_STORAGE = {"s8": torch.int8, "u8": torch.uint8, "s4": torch.int8}

CodePattern = Callable[[Draw, int, int, int, int], Tensor]


def _one_signed(draw: Draw, low: int, high: int, rows: int, cols: int) -> Tensor:
    """Near-maximal operands of one sign: the data that overflows and that makes a float32 reference wrong."""
    return draw.codes(high - max(1, (high - low) // 100), high, rows, cols)


def _one_nonzero(draw: Draw, low: int, high: int, rows: int, cols: int) -> Tensor:
    codes = torch.zeros(rows, cols, dtype=torch.int32)
    if codes.numel():
        codes.view(-1)[draw.integer(0, codes.numel() - 1)] = high
    return codes


def _one_loud_row(draw: Draw, low: int, high: int, rows: int, cols: int) -> Tensor:
    codes = draw.codes(max(low, -1), 1, rows, cols)
    if rows:
        codes[draw.integer(0, rows - 1)] = low
    return codes


def _one_row_zero(draw: Draw, low: int, high: int, rows: int, cols: int) -> Tensor:
    codes = draw.codes(low, high, rows, cols)
    if rows:
        codes[draw.integer(0, rows - 1)] = 0
    return codes


def _alternating(draw: Draw, low: int, high: int, rows: int, cols: int) -> Tensor:
    return torch.where(torch.arange(rows * cols).reshape(rows, cols) % 2 == 0, low, high).to(torch.int32)


CODE_PATTERNS: dict[str, CodePattern] = {
    "uniform": lambda draw, low, high, rows, cols: draw.codes(low, high, rows, cols),
    "narrow": lambda draw, low, high, rows, cols: draw.codes(low + 1, high, rows, cols),
    "small": lambda draw, low, high, rows, cols: draw.codes(max(low, -2), 2, rows, cols),
    "one_signed": _one_signed,
    "all_low": lambda draw, low, high, rows, cols: torch.full((rows, cols), low, dtype=torch.int32),
    "all_high": lambda draw, low, high, rows, cols: torch.full((rows, cols), high, dtype=torch.int32),
    "alternating": _alternating,
    "zeros": lambda draw, low, high, rows, cols: torch.zeros(rows, cols, dtype=torch.int32),
    "one_nonzero": _one_nonzero,
    "one_loud_row": _one_loud_row,
    "one_row_zero": _one_row_zero,
}
# Most operands are uniform: patterns that a wrong kernel could get right by accident must not be the only data.
_PATTERN_DRAW = ("uniform",) * 24 + ("narrow",) * 4 + tuple(CODE_PATTERNS)


def codes(draw: Draw, code_type: str, pattern: str, rows: int, cols: int) -> Tensor:
    """Codes of a type in its storage (s4: one per byte, int8)."""
    return CODE_PATTERNS[pattern](draw, *CODE_RANGES[code_type], rows, cols).to(_STORAGE[code_type])


# ---- GEMM problems

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class GemmProblem:
    """One integer GEMM with its epilogue. `op` names the op, `call` holds its arguments (weights packed where the op
    takes them packed), `w_codes` the weight codes as int8 [N, K]."""

    index: int
    seed: int
    x_type: str
    w_type: str
    shape: Shape
    patterns: tuple[str, str]
    call: dict[str, Any] = field(repr=False)
    w_codes: Tensor = field(repr=False)
    epilogue: str = "accumulator"

    @property
    def op(self) -> str:
        return f"gemm_{'s4' if self.x_type == 's4' else 's8'}{self.w_type}"

    @property
    def waiver(self) -> str | None:
        """Why the mistrust rule cannot judge this case, or None."""
        if self.shape.is_empty:
            return "empty by design"
        if not {"uniform", "narrow"}.issuperset(self.patterns):
            return f"codes {self.patterns} by design"
        if self.call.get("activation", "none") != "none":
            return "may be constant under its activation"
        if self.shape.n < 4 and self.call.get("bias") is not None:
            return "one bias may dominate"
        if "out_zero_point" in self.call:
            return "the zero point may stand at a limit"
        return "few products" if self.shape.k < 4 else None

    @property
    def repeat(self) -> str:
        return f"problems.gemm_problem({self.index}, seed={self.seed}, epilogue={self.epilogue!r}) = {self}"


def _pack(codes_: Tensor) -> Tensor:
    """int4 packing of its own, so that a test of the packing in use does not pass through itself."""
    n, k = codes_.shape
    wide = torch.zeros(n, k + k % 2, dtype=torch.int32)
    wide[:, :k] = codes_.to(torch.int32) & 15
    return (wide[:, 0::2] + 16 * wide[:, 1::2]).to(torch.uint8)


def _group_size(draw: Draw, k: int) -> int:
    divisors = [g for g in (1, 2, 4, 8, 16, 32, 64, 128, k) if g and k % g == 0 and k // g <= 64]
    return draw.choice(divisors) if divisors else 0


def scales(draw: Draw, *size: int) -> Tensor:
    """Positive float32 scales over six binary orders, not round in binary."""
    return torch.exp2(draw.uniform(*size) * 6 - 9)


def gemm_problem(
    index: int,
    seed: int = BASE_SEED,
    epilogue: str = "accumulator",
    pair: tuple[str, str] | None = None,
    tiles: dict[str, tuple[int, ...]] = TILES,
) -> GemmProblem:
    """Case `index`, deterministic.

    epilogue  'accumulator': int32 result, at most a zero point; 'float': scales, bias, activation, residual, any float
              result; 'codes': the same, requantised; 'exact': powers of two only, so that the result is exact.
    """
    draw = Draw(seed, "gemm", epilogue, index)
    x_type, w_type = pair if pair is not None else PAIRS[index % len(PAIRS)]
    s = shape(index, seed, tiles)
    patterns = (draw.choice(_PATTERN_DRAW), draw.choice(_PATTERN_DRAW))
    x = codes(draw, x_type, patterns[0], s.m, s.k)
    w = codes(draw, w_type, patterns[1], s.n, s.k)
    low, high = CODE_RANGES[x_type]
    call: dict[str, Any] = {"x": x, "w": _pack(w) if w_type == "s4" else w, "out_dtype": torch.int32}
    if draw.chance(0.5):
        per_token = draw.chance(0.5)
        zero_point = draw.codes(low, high, s.m) if per_token else draw.codes(low, high)
        call["x_zero_point"] = zero_point if draw.chance(0.8) else torch.full_like(zero_point, draw.choice((low, high)))
    if epilogue in ("float", "codes"):
        _scaled_epilogue(draw, s, call, epilogue)
        if epilogue == "codes":
            call["out_scale"] = _out_scale(draw, w, call)
    elif epilogue == "exact":
        call["w_scale"], call["x_scale"] = torch.exp2(draw.codes(-3, 3, s.n).float()), torch.tensor(0.5)
        call["out_dtype"] = torch.float32
    return GemmProblem(index, seed, x_type, w_type, s, patterns, call, w, epilogue)


def _scaled_epilogue(draw: Draw, s: Shape, call: dict[str, Any], epilogue: str) -> None:
    group_size = _group_size(draw, s.k) if draw.chance(0.35) else 0
    call["group_size"] = group_size
    call["w_scale"] = scales(draw, s.n, s.k // group_size) if group_size else scales(draw, s.n)
    kind = draw.choice(("token", "token", "tensor", "absent"))
    if kind != "absent":
        call["x_scale"] = scales(draw, s.m) if kind == "token" else scales(draw)
    if draw.chance(0.6):
        call["bias"] = draw.normal(s.n) * draw.choice((1.0, 1e3, 1e-3))
    if draw.chance(0.4):
        call["residual"] = (draw.normal(s.m, s.n) * 10).to(draw.choice(FLOATS))
    call["activation"] = draw.choice((*ACTIVATIONS, *("none",) * 4))
    if call["activation"] == "clamp":
        call["clamp_min"], call["clamp_max"] = draw.choice(((0.0, 6.0), (-1.5, 1.5), (-0.1, 3.3), (-math.inf, 0.0)))
    call["out_dtype"] = draw.choice(FLOATS)
    if epilogue == "codes":
        call["out_dtype"] = torch.int8
        call["out_qmin"], call["out_qmax"] = draw.choice(((-127, 127), (-128, 127), (-7, 7), (-8, 7)))
        if draw.chance(0.4):
            call["out_zero_point"] = draw.codes(call["out_qmin"], call["out_qmax"], 1)


def _out_scale(draw: Draw, w: Tensor, call: dict[str, Any]) -> Tensor:
    """A scale under which the result spreads over the codes: a result of one code would show nothing."""
    x, offset = call["x"].double(), call.get("x_zero_point")
    x = x if offset is None else x - offset.double().reshape(-1, 1)
    x = x * call["x_scale"].double().reshape(-1, 1) if "x_scale" in call else x
    real = x @ (w * call["w_scale"].double().repeat_interleave(call["group_size"] or w.shape[1], -1).reshape(w.shape)).T
    for name in ("bias", "residual"):
        real = real + call[name].double() if call.get(name) is not None else real
    usual = float(real.abs().quantile(0.9)) if 0 < real.numel() < 2**20 else 1.0
    return torch.tensor([max(usual, 1e-6) / call["out_qmax"] * (0.7 + float(draw.uniform()))])


# ---- values

Pattern = Callable[[Draw, int, int], Tensor]
GROUP = 16  # group size that the group patterns speak of


@dataclass(frozen=True)
class Values:
    """One entry of the catalogue: name(rows, cols) -> float32 [rows, cols]. `is_finite`: no NaN or infinity inside."""

    name: str
    build: Pattern
    is_finite: bool = True

    def tensor(self, rows: int, cols: int, dtype: torch.dtype = torch.float32, seed: int = BASE_SEED) -> Tensor:
        return self.build(Draw(seed, "values", self.name, rows, cols), rows, cols).to(dtype)


def _full(value: float) -> Pattern:
    return lambda draw, rows, cols: torch.full((rows, cols), value)


def _scaled_normal(factor: float) -> Pattern:
    return lambda draw, rows, cols: draw.normal(rows, cols) * factor


def _with(base: Pattern, change: Callable[[Draw, Tensor], None]) -> Pattern:
    def build(draw: Draw, rows: int, cols: int) -> Tensor:
        x = base(draw, rows, cols)
        if x.numel():
            change(draw, x)
        return x

    return build


def _set(value: float, row: Callable[[int], int], col: Callable[[int], int]) -> Callable[[Draw, Tensor], None]:
    def change(draw: Draw, x: Tensor) -> None:
        x[row(x.shape[0]), col(x.shape[1])] = value

    return change


def _amax(value: float) -> Pattern:
    """Small noise with one element of every row at exactly +-value: the scale is known."""

    def change(draw: Draw, x: Tensor) -> None:
        x[:, draw.integer(0, x.shape[1] - 1)] = torch.where(torch.arange(x.shape[0]) % 2 == 0, value, -value)

    return _with(lambda draw, rows, cols: (draw.uniform(rows, cols) * 2 - 1) * value, change)


def _ties(draw: Draw, rows: int, cols: int) -> Tensor:
    """k + 0.5 for codes k, under scale 1 (every row has amax 127)."""
    x = draw.codes(-127, 126, rows, cols).float() + 0.5
    if cols:
        x[:, 0] = 127.0
    return x


def _symmetric_range(draw: Draw, rows: int, cols: int) -> Tensor:
    """Every row reaches -a and a: an affine zero point falls on a tie, where the form of the formula decides."""
    x = draw.uniform(rows, cols) * 2 - 1
    if cols:
        x[:, -1], x[:, 0] = 1.0, -1.0
    return x * torch.exp2(draw.uniform(rows, 1) * 8)


def _row_magnitudes(draw: Draw, rows: int, cols: int) -> Tensor:
    return draw.normal(rows, cols) * torch.exp2(torch.linspace(-40, 40, max(rows, 1))[:rows].round()).unsqueeze(1)


def _zero_row(draw: Draw, x: Tensor) -> None:
    x[draw.integer(0, x.shape[0] - 1)] = 0.0


def _zero_column(draw: Draw, x: Tensor) -> None:
    x[:, draw.integer(0, x.shape[1] - 1)] = 0.0


def _zero_group(draw: Draw, x: Tensor) -> None:
    start = GROUP * draw.integer(0, (x.shape[1] - 1) // GROUP)
    x[draw.integer(0, x.shape[0] - 1), start : start + GROUP] = 0.0


def _loud_row(draw: Draw, x: Tensor) -> None:
    x[draw.integer(0, x.shape[0] - 1)] *= 1e30


def _next(value: float, direction: float) -> float:
    return float(torch.nextafter(torch.tensor(value), torch.tensor(direction)))


def _first(n: int) -> int:
    return 0


def _middle(n: int) -> int:
    return n // 2


def _last(n: int) -> int:
    return n - 1


_NORMAL = _scaled_normal(1.0)
_F16_MAX, _BF16_MAX, _F32_MAX = 65504.0, torch.finfo(torch.bfloat16).max, torch.finfo(torch.float32).max
_FLOOR = 2.0**-100

VALUES: tuple[Values, ...] = (
    Values("normal", _NORMAL),
    Values("uniform", lambda draw, rows, cols: draw.uniform(rows, cols)),
    Values("positive", lambda draw, rows, cols: draw.normal(rows, cols).abs() + 0.1),
    Values("negative", lambda draw, rows, cols: -draw.normal(rows, cols).abs() - 0.1),
    Values("zeros", _full(0.0)),
    Values("negative_zeros", _full(-0.0)),
    Values("mixed_zeros", lambda draw, rows, cols: torch.where(draw.uniform(rows, cols) < 0.5, -0.0, 0.0)),
    Values("one_nonzero", _with(_full(0.0), _set(3.7, _middle, _last))),
    Values("all_equal", _full(5.0)),
    Values("all_equal_negative", _full(-5.0)),
    Values("all_qmax", _full(127.0)),
    Values("all_qmin", _full(-128.0)),
    Values(
        "alternating_max", lambda draw, rows, cols: (1 - 2 * (torch.arange(rows * cols) % 2)).reshape(rows, cols) * 3.0
    ),
    Values("one_row_loud", _with(_NORMAL, _loud_row)),
    Values("one_row_zero", _with(_NORMAL, _zero_row)),
    Values("one_channel_zero", _with(_NORMAL, _zero_column)),
    Values("one_group_zero", _with(_NORMAL, _zero_group)),
    Values("one_outlier", _with(_NORMAL, _set(1e4, _middle, _middle))),
    Values("near_maximal_one_signed", lambda draw, rows, cols: 126.0 + draw.uniform(rows, cols)),
    Values("symmetric_range", _symmetric_range),
    Values("integers", lambda draw, rows, cols: draw.codes(-127, 127, rows, cols).float()),
    Values("ties", _ties),
    Values("row_magnitudes", _row_magnitudes),
    Values("smallest_subnormal", _full(2.0**-149)),
    Values("subnormals", _scaled_normal(2.0**-140)),
    Values("smallest_normal", _amax(2.0**-126)),
    Values("floor", _amax(_FLOOR)),
    Values("floor_minus_ulp", _amax(_next(_FLOOR, 0.0))),
    Values("floor_plus_ulp", _amax(_next(_FLOOR, 1.0))),
    Values("tiny_with_floor_row", _with(_scaled_normal(2.0**-120), _set(_FLOOR, _first, _first))),
    Values("amax_of_code_size", _amax(127.0)),
    Values("amax_power_of_two", _amax(2.0**-7)),
    Values("amax_one_ulp_below", _amax(_next(127.0, 0.0))),
    Values("amax_one_ulp_above", _amax(_next(127.0, 200.0))),
    Values("f16_smallest", _amax(2.0**-24)),
    Values("f16_max", _amax(_F16_MAX)),
    Values("bf16_max", _amax(_BF16_MAX)),
    Values("f32_max", _amax(_F32_MAX)),
    Values("f32_max_one_signed", _full(_F32_MAX)),
    Values("range_to_f32_max", lambda draw, rows, cols: (draw.uniform(rows, cols) * 2 - 1) * _F32_MAX),
    Values("huge_and_tiny", lambda draw, rows, cols: torch.where(draw.uniform(rows, cols) < 0.5, 1e30, 1e-30)),
    Values("zero_at_low_end", lambda draw, rows, cols: draw.uniform(rows, cols) * 255),
    Values("zero_at_high_end", lambda draw, rows, cols: draw.uniform(rows, cols) * -255),
    Values("nan_first", _with(_NORMAL, _set(math.nan, _first, _first)), False),
    Values("nan_middle", _with(_NORMAL, _set(math.nan, _middle, _middle)), False),
    Values("nan_last", _with(_NORMAL, _set(math.nan, _last, _last)), False),
    Values("nan_in_zero_row", _with(_full(0.0), _set(math.nan, _first, _last)), False),
    Values("all_nan", _full(math.nan), False),
    Values("plus_infinity", _with(_NORMAL, _set(math.inf, _middle, _last)), False),
    Values("minus_infinity", _with(_NORMAL, _set(-math.inf, _first, _middle)), False),
    Values(
        "both_infinities", _with(_with(_NORMAL, _set(math.inf, _last, _first)), _set(-math.inf, _last, _last)), False
    ),
    Values(
        "infinity_and_nan", _with(_with(_NORMAL, _set(math.inf, _last, _first)), _set(math.nan, _first, _last)), False
    ),
)

STATIC_SCALES = (2.0**-100, 2.0**-7, 0.1, 1.0, 1 / 3, 2.0**100)  # with zero points at both limits and between


# ---- layouts


@dataclass(frozen=True)
class Layout:
    """One way to lay a tensor out in memory. `build` turns a contiguous tensor into one of this layout (values may
    change: an expanded tensor repeats a row); the answer must equal the answer for `.contiguous()` of the result, or,
    where `refused` says why, the call must raise our error."""

    name: str
    build: Callable[[Tensor], Tensor]
    refused: str | None = None
    for_floats_only: bool = False
    min_dim: int = 0

    def takes(self, tensor: Tensor) -> bool:
        return tensor.dim() >= self.min_dim and (tensor.is_floating_point() or not self.for_floats_only)


def _buffer(t: Tensor, count: int) -> Tensor:
    """Memory full of a value that would be noticed."""
    filler = math.nan if t.is_floating_point() else 77
    return torch.full((count,), filler, dtype=t.dtype, device=t.device)


def _placed(t: Tensor, row_stride: int, offset: int) -> Tensor:
    """t with its last dimension dense and its rows `row_stride` apart, starting at `offset`."""
    rows, cols = math.prod(t.shape[:-1]), t.shape[-1]
    memory = _buffer(t, offset + rows * row_stride + 64)
    strides, step = [1], row_stride
    for extent in reversed(t.shape[1:-1] if t.dim() > 1 else ()):
        strides.insert(0, step)
        step *= extent
    if t.dim() > 1:
        strides.insert(0, step)
    assert cols <= row_stride or rows <= 1, "rows would overlap"
    placed = memory.as_strided(t.shape, strides, offset)
    return placed.copy_(t)


def _offset(count: int) -> Callable[[Tensor], Tensor]:
    return lambda t: _placed(t, t.shape[-1], count)


def _every_second_row(t: Tensor) -> Tensor:
    wide = _buffer(t, 2 * t.numel()).reshape(2 * t.shape[0], *t.shape[1:])
    wide[::2] = t
    return wide[::2]


def _every_second_column(t: Tensor) -> Tensor:
    wide = _buffer(t, 2 * t.numel()).reshape(*t.shape[:-1], 2 * t.shape[-1])
    wide[..., 1::2] = t
    return wide[..., 1::2]


def _column_slice(t: Tensor) -> Tensor:
    wide = _buffer(t, math.prod(t.shape[:-1]) * (t.shape[-1] + 8)).reshape(*t.shape[:-1], t.shape[-1] + 8)
    wide[..., 3 : 3 + t.shape[-1]] = t
    return wide[..., 3 : 3 + t.shape[-1]]


def _expanded(t: Tensor) -> Tensor:
    return t[:1].expand_as(t)


def _overlapping(t: Tensor) -> Tensor:
    """Row r starts one element after row r - 1, as a sliding window does."""
    rows = math.prod(t.shape[:-1])
    memory = torch.cat([t.reshape(-1), t.reshape(-1)[:rows]]) if t.numel() else t.reshape(-1)
    return memory.as_strided(t.shape, [1] * t.dim(), 0) if t.numel() else t


def _strange_unit_strides(t: Tensor) -> Tensor:
    """A size-1 dimension in front whose stride means nothing."""
    return t.contiguous().as_strided((1, *t.shape), (7919, *t.contiguous().stride()))


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def _channels_last(t: Tensor) -> Tensor:
    return (t if t.dim() == 4 else t.expand(2, 3, *t.shape[-2:])).contiguous(memory_format=torch.channels_last)


class Marked(torch.Tensor):
    """A tensor subclass that does nothing."""


def _subclass(t: Tensor) -> Tensor:
    return t.clone().as_subclass(Marked)


def _inference(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone()


LAYOUTS: tuple[Layout, ...] = (
    Layout("contiguous", lambda t: t.contiguous()),
    Layout("transposed", _transposed, min_dim=2),
    Layout("every_second_row", _every_second_row, min_dim=1),
    Layout("every_second_column", _every_second_column, min_dim=1),
    Layout("column_slice_odd_offset", _column_slice, min_dim=1),
    Layout("storage_offset_1", _offset(1), min_dim=1),
    Layout("storage_offset_3", _offset(3), min_dim=1),
    Layout("storage_offset_8", _offset(8), min_dim=1),
    Layout("storage_offset_15", _offset(15), min_dim=1),
    Layout("padded_rows", lambda t: _placed(t, t.shape[-1] + 5, 0), min_dim=2),
    Layout("padded_rows_aligned", lambda t: _placed(t, (t.shape[-1] // 64 + 1) * 64, 0), min_dim=2),
    Layout("expanded", _expanded, min_dim=2),
    Layout("overlapping", _overlapping, min_dim=2),
    Layout("strange_unit_strides", _strange_unit_strides, min_dim=2),
    Layout("one_dimension", lambda t: t.reshape(-1, t.shape[-1])[0] if t.numel() else t.reshape(-1), min_dim=1),
    Layout("three_dimensions", lambda t: torch.stack([t, t]).transpose(0, 1), min_dim=2),
    Layout("five_dimensions", lambda t: t.reshape(1, *t.shape[:1], 1, 1, *t.shape[1:]), min_dim=2),
    Layout("channels_last", _channels_last, min_dim=2),
    Layout("no_rows", lambda t: t[:0], min_dim=2),
    Layout("no_columns", lambda t: t[..., :0], min_dim=1),
    Layout("subclass", _subclass),
    Layout("parameter", lambda t: torch.nn.Parameter(t, requires_grad=False), for_floats_only=True),
    Layout("requires_grad", lambda t: t.clone().requires_grad_(), for_floats_only=True),
    Layout("inference", _inference),
    Layout("flipped", lambda t: t.flip(0), min_dim=1),
    Layout("negative_view", lambda t: torch._neg_view(t), refused="a view with a pending sign", for_floats_only=True),
    Layout("sparse", lambda t: t.to_sparse(), refused="not a dense tensor", min_dim=1),
)


def layouts(for_codes: bool = False, refused: bool = False) -> tuple[Layout, ...]:
    """The layouts that an op must take (or must refuse), for floats or for integer codes."""
    return tuple(x for x in LAYOUTS if (x.refused is not None) == refused and not (for_codes and x.for_floats_only))
