"""What must hold of the numbers, as functions of a seed that raise when it does not.

The tests run them many times; mutants.py plants bugs and demands that the same functions notice. `impl` is the
namespace under test: pyquant.numerics, or pyquant.ops, whose functions have the same names and arguments.
"""

from __future__ import annotations

from typing import Any

import accept
import brute
import problems
import torch
from problems import Draw, GemmProblem, Values

from pyquant import numerics
from pyquant.core import names

GRANULARITIES = ("per_tensor", "per_token", "per_channel", "per_group")
RANGES = ((True, -127, 127), (True, -128, 127), (True, -7, 7), (False, -128, 127), (False, -8, 7))
CATALOGUE = "catalogue of values"


def _size(draw: Draw) -> tuple[int, int, int]:
    """rows, cols and a group size that divides cols."""
    group = draw.choice((1, 3, problems.GROUP, 32))
    return draw.integer(1, 5), group * draw.integer(1, 4), group


def _data(values: Values, granularity: str, seed: int) -> tuple[torch.Tensor, int, Draw, str]:
    draw = Draw(seed, "law", values.name, granularity)
    rows, cols, group = _size(draw)
    dtype = draw.choice((torch.float32, torch.float32, torch.float16, torch.bfloat16))
    return values.tensor(rows, cols, dtype, seed), group, draw, f"{values.name} {dtype} [{rows}, {cols}] seed={seed}"


def quantize_dynamic(impl: Any, values: Values, granularity: str, seed: int) -> None:
    """Codes, scale and zero point equal the reference; finite data stay finite; a poisoned block stays alone.

    Finite in, finite out is promised for magnitudes to 2^126: beyond, the outermost code may lie half a step outside of
    float32 (docs/numerics.md 7).
    """
    x, group, draw, what = _data(values, granularity, seed)
    group = group if granularity == "per_group" else 0
    symmetric, qmin, qmax = draw.choice(RANGES)
    what = f"{what} {granularity} group={group} symmetric={symmetric} [{qmin}, {qmax}]"
    got = impl.quantize_dynamic(x, granularity, group, symmetric, qmin, qmax)
    want = brute.quantize_dynamic(x, granularity, group, symmetric, qmin, qmax)
    accept.t1(got[1], want[1], what=f"scale of {what}", waiver=CATALOGUE)
    accept.t0(got[2], want[2], what=f"zero point of {what}", waiver=CATALOGUE)
    accept.t0(got[0], want[0], what=f"codes of {what}", waiver=CATALOGUE)
    if bool((x.to(torch.float32).abs() <= 2.0**126).all()):
        real = impl.dequantize(got[0], got[1], got[2], granularity, group)
        accept.t0(bool(got[1].isfinite().all() and (got[1] > 0).all() and real.isfinite().all()), True, what=what)
        _within_half_a_step(x, real, got[1], granularity, group, what)


def _within_half_a_step(
    x: torch.Tensor, real: torch.Tensor, scale: torch.Tensor, granularity: str, group: int, what: str
) -> None:
    """Dynamic codes miss by at most half a step, plus what float32 loses (2^-22 relative of the largest code, and one
    step below the floor, where scale is 1)."""
    index, _ = brute.blocks(tuple(x.shape), granularity, group)
    step = brute.wide(scale).reshape(-1)[index]
    error = abs(brute.wide(x) - brute.wide(real))
    accept.t0(bool((error <= step * (0.5 + 256 * 2.0**-22)).all()), True, what=f"rounding error of {what}")


def quantize(impl: Any, values: Values, granularity: str, seed: int) -> None:
    """Static codes equal the reference for scales over 2^200 and zero points at and between the limits."""
    x, group, draw, what = _data(values, granularity, seed)
    group = group if granularity == "per_group" else 0
    symmetric, qmin, qmax = draw.choice(RANGES)
    _, shape = brute.blocks(tuple(x.shape), granularity, group)
    scale = torch.full(shape, draw.choice(problems.STATIC_SCALES)) * (1 + draw.uniform(*shape).round())
    zero_point = None
    if not symmetric:
        zero_point = draw.codes(qmin, qmax, *shape)
        if draw.chance(0.5):
            zero_point = torch.full_like(zero_point, draw.choice((qmin, qmax)))
    what = f"{what} {granularity} group={group} scale={scale.flatten()[0]:g} zero_point={zero_point} [{qmin}, {qmax}]"
    got = impl.quantize(x, scale, zero_point, granularity, group, qmin, qmax)
    want = brute.quantize(x, scale, zero_point, granularity, group, qmin, qmax)
    accept.t0(got, want, what=what, waiver=CATALOGUE)
    nan = x.isnan()
    if bool(nan.any()):
        index, _ = brute.blocks(tuple(x.shape), granularity, group)
        zero = 0 if zero_point is None else zero_point.reshape(-1)[torch.from_numpy(index)][nan]
        accept.t0(bool((got[nan] == zero).all()), True, what=f"NaN becomes zero_point: {what}")


def dequantize(impl: Any, granularity: str, seed: int) -> None:
    """Real numbers of every code under every scale equal the reference, in all three float types."""
    draw = Draw(seed, "dequantize", granularity)
    rows, cols, group = _size(draw)
    group = group if granularity == "per_group" else 0
    dtype, low, high = draw.choice(((torch.int8, -128, 127), (torch.uint8, 0, 255)))
    q = draw.codes(low, high, rows, cols).to(dtype)
    _, shape = brute.blocks((rows, cols), granularity, group)
    scale = problems.scales(draw, *shape) * draw.choice((1.0, 2.0**-100, 2.0**100, 1e-38))
    zero_point = draw.codes(low, high, *shape) if draw.chance(0.6) else None
    out_dtype = draw.choice(problems.FLOATS)
    got = impl.dequantize(q, scale, zero_point, granularity, group, out_dtype=out_dtype)
    want = brute.dequantize(q, scale, zero_point, granularity, group, out_dtype)
    accept.t1(got, want, what=f"{granularity} {out_dtype} [{rows}, {cols}] seed={seed}", waiver="scales to both ends")


def pack(impl: Any, seed: int) -> None:
    """Packing equals the definition, and unpacking gives the codes back, for odd and even K and any leading shape."""
    draw = Draw(seed, "pack")
    k = draw.integer(0, 33)
    lead = draw.choice(((), (3,), (2, 3), (0,)))
    q = draw.codes(-8, 7, *lead, k).to(torch.int8)
    packed = impl.pack_int4(q)
    rows = q.reshape(-1, k) if q.numel() else q.new_empty(0, k)
    accept.t0(packed.reshape(-1), problems._pack(rows).reshape(-1), what=f"pack k={k} seed={seed}", waiver="small")
    accept.t0(list(packed.shape), [*lead, (k + 1) // 2], what=f"pack k={k} seed={seed}")
    accept.t0(impl.unpack_int4(packed, k), q, what=f"unpack k={k} seed={seed}", waiver="small")


def gemm(impl: Any, problem: GemmProblem) -> None:
    """The op equals the reference bit for bit: int32 and codes under T0, floats under T1."""
    got = getattr(impl, problem.op)(**problem.call)
    want = brute.gemm(problem.call["x"], problem.w_codes, problem.call)
    if want.is_floating_point():
        accept.t1(got, want, what=problem.repeat, waiver=problem.waiver)
    else:
        accept.t0(got, want, what=problem.repeat, waiver=problem.waiver)


def large_sums(impl: Any, seed: int) -> None:
    """Near-maximal operands of one sign, where float32 sums are wrong in every element from K = 1 040 on."""
    draw = Draw(seed, "large sums")
    for k in (1_041, 8_191, 65_793):
        x, w = (draw.codes(120, 127, rows, k).to(torch.int8) for rows in (3, 7))
        want = torch.from_numpy(brute.accumulate(x, w, None).astype("int32"))
        got = impl.gemm_s8s8(x, w, out_dtype=torch.int32)
        accept.t0(got, want, what=f"near-maximal codes, K={k} seed={seed}")


def row_alone(impl: Any, problem: GemmProblem) -> None:
    """A row computed alone, and the batch in reverse order, have the bits they have in the batch."""
    call, m = problem.call, problem.shape.m
    if m == 0:
        return
    whole = getattr(impl, problem.op)(**call)
    row = Draw(problem.seed, "row", problem.index).integer(0, m - 1)
    per_row = ("x", "residual", *(n for n in ("x_scale", "x_zero_point") if n in call and call[n].dim() == 1))
    for rows in (slice(row, row + 1), torch.arange(m - 1, -1, -1)):
        part = {name: value[rows] if name in per_row and value is not None else value for name, value in call.items()}
        got, want = getattr(impl, problem.op)(**part), whole[rows]
        rule = accept.t1 if want.is_floating_point() else accept.t0
        rule(got, want, what=f"row {row} of {problem.repeat}", waiver="compared with itself")


def linear(impl: Any, seed: int) -> None:
    """The fused layer equals its parts: reference quantisation, reference product, reference epilogue."""
    draw = Draw(seed, "linear")
    m, n, k = draw.integer(1, 6), draw.integer(1, 20), draw.choice((1, 7, 16, 33, 64))
    w_bits, static, affine, grouped = draw.choice((8, 4)), draw.chance(0.4), draw.chance(0.4), draw.chance(0.4)
    low, high = (-128, 127) if w_bits == 8 else (-8, 7)
    x_qmin, x_qmax = (-128, 127) if affine else (-127, 127)
    group_size = draw.choice([g for g in (1, 3, 4, 8, 11, k) if k % g == 0]) if grouped else 0
    w = draw.codes(low, high, n, k).to(torch.int8)
    dtype = draw.choice(problems.FLOATS)
    x = (draw.normal(m, k) * 3).to(dtype)
    call: dict[str, Any] = {
        "w_scale": problems.scales(draw, n, k // group_size) if group_size else problems.scales(draw, n),
        "bias": draw.normal(n) if draw.chance(0.6) else None,
        "residual": draw.normal(m, n).to(dtype) if draw.chance(0.4) else None,
        "activation": draw.choice(("none", "relu", "clamp")),
        "clamp_min": -1.0,
        "clamp_max": 2.5,
        "group_size": group_size,
    }
    layer = {**call, "x_qmin": x_qmin, "x_qmax": x_qmax, "x_symmetric": not affine}
    if static:
        x_scale = torch.tensor([0.037])
        x_zero_point = draw.codes(-128, 127, 1) if affine else None
        q = brute.quantize(x, x_scale, x_zero_point, "per_tensor", 0, x_qmin, x_qmax)
        layer |= {"x_scale": x_scale, "x_zero_point": x_zero_point}
        parts = {"x_scale": x_scale.reshape(()), "x_zero_point": x_zero_point}
        x = draw.choice((x, q, (q.to(torch.int32) + 128).to(torch.uint8)))
        if x.dtype == torch.uint8:  # the same real numbers: codes and zero point 128 higher
            layer["x_zero_point"] = torch.full((1,), 128, dtype=torch.int32) + (
                0 if x_zero_point is None else x_zero_point
            )
    else:
        q, x_scale, x_zero_point = brute.quantize_dynamic(x, "per_token", 0, not affine, x_qmin, x_qmax)
        parts = {"x_scale": x_scale, "x_zero_point": x_zero_point if affine else None}
    out_dtype = x.dtype if x.is_floating_point() else torch.float32
    if draw.chance(0.3):
        out_dtype, call["out_scale"] = torch.int8, torch.tensor([0.21])
        layer["out_scale"] = call["out_scale"]
    want = brute.gemm(q, w, {**call, **parts, "out_dtype": out_dtype})
    got = impl.qlinear_reference(x, w, **layer)
    what = f"linear seed={seed} [{m}, {n}, {k}] static={static} affine={affine} group={group_size} {x.dtype}"
    (accept.t1 if want.is_floating_point() else accept.t0)(got, want, what=what, waiver="small")
    if not static:  # the codes that the layer makes itself, given with what came with them
        given = {**layer, **parts, "x_per_token": True, "out_dtype": out_dtype}
        if call.get("out_scale") is not None:
            given["out_dtype"] = None
        codes = impl.qlinear_reference(q.to(torch.int8), w, **given)
        (accept.t1 if want.is_floating_point() else accept.t0)(codes, want, what=f"codes, {what}", waiver="small")
    if not static and m > 0:
        layer["residual"] = None if call["residual"] is None else call["residual"][0]
        alone = impl.qlinear_reference(x[0], w, **layer)
        (accept.t1 if want.is_floating_point() else accept.t0)(alone, want[0], what=f"1-D {what}", waiver="small")


# ---- norm or gated SiLU, then codes

NORM_WIDTHS = (1, 2, 7, 32, 100, 257, 1000, 2047, 2048, 2049, 4103)
PRODUCERS = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "silu_mul", "activation_mul", "hadamard")
BLOCKS = tuple(base << twos for base in (1, 12, 20, 28) for twos in range(16))  # orders of a Hadamard matrix


def producer_call(name: str, seed: int, rows: int | None = None, k: int | None = None) -> dict[str, Any]:
    """Arguments of `<name>_quantize`: rows of very different size, one poisoned now and then, one constant."""
    draw = Draw(seed, "producer", name)
    rows = draw.integer(1, 5) if rows is None else rows
    k = draw.choice(NORM_WIDTHS) if k is None else k
    dtype = draw.choice(problems.FLOATS)
    width = 2 * k if name == "silu_mul" else k
    x = draw.normal(rows, width) * torch.exp2(4 * draw.normal(rows, 1)) + draw.choice((0.0, 0.0, 3.0))
    if rows > 2 and k > 0:
        x[1, draw.integer(0, k - 1)] = draw.choice((torch.nan, torch.inf, -torch.inf, 1.0, 1e30))
        x[2] = draw.choice((0.0, 1.0, 2.0**-70))
    symmetric, qmin, qmax = draw.choice(RANGES)
    call: dict[str, Any] = {"x": x.to(dtype)}
    if name == "hadamard":
        call["block"] = draw.choice([b for b in BLOCKS if k % b == 0] if k else (1, 16))
    if name == "activation_mul":
        call["up"] = (draw.normal(rows, k) * torch.exp2(4 * draw.normal(rows, 1))).to(dtype)
        call |= {"activation": draw.choice(names.ACTIVATIONS), "clamp_min": -0.375, "clamp_max": 6.0}
    if name.startswith("add"):
        call["residual"] = draw.normal(rows, k).to(dtype)
    if "norm" in name:
        call["weight"] = draw.choice((None, draw.normal(k), (1 + draw.normal(k) / 8).to(dtype)))
        if "layer" in name:
            call["bias"] = draw.choice((None, draw.normal(k), draw.normal(k).to(dtype)))
        call["eps"] = draw.choice((1e-6, 1e-5, 0.0, 0.25))
    return call | {"symmetric": symmetric, "qmin": qmin, "qmax": qmax}


def produced(name: str, call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is quantised, in float32, and the sum of the add_ forms; by float64 steps."""
    x = call["x"]
    total = None
    if "residual" in call:
        total = x = brute.back(brute.f32(brute.wide(x) + brute.wide(call["residual"])), x.dtype)
    if name == "silu_mul":
        gate, up = x.to(torch.float32).chunk(2, -1)
        curve = numerics.activation.silu(gate.contiguous())  # tests/numerics/test_activation.py judges the curve
        return brute.back(brute.f32(brute.wide(curve) * brute.wide(up))), total
    if name == "activation_mul":
        curve = numerics.activate(x.to(torch.float32), call["activation"], call["clamp_min"], call["clamp_max"])
        return brute.back(brute.f32(brute.wide(curve) * brute.wide(call["up"]))), total
    if name == "hadamard":
        return brute.hadamard(x, call["block"]), total
    return brute.norm(x, call["weight"], call.get("bias"), call["eps"], "layer" in name), total


def producer(impl: Any, name: str, seed: int, rows: int | None = None, k: int | None = None) -> None:
    """Codes, scale, zero point and sum equal the reference bit for bit."""
    call = producer_call(name, seed, rows, k)
    y, total = produced(name, call)
    want = brute.quantize_dynamic(y, "per_token", 0, call["symmetric"], call["qmin"], call["qmax"])
    got = getattr(impl, f"{name}_quantize")(**call)
    what = f"{name} {list(call['x'].shape)} {call['x'].dtype} seed={seed}"
    accept.t1(got[1], want[1], what=f"scale of {what}", waiver="few rows, constant ones among them")
    accept.t0(got[2], want[2], what=f"zero point of {what}", waiver="few rows")
    accept.t0(got[0], want[0], what=f"codes of {what}", waiver="constant rows on purpose")
    if total is not None:
        accept.t1(got[3], total, what=f"sum of {what}", waiver="constant rows on purpose")


def sums(impl: Any, seed: int) -> None:
    """Sums of numbers that cancel, where every order has its own bits, keep the one order."""
    for k in (0, 1, 5, 2048, 2050, 6000):
        x = Draw(seed, "sums", k).normal(16, k)
        want = brute.back(brute.sum_in_lanes(brute.wide(x)))[:, 0]
        accept.t1(impl.sum_in_lanes(x), want, what=f"sums of {k} seed={seed}", waiver="K = 0")
