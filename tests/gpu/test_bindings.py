"""torch.ops.pyquant on CUDA tensors against the CPU, bit for bit: checks, padding, selection, launches and results of
every op, on the PTX simulator (tests/cuda_ops.py) or on a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accept
import laws
import problems
import pytest
import simulator
import torch
from cuda_ops import CudaOps
from torch import Tensor

from pyquant import ops
from pyquant.errors import ArgumentError
from pyquant.ops import rows_layout

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
from test_exact import random_layer

WAIVER = "random options: a case of its own may be nearly constant, the sum of cases is not"
CPU_LAYOUT = ops.layout_for(torch.device("cpu"))
SMALL = 3_000_000  # multiply-adds that the simulator does in a blink


@pytest.fixture
def device(there: CudaOps) -> CudaOps:
    return there


@pytest.fixture(params=["plain", "checked"])
def checked_device(request: pytest.FixtureRequest, there: CudaOps) -> Iterator[CudaOps]:
    """The device without and with the simulator's checks of bounds, never-written values and races."""
    if request.param != "plain" and not there.is_simulator:
        pytest.skip("a GPU has one way to run")
    there.mode(request.param)
    yield there
    there.mode("plain")


def compare(got: Tensor, want: Tensor, what: str) -> None:
    rule = accept.t1 if want.is_floating_point() else accept.t0
    rule(got, want, what=what, waiver=WAIVER)


def compare_all(got: Any, want: Any, what: str) -> None:
    for g, w in zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]:
        compare(g, w, what)


# ---- what a call costs its host


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize("m", [1, 40, 300])
def test_a_layer_allocates_once_beside_its_result(device: CudaOps, m: int, symmetric: bool, tmp_path: Path) -> None:
    """Codes, scales, zero points and the kernel's workspace are one piece; two launches make a layer."""
    if not device.is_simulator:
        pytest.skip("the simulator counts launches; a GPU's profiler is another tool")
    n, k = 64, 256
    draw = problems.Draw(problems.BASE_SEED, "allocations", m)
    spec = ops.LinearSpec(n, k, x_qmin=-127 if symmetric else -128, x_symmetric=symmetric, layout="rows")
    codes, scale = draw.codes(-127, 127, n, k).to(torch.int8), draw.uniform(n) + 0.1
    packed = device.put(device.pack_linear(codes, scale, spec.to_ints()))
    x = device.put(draw.normal(m, k).to(torch.bfloat16))
    call = torch.ops.pyquant_sim.qlinear.default
    call(x, packed, None, spec.to_ints(), torch.bfloat16)
    stats = tmp_path / "launches.json"
    simulator.runtime.ptxsim_config(b"PTXSIM_STATS", str(stats).encode())
    before = torch.ops.pyquant_sim.allocations(x)
    call(x, packed, None, spec.to_ints(), torch.bfloat16)
    simulator.runtime.ptxsim_config(b"PTXSIM_STATS", None)
    assert torch.ops.pyquant_sim.allocations(x) - before == 2  # the result, and everything else
    kernels = [launch["kernel"] for launch in json.loads(stats.read_text())]
    assert len(kernels) == 2, kernels  # quantise, multiply


# ---- histograms


@pytest.mark.parametrize("dtype", problems.FLOATS, ids=str)
def test_histograms(checked_device: CudaOps, dtype: torch.dtype) -> None:
    draw = problems.Draw(problems.BASE_SEED, "histogram", str(dtype))
    for shape, exponent in (((3000,), 2), ((17, 129), 5), ((1,), 128), ((0, 3), 0), ((66000,), 1), ((9, 40), -3)):
        x = (draw.normal(*shape) * torch.exp2(4 * draw.normal(*shape))).to(dtype)
        if x.numel() > 100:
            x.view(-1)[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -2.0, 2.0**-20])
        if shape == (9, 40):
            x = x[::2, 1:]  # rows apart, off every boundary
        compare(checked_device.magnitude_histogram(x, exponent), ops.magnitude_histogram(x, exponent), f"{shape}")


# ---- quantisers


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
@pytest.mark.parametrize("dtype", problems.FLOATS, ids=str)
def test_dynamic_quantisers(device: CudaOps, dtype: torch.dtype, symmetric: bool) -> None:
    qmin, qmax = (-127, 127) if symmetric else (-128, 127)
    for index, values in enumerate(problems.VALUES):
        x = values.tensor(*((17, 80), (3, 33), (9, 16))[index % 3], dtype)
        options = (("per_token", "per_channel")[index % 2], 0, symmetric, qmin, qmax)
        compare_all(device.quantize_dynamic(x, *options), ops.quantize_dynamic(x, *options), values.name)


@pytest.mark.parametrize("granularity", laws.GRANULARITIES)
def test_dynamic_quantisers_at_every_granularity(device: CudaOps, granularity: str) -> None:
    group = 16 if granularity == "per_group" else 0
    for index, shape in enumerate(((33, 80), (1, 512), (3, 1040), (2, 3, 16))):
        x = problems.Draw(problems.BASE_SEED, "granularity", index).normal(*shape).to(problems.FLOATS[index % 3])
        options = (granularity, group, False, -128, 127)
        compare_all(device.quantize_dynamic(x, *options), ops.quantize_dynamic(x, *options), f"{granularity} {shape}")


@pytest.mark.parametrize("name", laws.PRODUCERS)
def test_fused_quantisers(checked_device: CudaOps, name: str) -> None:
    for seed in range(8):
        call = laws.producer_call(name, seed)
        got = getattr(checked_device, f"{name}_quantize")(**call)
        compare_all(got, getattr(ops, f"{name}_quantize")(**call), f"{name} seed {seed}")


@pytest.mark.parametrize("granularity", ["per_tensor", "per_token", "per_group"])
def test_static_quantisers_and_back(device: CudaOps, granularity: str) -> None:
    for index, values in enumerate(problems.VALUES):
        dtype = problems.FLOATS[index % 3]
        draw = problems.Draw(problems.BASE_SEED, "bindings", granularity, index)
        x = values.tensor(5, 48, dtype)
        group = 16 if granularity == "per_group" else 0
        shape = {"per_tensor": (1,), "per_token": (5,), "per_group": (5, 3)}[granularity]
        scale, zero = problems.scales(draw, *shape), draw.codes(-20, 20, *shape) if index % 2 else None
        codes = ops.quantize(x, scale, zero, granularity, group)
        compare(device.quantize(x, scale, zero, granularity, group), codes, values.name)
        stored = codes if index % 2 else codes.view(torch.uint8)
        back = (scale, zero, granularity, group, problems.FLOATS[(index + 1) % 3])
        compare(device.dequantize(stored, *back), ops.dequantize(stored, *back), values.name)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 8), (4, 0), (0, 6)])
def test_int4_packing(checked_device: CudaOps, shape: tuple[int, ...]) -> None:
    codes = problems.Draw(problems.BASE_SEED, "int4", shape).codes(-8, 7, *shape).to(torch.int8)
    packed = ops.pack_int4(codes)
    compare(checked_device.pack_int4(codes), packed, str(shape))
    compare(checked_device.unpack_int4(packed, shape[-1]), codes, str(shape))


@pytest.mark.parametrize("layout", [v for v in problems.layouts() if v.min_dim], ids=lambda v: v.name)
def test_any_layout_of_x(device: CudaOps, layout: problems.Layout) -> None:
    with torch.no_grad():
        x = layout.build(problems.Draw(problems.BASE_SEED, "layout").normal(6, 16)).detach()
    plain = torch.Tensor(x).contiguous()
    compare_all(device.quantize_dynamic(x), ops.quantize_dynamic(plain), layout.name)
    scale = torch.tensor([0.02])
    compare(device.quantize(x, scale), ops.quantize(plain, scale), layout.name)
    w = problems.codes(problems.Draw(problems.BASE_SEED, "layout w"), "s8", "uniform", 5, plain.shape[-1])
    packed, spec = _packed_there(device, w, torch.ones(5) / 900, ops.LinearSpec(5, plain.shape[-1]), {})
    here = ops.LinearSpec(5, plain.shape[-1], layout=CPU_LAYOUT).to_ints()
    want = ops.qlinear(plain, ops.pack_linear(w, torch.ones(5) / 900, here), None, here)
    compare(device.qlinear(x, packed, None, spec), want, layout.name)


# ---- plain products


def cases(epilogue: str, count: int, device: CudaOps) -> Iterator[problems.GemmProblem]:
    """Random problems, only the small ones where every multiply-add is simulated."""
    taken = index = 0
    while taken < count:
        problem = problems.gemm_problem(index, epilogue=epilogue)
        index += 1
        s = problem.shape
        if not device.is_simulator or s.m * s.n * s.k <= SMALL:
            taken += 1
            yield problem


@pytest.mark.parametrize("epilogue", ["accumulator", "float", "codes"])
def test_plain_products(device: CudaOps, epilogue: str) -> None:
    for problem in cases(epilogue, 70, device):
        got = getattr(device, problem.op)(**problem.call)
        compare(got, getattr(ops, problem.op)(**problem.call), problem.repeat)


def test_plain_products_under_checks(checked_device: CudaOps) -> None:
    for problem in cases("float", 12, checked_device):
        got = getattr(checked_device, problem.op)(**problem.call)
        compare(got, getattr(ops, problem.op)(**problem.call), problem.repeat)


def test_plain_products_of_three_dimensions_and_strides(checked_device: CudaOps) -> None:
    draw = problems.Draw(problems.BASE_SEED, "three dimensions")
    x = draw.codes(-128, 127, 3, 5, 96).to(torch.int8)
    w = draw.codes(-128, 127, 40, 96).to(torch.int8)
    call = {
        "w": w,
        "w_scale": problems.scales(draw, 40),
        "x_scale": problems.scales(draw, 3, 5),
        "x_zero_point": draw.codes(-9, 9, 3, 5),
        "bias": draw.normal(40),
        "residual": draw.normal(3, 5, 40),
        "activation": "gelu",
        "out_dtype": torch.bfloat16,
    }
    for laid in (x, x.transpose(0, 1).contiguous().transpose(0, 1), x[..., ::2].repeat_interleave(2, -1)):
        compare(checked_device.gemm_s8s8(laid, **call), ops.gemm_s8s8(laid, **call), str(laid.stride()))


# ---- fused layers


def _packed_there(
    device: CudaOps, w: Tensor, w_scale: Tensor, spec: ops.LinearSpec, operands: dict[str, Any]
) -> tuple[Tensor, tuple[int, ...]]:
    """The layer's buffer in the layout of the device, and its spec."""
    there = ops.LinearSpec(**(vars(spec) | {"layout": "rows"})).to_ints()
    packed = device.pack_linear(w, w_scale, there, **operands)
    assert torch.equal(device.unpack_linear(packed, there), w)
    return packed, there


def _layers(device: CudaOps, count: int, start: int = 0) -> Iterator[tuple[Any, ...]]:
    """Random layers of tests/ops: x, buffers and specs of both sides, residual, words for the report."""
    taken, index = 0, start
    while taken < count:
        x, operands, spec, codes, reference = random_layer(index)
        index += 1
        if device.is_simulator and x.shape[0] * spec.n * spec.k > SMALL:
            continue
        taken += 1
        w_scale = operands.pop("w_scale")
        w = ops.pack_int4(codes) if spec.w_bits == 4 else codes
        here = ops.pack_linear(w, w_scale, spec.to_ints(), **operands)
        there, there_spec = _packed_there(device, w, w_scale, spec, operands)
        what = f"random_layer({index - 1}) seed {problems.BASE_SEED}: x {list(x.shape)} {x.dtype}, {spec}"
        yield x, here, spec, there, there_spec, reference["residual"], operands, what


def test_fused_layers(device: CudaOps) -> None:
    for x, here, spec, there, there_spec, residual, _, what in _layers(device, 150):
        want = ops.qlinear(x, here, residual, spec.to_ints())
        compare(device.qlinear(x, there, residual, there_spec), want, what)


def test_fused_layers_under_checks(checked_device: CudaOps) -> None:
    for x, here, spec, there, there_spec, residual, _, what in _layers(checked_device, 25, start=1000):
        want = ops.qlinear(x, here, residual, spec.to_ints())
        compare(checked_device.qlinear(x, there, residual, there_spec), want, what)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 5, 33), (17, 77, 100), (6, 16, 31), (4, 130, 65)])
def test_tails_of_every_size(checked_device: CudaOps, kind: str, m: int, n: int, k: int) -> None:
    """Outputs are written with the caller's own row length, whatever it is: 3-D inputs, residuals with junk around."""
    draw = problems.Draw(problems.BASE_SEED, "tails", kind, m, n, k)
    w = problems.codes(draw, "s8", "uniform", n, k)
    operands = {"bias": draw.normal(n), "x_scale": problems.scales(draw, 1) if kind == "static" else None}
    w_scale = problems.scales(draw, n)
    spec = ops.LinearSpec(n, k, input=kind, has_bias=True, activation="silu", layout=CPU_LAYOUT)
    here = ops.pack_linear(w, w_scale, spec.to_ints(), **operands)
    there, there_spec = _packed_there(checked_device, w, w_scale, spec, operands)
    for dtype in problems.FLOATS:
        x = draw.normal(2, m, k).to(dtype)
        wide = draw.normal(2, m, n + 3).to(dtype)
        for residual in (None, wide[..., 1 : n + 1]):
            want = ops.qlinear(x, here, residual, spec.to_ints())
            compare(checked_device.qlinear(x, there, residual, there_spec), want, f"{kind} {m}x{n}x{k} {dtype}")


def test_layers_take_codes(checked_device: CudaOps) -> None:
    """int8 and uint8 codes, aligned and not: a zero point counts in the terms of the codes that come, and is one."""
    taken = unsigned = 0
    for x, here, spec, there, there_spec, residual, operands, what in _layers(checked_device, 60):
        if spec.input != "static":
            continue
        taken += 1
        q = ops.quantize(x, operands["x_scale"], operands["x_zero_point"], qmin=spec.x_qmin, qmax=spec.x_qmax)
        kinds = [q, torch.cat([q, q[:, :1]], 1)[:, : q.shape[1]]]
        if operands["x_zero_point"] is None or int(operands["x_zero_point"]) >= 0:
            kinds.append((q.to(torch.int16) + 128).to(torch.uint8))
            unsigned += 1
        for codes in kinds:
            want = ops.qlinear(codes, here, residual, spec.to_ints())
            compare(checked_device.qlinear(codes, there, residual, there_spec), want, f"{codes.dtype} {what}")
    assert taken >= 15
    assert unsigned >= 5


def test_layers_take_codes_with_a_scale_a_row(checked_device: CudaOps) -> None:
    """Of layers with dynamic inputs: aligned codes and others, zero points where the inputs are affine."""
    taken = 0
    for x, here, spec, there, there_spec, residual, _, what in _layers(checked_device, 60, start=300):
        if spec.input != "dynamic":
            continue
        taken += 1
        q, scale, zero_point = ops.quantize_dynamic(x, "per_token", 0, spec.x_symmetric, spec.x_qmin, spec.x_qmax)
        zero_point = None if spec.x_symmetric else zero_point
        for codes in (q, torch.cat([q, q[:, :1]], 1)[:, : q.shape[1]]):
            for zero in {id(z): z for z in (zero_point, None)}.values():
                want = ops.qlinear(codes, here, residual, spec.to_ints(), None, scale, zero)
                got = checked_device.qlinear(codes, there, residual, there_spec, None, scale, zero)
                compare(got, want, what)
    assert taken >= 15


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k"), [(24, 64), (33, 100), (1, 7), (130, 2), (5, 1)])
def test_int4_codes_travel_two_to_a_byte(checked_device: CudaOps, bits: int, n: int, k: int) -> None:
    draw = problems.Draw(problems.BASE_SEED, "two to a byte", bits, n, k)
    codes = problems.codes(draw, "s4" if bits == 4 else "s8", "uniform", n, k)
    w, w_scale = ops.pack_int4(codes) if bits == 4 else codes, problems.scales(draw, n)
    spec = ops.LinearSpec(
        n,
        k,
        bits,
        input="static",
        x_qmin=-8,
        x_qmax=7,
        x_symmetric=False,
        has_bias=True,
        codes_out=True,
        out_qmin=-8,
        out_qmax=7,
        layout=CPU_LAYOUT,
    )
    operands = {
        "bias": draw.normal(n),
        "x_scale": problems.scales(draw, 1),
        "x_zero_point": draw.codes(-8, 7, 1),
        "out_scale": problems.scales(draw, 1) * k**0.5 * 2,
        "out_zero_point": draw.codes(-2, 2, 1),
    }
    here = ops.pack_linear(w, w_scale, spec.to_ints(), **operands)
    there, there_spec = _packed_there(checked_device, w, w_scale, spec, operands)
    for m in (1, 9):
        q = draw.codes(-8, 7, 2, m, k).to(torch.int8)
        want = ops.qlinear(q, here, None, spec.to_ints())
        for served, buffer, ints in ((ops, here, spec.to_ints()), (checked_device, there, there_spec)):
            for x in (q, ops.pack_int4(q)) if k > 1 else (q,):
                compare(served.qlinear(x, buffer, None, ints), want, f"{x.dtype} in")
                compare(
                    served.qlinear(x, buffer, None, ints, torch.uint8), ops.pack_int4(want), f"{x.dtype} in and out"
                )


@pytest.mark.parametrize(("m", "n", "k"), [(0, 16, 32), (5, 0, 32), (5, 16, 0), (0, 0, 0)])
def test_zero_sizes(checked_device: CudaOps, m: int, n: int, k: int) -> None:
    for codes_out in (False, True):
        spec = ops.LinearSpec(n, k, has_bias=True, codes_out=codes_out, layout=CPU_LAYOUT)
        operands = {"bias": torch.linspace(-1, 1, n), "out_scale": torch.tensor([0.01]) if codes_out else None}
        w, w_scale = torch.zeros(n, k, dtype=torch.int8), torch.ones(n)
        here = ops.pack_linear(w, w_scale, spec.to_ints(), **operands)
        there, there_spec = _packed_there(checked_device, w, w_scale, spec, operands)
        x = torch.ones(m, k)
        want = ops.qlinear(x, here, None, spec.to_ints())
        compare(checked_device.qlinear(x, there, None, there_spec), want, f"{m}x{n}x{k}")
    q = torch.ones(m, k, dtype=torch.int8)
    want = ops.gemm_s8s8(q, w, w_scale, bias=operands["bias"])
    compare(checked_device.gemm_s8s8(q, w, w_scale, bias=operands["bias"]), want, f"plain {m}x{n}x{k}")
    compare_all(checked_device.quantize_dynamic(x), ops.quantize_dynamic(x), f"quantise {m}x{k}")


# ---- layers with float activations


def _within_bound(got: Tensor, x: Tensor, real: Tensor, exact_w: Tensor, what: str, **epilogue: Any) -> None:
    """docs/numerics.md 8 on CUDA: operands, product and bias in the layer's own type, as torch's own Linear has them.

    real     the weights in the type of the product; exact_w   float64, not rounded to it.
    """
    bias, residual = epilogue.get("bias"), epilogue.get("residual")
    wide, n, k = x.double(), exact_w.shape[0], x.shape[-1]
    exact, magnitude = wide @ exact_w.T, wide.abs() @ exact_w.abs().T
    there = "cuda" if torch.cuda.is_available() else "cpu"  # sums of different orders have different errors
    peer = (x.to(real.dtype).to(there) @ real.T.to(there)).cpu().double()
    for term in (None if bias is None else bias.double(), None if residual is None else residual.double()):
        if term is not None:
            exact, magnitude, peer = exact + term, magnitude + term.abs(), peer + term
    # One rounding each of a weight, of the product and of the bias, beside those of the sum.
    c = 3 * torch.finfo(real.dtype).eps / 2 * 2**24 / max(k, 1) + 2
    accept.t3(got, exact, magnitude, k, peer.to(got.dtype), c=c, what=what, waiver=WAIVER)
    assert got.shape == (*x.shape[:-1], n)


@pytest.mark.parametrize("dtype", problems.FLOATS, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 40, 64), (17, 33, 100), (2, 1030, 16), (5, 7, 0)])
def test_float_layers(checked_device: CudaOps, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    draw = problems.Draw(problems.BASE_SEED, "float layers", dtype, m, n, k)
    x, w, bias = draw.normal(2, m, k).to(dtype), draw.normal(n, k).to(dtype), draw.normal(n)
    residual = draw.normal(2, m, n + 5)[..., 2 : n + 2].to(dtype)
    for out in (None, torch.float32, dtype):
        for epilogue in ({}, {"bias": bias}, {"residual": residual}, {"bias": bias, "residual": residual}):
            got = checked_device.float_linear(x, w, out_dtype=out, **epilogue)
            _within_bound(got, x, w, w.double(), f"{dtype} to {out} {list(epilogue)}", **epilogue)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("activation", problems.ACTIVATIONS)
def test_activations_of_float_layers(device: CudaOps, dtype: torch.dtype, activation: str) -> None:
    """Products that are exact: the epilogue alone is compared, and bit for bit."""
    draw = problems.Draw(problems.BASE_SEED, "float activations", activation)
    x, w = draw.codes(-3, 3, 5, 8).to(dtype), draw.codes(-2, 2, 50, 8).to(dtype)
    residual = draw.normal(5, 50).to(dtype)
    options = {"activation": activation, "clamp_min": -1.5, "clamp_max": 3.25, "out_dtype": torch.bfloat16}
    for bias in (None, draw.normal(50)):
        want = ops.float_linear(x, w, bias, residual, **options)
        compare(device.float_linear(x, w, bias, residual, **options), want, activation)


@pytest.mark.parametrize("dtype", problems.FLOATS, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [0, 16])
def test_weight_only_layers(checked_device: CudaOps, dtype: torch.dtype, bits: int, group_size: int) -> None:
    for index, (m, n, k) in enumerate(((1, 48, 64), (3, 33, 96), (20, 40, 32), (2, 5, 16))):
        draw = problems.Draw(problems.BASE_SEED, "weight only", dtype, bits, group_size, index)
        codes = problems.codes(draw, "s4" if bits == 4 else "s8", "uniform", n, k)
        shape = (n, k // group_size) if group_size else (n,)
        scale, zero = problems.scales(draw, *shape), draw.codes(-3, 3, *shape) if index % 2 else None
        x, bias = draw.normal(m, k).to(dtype), draw.normal(n)
        w = ops.pack_int4(codes) if bits == 4 else codes
        got = checked_device.weight_only_linear(x, w, scale, zero, bias, w_bits=bits, group_size=group_size)
        granularity = "per_group" if group_size else "per_channel"
        exact = ops.dequantize(codes, scale, zero, granularity, group_size)
        _within_bound(got, x, exact.to(dtype), exact.double(), f"{dtype} {bits} bits {m}x{n}x{k}", bias=bias)


def test_float_layers_that_are_wrong_are_told_apart(device: CudaOps) -> None:
    draw = problems.Draw(problems.BASE_SEED, "wrong float layers")
    x, w, bias = draw.normal(9, 64).half(), draw.normal(24, 64).half(), draw.normal(24)
    _within_bound(device.float_linear(x, w, bias), x, w, w.double(), "honest", bias=bias)
    for wrong in (x.roll(1, 0), x.bfloat16().half()):
        with pytest.raises(accept.Rejected):
            _within_bound(device.float_linear(wrong, w, bias), x, w, w.double(), "wrong", bias=bias)
    with pytest.raises(accept.Rejected):
        _within_bound(device.float_linear(x, w, bias.roll(1)), x, w, w.double(), "wrong bias", bias=bias)


# ---- refusals


ON_CPU = ops.LinearSpec(4, 8, layout=CPU_LAYOUT).to_ints()
REFUSALS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("quantize", "x", {"x": torch.ones(2, 8).double()}),
    ("quantize", "scale", {"scale": torch.ones(3)}),
    ("quantize", "granularity", {"granularity": "per_row"}),
    ("quantize", "qmax", {"qmin": 5, "qmax": 5}),
    ("quantize_dynamic", "group_size", {"group_size": 4}),
    ("quantize_dynamic", "qmin", {"qmin": 0}),
    ("dequantize", "out_dtype", {"out_dtype": torch.int8}),
    ("unpack_int4", "k", {"k": 9}),
    ("gemm_s8s8", "w", {"w": torch.ones(4, 9, dtype=torch.int8)}),
    ("gemm_s8s8", "w_scale", {"w_scale": None}),
    ("gemm_s8s8", "bias", {"bias": torch.ones(3)}),
    ("gemm_s8s8", "residual", {"residual": torch.ones(2, 5)}),
    ("gemm_s8s8", "activation", {"activation": "swish"}),
    ("gemm_s8s8", "out_scale", {"out_dtype": torch.int8}),
    ("gemm_s8s8", "group_size", {"group_size": 3}),
    ("gemm_s8s8", "x", {"x": torch.ones(2, 200_000, dtype=torch.int8), "w": torch.ones(4, 200_000, dtype=torch.int8)}),
    ("gemm", "kernel", {"kernel": "gemm_of_no_such_name"}),
    ("gemm", "x", {"x": torch.ones(2, 8)}),
    ("gemm", "w_scale", {"w_scale": None}),
    ("gemm", "w", {"w": torch.ones(4, 8)}),
    ("qlinear", "x", {"x": torch.ones(2, 7)}),
    ("qlinear", "packed", {"packed": torch.zeros(10, dtype=torch.uint8)}),
    ("qlinear", "residual", {"residual": torch.ones(2, 4).double()}),
    ("qlinear", "spec", {"spec": (1, 2, 3)}),
    ("qlinear", "spec", {"spec": ON_CPU, "packed": ops.pack_linear(torch.ones(4, 8).char(), torch.ones(4), ON_CPU)}),
    ("qlinear", "out_dtype", {"out_dtype": torch.int8}),
    ("qlinear", "out_dtype", {"out_dtype": torch.uint8}),
    ("qlinear", "x", {"x": torch.ones(2, 4, dtype=torch.uint8)}),
    ("qlinear", "x", {"x_scale": torch.ones(2)}),
    ("qlinear", "x_scale", {"x": torch.ones(2, 8, dtype=torch.int8), "x_scale": torch.ones(3)}),
    (
        "qlinear",
        "x_zero_point",
        {
            "x": torch.ones(2, 8, dtype=torch.int8),
            "x_scale": torch.ones(2),
            "x_zero_point": torch.zeros(2, dtype=torch.int32),
        },
    ),
    ("float_linear", "w", {"w": torch.ones(4, 9)}),
    ("weight_only_linear", "w_bits", {"w_bits": 3}),
)


def _legal(device: CudaOps) -> dict[str, dict[str, Any]]:
    codes, w = torch.ones(2, 8, dtype=torch.int8), torch.ones(4, 8, dtype=torch.int8)
    spec = ops.LinearSpec(4, 8).to_ints()
    return {
        "quantize": {"x": torch.ones(2, 8), "scale": torch.ones(1)},
        "quantize_dynamic": {"x": torch.ones(2, 8)},
        "dequantize": {"q": codes, "scale": torch.ones(1)},
        "unpack_int4": {"packed": torch.ones(2, 4, dtype=torch.uint8), "k": 8},
        "gemm_s8s8": {"x": codes, "w": w, "w_scale": torch.ones(4)},
        "gemm": {"x": codes, "w": w, "w_scale": torch.ones(4)},
        "qlinear": {"x": torch.ones(2, 8), "packed": device.pack_linear(w, torch.ones(4), spec), "spec": spec},
        "float_linear": {"x": torch.ones(2, 8), "w": torch.ones(4, 8)},
        "weight_only_linear": {"x": torch.ones(2, 8), "w": w, "w_scale": torch.ones(4)},
    }


@pytest.mark.parametrize(("name", "argument", "wrong"), REFUSALS, ids=lambda v: v if isinstance(v, str) else "")
def test_refusals_name_the_argument(device: CudaOps, name: str, argument: str, wrong: dict[str, Any]) -> None:
    legal = _legal(device)[name]
    getattr(device, name)(**legal)
    with pytest.raises(ArgumentError) as caught:
        getattr(device, name)(**(legal | wrong))
    assert caught.value.argument == argument
    assert caught.value.got
    assert caught.value.allowed


# ---- planted bugs


def test_every_section_of_the_buffer_counts_and_its_padding_does_not(device: CudaOps) -> None:
    """A binding that read a wrong offset, or an operand not at all, would not notice these bytes."""
    draw = problems.Draw(problems.BASE_SEED, "planted")
    n, k, groups = 21, 48, 3
    spec = ops.LinearSpec(
        n, k, group_size=16, input="static", x_qmin=-128, x_symmetric=False, has_bias=True, codes_out=True
    )
    w, w_scale = problems.codes(draw, "s8", "uniform", n, k), problems.scales(draw, n, groups)
    operands = {
        "bias": draw.normal(n),
        "x_scale": torch.tensor([0.02]),
        "x_zero_point": torch.tensor([5], dtype=torch.int32),
        "out_scale": torch.tensor([0.9]),
        "out_zero_point": torch.tensor([3], dtype=torch.int32),
    }
    packed = device.pack_linear(w, w_scale, spec.to_ints(), **operands)
    x = draw.normal(9, k)
    honest = device.qlinear(x, packed, None, spec.to_ints())
    at = rows_layout.sections(spec)
    channel = 4 * groups  # bytes of one channel in w_scale and w_sum
    counted = {
        "first code": 0,
        "last code": (n - 1) * at.k_pad + k - 1,
        "w_scale": at.w_scale + channel * (n - 1) + 3,
        "w_sum": at.w_sum + channel * 2 + 1,
        "bias": at.bias + 4 * (n - 1) + 3,
        "x_scale": at.scalars + 3,
        "x_zero_point": at.scalars + 4,
        "out_scale": at.scalars + 11,
        "out_zero_point": at.scalars + 12,
    }
    padding = {
        "code of a row beyond n": n * at.k_pad,
        "w_scale beyond n": at.w_scale + channel * n + 3,
        "w_sum beyond n": at.w_sum + channel * n,
        "bias beyond n": at.bias + 4 * n + 3,
        "scalars": at.scalars + 16,
    }
    for what, offset in (counted | padding).items():
        wrong = packed.clone()
        wrong[offset] ^= 0x41
        changed = not torch.equal(device.qlinear(x, wrong, None, spec.to_ints()), honest)
        assert changed == (what in counted), what


def test_wrong_operands_are_told_apart(device: CudaOps) -> None:
    """The comparison of this file fails for results that are wrong in one place each."""
    draw = problems.Draw(problems.BASE_SEED, "planted operands")
    x, w = draw.codes(-128, 127, 6, 40).to(torch.int8), draw.codes(-127, 127, 24, 40).to(torch.int8)
    call: dict[str, Any] = {
        "w_scale": problems.scales(draw, 24) / 1000,
        "x_scale": problems.scales(draw, 6) * 30,
        "x_zero_point": draw.codes(-9, 9, 6),
        "bias": draw.normal(24),
        "residual": draw.normal(6, 24),
        "activation": "gelu",
    }
    want = ops.gemm_s8s8(x, w, **call)
    compare(device.gemm_s8s8(x, w, **call), want, "honest")
    bugs: dict[str, dict[str, Any]] = {
        "residual of a neighbouring row": {"residual": call["residual"].roll(1, 0)},
        "one scale for all tokens": {"x_scale": call["x_scale"][:1]},
        "one zero point for all tokens": {"x_zero_point": call["x_zero_point"][:1]},
        "no bias": {"bias": None},
        "the other gelu": {"activation": "gelu_tanh"},
        "one bit of a scale": {"w_scale": torch.nextafter(call["w_scale"], torch.zeros(()))},
    }
    for what, bug in bugs.items():
        got = device.gemm_s8s8(x, w, **(call | bug))
        with pytest.raises(accept.Rejected):
            compare(got, want, what)


# ---- memory that runs out


def test_memory_that_runs_out_keeps_its_name(device: CudaOps) -> None:
    """torch.OutOfMemoryError, and the next call is right: code that looks for a batch size that fits goes on."""
    w, few = torch.ones(4096, 16, dtype=torch.int8), torch.ones(3, 16, dtype=torch.int8)
    call = {"w": w, "w_scale": torch.ones(4096)}
    with pytest.raises(torch.OutOfMemoryError):
        device.gemm_s8s8(x=torch.ones(1, 16, dtype=torch.int8).expand(2**34, 16), **call)
    compare(device.gemm_s8s8(x=few, **call), ops.gemm_s8s8(few, **call), "after memory ran out")
