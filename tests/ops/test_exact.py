"""The ops on the CPU against int64 and against the executable specification, bit for bit (C01, C04)."""

from __future__ import annotations

import accept
import problems
import pytest
import torch

from pyquant import numerics, ops
from pyquant.errors import ArgumentError
from pyquant.ops import fallback

COUNT = 5000
STEP = 250


def accumulator(problem: problems.GemmProblem) -> torch.Tensor:
    """int64 truth, by a formula of its own: sum (x - zero_point) * w."""
    x = problem.call["x"].to(torch.int64)
    zero_point = problem.call.get("x_zero_point")
    if zero_point is not None:
        x = x - (zero_point.to(torch.int64).reshape(-1, 1) if zero_point.dim() else zero_point.to(torch.int64))
    return (x.double() @ problem.w_codes.double().T).to(torch.int64)  # every partial sum is an integer below 2^53


@pytest.mark.parametrize("start", range(0, COUNT, STEP))
def test_accumulators_equal_int64(start: int) -> None:
    for index in range(start, start + STEP):
        problem = problems.gemm_problem(index)
        got = getattr(ops, problem.op)(**problem.call)
        accept.t0(got, accumulator(problem).to(torch.int32), what=problem.repeat, waiver=problem.waiver)


@pytest.mark.parametrize("epilogue", ["float", "codes"])
@pytest.mark.parametrize("start", range(0, 1000, STEP))
def test_every_epilogue_equals_the_specification(epilogue: str, start: int) -> None:
    for index in range(start, start + STEP):
        problem = problems.gemm_problem(index, epilogue=epilogue)
        got = getattr(ops, problem.op)(**problem.call)
        want = getattr(numerics, problem.op)(**problem.call)
        rule = accept.t0 if epilogue == "codes" else accept.t1
        few = problem.shape.m * problem.shape.n < 64  # an activation may make a handful of outputs equal
        waiver = problem.waiver or ("codes may saturate" if epilogue == "codes" else "few outputs" if few else None)
        rule(got, want, what=problem.repeat, waiver=waiver)


@pytest.mark.parametrize(
    ("x_type", "w_type", "limit"), [("s8", "s8", 131071), ("u8", "s8", 65793), ("s8", "s4", 2097151)]
)
def test_worst_case_at_the_largest_k(x_type: str, w_type: str, limit: int) -> None:
    low, high = problems.CODE_RANGES[x_type]
    extreme = high if x_type == "u8" else low
    x = torch.full((2, limit), extreme, dtype=torch.uint8 if x_type == "u8" else torch.int8)
    w = torch.full((3, limit), problems.CODE_RANGES[w_type][0], dtype=torch.int8)
    op = ops.gemm_s8s8 if w_type == "s8" else ops.gemm_s8s4
    got = op(x, w if w_type == "s8" else ops.pack_int4(w), out_dtype=torch.int32)
    want = extreme * problems.CODE_RANGES[w_type][0] * limit
    assert abs(want) < 2**31
    accept.t0(got, torch.full((2, 3), want, dtype=torch.int32), waiver="constant by design")
    wider = torch.zeros(1, limit + 1, dtype=x.dtype)
    narrow = torch.zeros(1, limit + 1, dtype=torch.int8)
    weights = narrow if w_type == "s8" else ops.pack_int4(narrow)
    with pytest.raises(ArgumentError, match=f"K <= {limit}"):
        op(wider, weights, out_dtype=torch.int32)


def random_layer(index: int) -> tuple[torch.Tensor, dict[str, object], ops.LinearSpec, torch.Tensor, dict[str, object]]:
    """A fused layer of random shape, scheme and epilogue: x, operands, spec, codes, numerics arguments."""
    draw = problems.Draw(problems.BASE_SEED, "layer", index)
    s = problems.shape(index)
    bits = draw.choice((8, 4))
    group = problems._group_size(draw, s.k) if draw.chance(0.4) else 0
    is_static = draw.chance(0.4)
    x_range = draw.choice(((-127, 127, True), (-128, 127, False), (-7, 7, True), (-8, 7, False)))
    codes_out = draw.chance(0.25)
    activation = draw.choice(problems.ACTIVATIONS)
    spec = ops.LinearSpec(
        s.n,
        s.k,
        bits,
        group,
        "static" if is_static else "dynamic",
        x_range[0],
        x_range[1],
        x_range[2],
        activation,
        -1.5 if activation == "clamp" else 0.0,
        2.25 if activation == "clamp" else 0.0,
        draw.chance(0.6),
        codes_out,
        -127,
        127,
        ops.layout_for(torch.device("cpu")),
    )
    codes = problems.codes(draw, "s4" if bits == 4 else "s8", "uniform", s.n, s.k)
    w_scale = problems.scales(draw, s.n, s.k // group) if group else problems.scales(draw, s.n)
    operands = {
        "bias": draw.normal(s.n) if spec.has_bias else None,
        "x_scale": problems.scales(draw, 1) if is_static else None,
        "x_zero_point": draw.codes(x_range[0], x_range[1], 1) if is_static and not x_range[2] else None,
        "out_scale": problems.scales(draw, 1) * 64 if codes_out else None,
        "out_zero_point": draw.codes(-5, 5, 1) if codes_out and draw.chance(0.5) else None,
    }
    x = (draw.normal(s.m, s.k) * 3).to(draw.choice(problems.FLOATS))
    reference = dict(
        operands,
        x_qmin=x_range[0],
        x_qmax=x_range[1],
        x_symmetric=x_range[2],
        group_size=group,
        activation=activation,
        clamp_min=spec.clamp_min,
        clamp_max=spec.clamp_max,
        residual=draw.normal(s.m, s.n).to(draw.choice(problems.FLOATS)) if draw.chance(0.3) else None,
    )
    return x, dict(operands, w_scale=w_scale), spec, codes, reference


@pytest.mark.parametrize("start", range(0, 600, 100))
def test_fused_layers_equal_the_specification(start: int) -> None:
    for index in range(start, start + 100):
        x, operands, spec, codes, reference = random_layer(index)
        w = ops.pack_int4(codes) if spec.w_bits == 4 else codes
        w_scale = operands.pop("w_scale")
        packed = ops.pack_linear(w, w_scale, spec.to_ints(), **operands)
        assert torch.equal(ops.unpack_linear(packed, spec.to_ints()), w)
        got = ops.qlinear(x, packed, reference["residual"], spec.to_ints())
        want = numerics.qlinear_reference(x, codes, w_scale, **reference)
        what = f"random_layer({index}) seed {problems.BASE_SEED}: x {list(x.shape)} {x.dtype}, {spec}"
        if spec.codes_out:
            accept.t0(got, want, what=what, waiver="codes may saturate")
        else:
            accept.t1(got, want, what=what, waiver="activations may be constant")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_layers_take_codes_of_their_own_input(dtype: torch.dtype) -> None:
    """uint8 codes and the zero point that goes with them are the int8 ones + 128: the same numbers, the same result."""
    taken = 0
    for index in range(120):
        x, operands, spec, codes, reference = random_layer(index)
        if spec.input != "static":
            continue
        taken += 1
        w_scale = operands.pop("w_scale")
        w = ops.pack_int4(codes) if spec.w_bits == 4 else codes
        packed = ops.pack_linear(w, w_scale, spec.to_ints(), **operands)
        q = ops.quantize(x, operands["x_scale"], operands["x_zero_point"], qmin=spec.x_qmin, qmax=spec.x_qmax)
        q = q if dtype == torch.int8 else (q.to(torch.int16) + 128).to(torch.uint8)
        if dtype == torch.uint8:
            zero_point = operands["x_zero_point"]
            reference["x_zero_point"] = torch.full((1,), 128, dtype=torch.int32) + (
                0 if zero_point is None else zero_point
            )
            shifted = operands | {"x_zero_point": reference["x_zero_point"]}
            own = ops.pack_linear(w, w_scale, spec.to_ints(), **shifted)
        else:
            own = packed
        got = ops.qlinear(q, own, reference["residual"], spec.to_ints(), None if spec.codes_out else x.dtype)
        want = ops.qlinear(x, packed, reference["residual"], spec.to_ints())
        what = f"random_layer({index}) as {dtype}: {spec}"
        if spec.codes_out:
            accept.t0(got, want, what=what, waiver="codes may saturate")
        else:
            accept.t1(got, want, what=what, waiver="activations may be constant")
        accept.t1(
            ops.qlinear(q, own, None, spec.to_ints()).float(),
            numerics.qlinear_reference(q, codes, w_scale, **(reference | {"residual": None})).float(),
            what=what,
            waiver="activations may be constant",
        )
    assert taken >= 30


def test_layers_with_dynamic_inputs_take_codes_with_a_scale_a_row() -> None:
    """The codes that the layer would make itself give what it gives; any others what the specification says."""
    taken = 0
    for index in range(200):
        x, operands, spec, codes, reference = random_layer(index)
        if spec.input != "dynamic":
            continue
        taken += 1
        draw = problems.Draw(problems.BASE_SEED, "codes of rows", index)
        w_scale = operands.pop("w_scale")
        packed = ops.pack_linear(
            ops.pack_int4(codes) if spec.w_bits == 4 else codes, w_scale, spec.to_ints(), **operands
        )
        residual, what = reference["residual"], f"random_layer({index}): x {list(x.shape)}, {spec}"
        own = ops.quantize_dynamic(x, "per_token", 0, spec.x_symmetric, spec.x_qmin, spec.x_qmax)
        own_zero = None if spec.x_symmetric else own[2]
        out_dtype = torch.int8 if spec.codes_out else x.dtype
        got = ops.qlinear(own[0], packed, residual, spec.to_ints(), out_dtype, own[1], own_zero)
        assert torch.equal(got, ops.qlinear(x, packed, residual, spec.to_ints())), what
        m = x.shape[0]
        given = draw.codes(spec.x_qmin, spec.x_qmax, m, spec.k).to(torch.int8)
        scale = problems.scales(draw, m)
        zero = None if spec.x_symmetric else draw.codes(spec.x_qmin, spec.x_qmax, m)
        wide = torch.stack([scale, scale * 2], 1)[:, 0]  # strided
        got = ops.qlinear(given, packed, residual, spec.to_ints(), None, wide, zero)
        reference |= {"x_scale": scale, "x_zero_point": zero, "x_per_token": True}
        want = numerics.qlinear_reference(given, codes, w_scale, **reference)
        assert torch.equal(got, want), what
        assert torch.equal(
            fallback.qlinear(given, *on_fallback(codes, w_scale, spec, operands), scale, zero),
            want
            if residual is None
            else numerics.qlinear_reference(given, codes, w_scale, **(reference | {"residual": None})),
        ), what
        if m:
            one = ops.qlinear(
                given[0],
                packed,
                None if residual is None else residual[0],
                spec.to_ints(),
                None,
                scale[0],
                None if zero is None else zero[0],
            )
            assert torch.equal(one, want[0]), what
    assert taken >= 60


def test_sums_of_unsigned_codes_finish_as_the_whole() -> None:
    """Their zero point is in their own terms, beyond the range of signed ones, and is in the sums already."""
    layout = ops.layout_for(torch.device("cpu"))
    words = ops.LinearSpec(5, 12, input="static", x_symmetric=False, layout=layout).to_ints()
    draw = problems.Draw(problems.BASE_SEED, "unsigned sums", 0)
    w, x = (torch.tensor([[draw.integer(0, 100) for _ in range(12)] for _ in range(n)]) for n in (5, 3))
    zero = torch.tensor([200], dtype=torch.int32)
    packed = ops.pack_linear((w - 50).to(torch.int8), torch.rand(5) + 0.1, words, None, torch.tensor([0.25]), zero)
    codes = (x + 150).to(torch.uint8)
    sums = ops.qlinear(codes, packed, None, words, torch.int32)
    assert torch.equal(sums, ((x + 150 - 200) @ (w - 50).t()).to(torch.int32))
    want = ops.qlinear(codes, packed, None, words, torch.float32)
    assert torch.equal(ops.qlinear(sums, packed, None, words, torch.float32), want)


def test_sums_of_parts_of_k_finish_as_the_whole() -> None:
    """What ranks that share the columns of a weight do: accumulators of each part, their sum, the epilogue once."""
    taken = 0
    for index in range(120):
        x, operands, spec, codes, reference = random_layer(index)
        if spec.group_size:
            continue
        taken += 1
        w_scale = operands.pop("w_scale")
        whole = ops.pack_linear(packed_as(codes, spec), w_scale, spec.to_ints(), **operands)
        residual, what = reference["residual"], f"random_layer({index}): x {list(x.shape)}, {spec}"
        out_dtype = torch.int8 if spec.codes_out else x.dtype
        if spec.input == "static":
            q, scale, zero = (
                ops.quantize(x, operands["x_scale"], operands["x_zero_point"], qmin=spec.x_qmin, qmax=spec.x_qmax),
                None,
                None,
            )
        else:
            q, scale, zero = ops.quantize_dynamic(x, "per_token", 0, spec.x_symmetric, spec.x_qmin, spec.x_qmax)
            zero = None if spec.x_symmetric else zero
        at = problems.Draw(problems.BASE_SEED, "parts", index).integer(0, spec.k // 2) * 2
        total = torch.zeros(*x.shape[:-1], spec.n, dtype=torch.int32)
        for part in (slice(0, at), slice(at, spec.k)):
            own, words = codes[:, part], ops.LinearSpec(**(vars(spec) | {"k": codes[:, part].shape[1]})).to_ints()
            packed = ops.pack_linear(packed_as(own, spec), w_scale, words, **operands)
            sums = ops.qlinear(q[:, part], packed, None, words, torch.int32, scale, zero)
            want = numerics.accumulate(q[:, part], own, operands["x_zero_point"] if scale is None else zero)
            assert torch.equal(sums, want), what
            if spec.input == "static":
                assert torch.equal(ops.qlinear(x[:, part], packed, None, words, torch.int32), sums), what
            total += sums
        got = ops.qlinear(total, packed, residual, words, out_dtype, scale)
        assert torch.equal(got.nan_to_num(), ops.qlinear(x, whole, residual, spec.to_ints()).nan_to_num()), what
        assert got.dtype == ops.qlinear(x, whole, residual, spec.to_ints()).dtype
        wide = torch.stack([total, total], -1)[..., 0]  # strided
        assert torch.equal(
            ops.qlinear(wide, whole, residual, spec.to_ints(), out_dtype, scale).nan_to_num(), got.nan_to_num()
        )
        rows = on_fallback(codes, w_scale, spec, operands)
        assert torch.equal(fallback.qlinear(q, *rows[:3], torch.int32, scale, zero), total), what
        alone = fallback.qlinear(total, rows[0], residual, rows[2], out_dtype, scale)
        assert torch.equal(alone.nan_to_num(), got.nan_to_num()), what
    assert taken >= 40


def packed_as(codes: torch.Tensor, spec: ops.LinearSpec) -> torch.Tensor:
    return ops.pack_int4(codes) if spec.w_bits == 4 else codes


def on_fallback(codes: torch.Tensor, w_scale: torch.Tensor, spec: ops.LinearSpec, operands: dict) -> tuple:
    """(packed, residual, spec, out_dtype) of the same layer for the Python implementation."""
    words = ops.LinearSpec(**(vars(spec) | {"layout": "rows"})).to_ints()
    w = numerics.pack_int4(codes) if spec.w_bits == 4 else codes
    names = ("bias", "x_scale", "x_zero_point", "out_scale", "out_zero_point")
    return fallback.pack_linear(w, w_scale, *(operands[name] for name in names), words), None, words, None


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["per_tensor", "per_token", "per_channel", "per_group"])
@pytest.mark.parametrize("dtype", problems.FLOATS)
def test_quantisers_equal_the_specification_on_the_catalogue(
    dtype: torch.dtype, granularity: str, symmetric: bool
) -> None:
    qmin, qmax = (-127, 127) if symmetric else (-128, 127)
    group = problems.GROUP if granularity == "per_group" else 0
    for values in problems.VALUES:
        for rows, cols in ((5, 48), (1, 16), (33, 80)):
            x = values.tensor(rows, cols, dtype)
            what = f"{values.name} [{rows}, {cols}] {dtype}"
            got = ops.quantize_dynamic(x, granularity, group, symmetric, qmin, qmax)
            want = numerics.quantize_dynamic(x, granularity, group, symmetric, qmin, qmax)
            for g, w, name in zip(got, want, ("codes", "scale", "zero_point"), strict=True):
                rule = accept.t1 if w.is_floating_point() else accept.t0
                rule(g, w, what=f"{what} {name}", waiver="catalogue of extremes")
            scale = torch.where(want[1].isnan(), torch.ones(()), want[1])
            static = ops.quantize(x, scale, want[2], granularity, group, qmin, qmax)
            accept.t0(
                static,
                numerics.quantize(x, scale, want[2], granularity, group, qmin, qmax),
                what=what,
                waiver="extremes",
            )
            for out in problems.FLOATS:
                real = ops.dequantize(static, scale, want[2], granularity, group, out)
                accept.t1(
                    real,
                    numerics.dequantize(static, scale, want[2], granularity, group, out),
                    what=what,
                    waiver="extremes",
                )
            if x.isfinite().all():
                assert got[1].isfinite().all(), what
                assert (got[1] > 0).all(), what
