"""The integer product and its epilogue against int64 and stepwise-rounded float64 (docs/numerics.md 3 to 5)."""

from __future__ import annotations

import accept
import brute
import laws
import problems
import pytest
import torch

from pyquant import numerics


def blocks(every_change: int, nightly: int) -> list[object]:
    """Blocks of problems: the first ones for every change, others nightly."""
    more = range(every_change, every_change + nightly)
    return [*range(every_change), *(pytest.param(block, marks=pytest.mark.nightly) for block in more)]


@pytest.mark.parametrize("block", blocks(4, nightly=6))
def test_accumulator_equals_int64(block):
    """2 000 boundary-biased problems, 5 000 nightly."""
    judged = 0
    for index in range(block * 500, (block + 1) * 500):
        problem = problems.gemm_problem(index)
        laws.gemm(numerics, problem)
        judged += problem.waiver is None
    assert judged >= 150


@pytest.mark.parametrize("epilogue", ["float", "codes", "exact"])
@pytest.mark.parametrize("block", blocks(2, nightly=3))
def test_epilogue_equals_stepwise_float64(epilogue, block):
    judged = 0
    for index in range(block * 140, (block + 1) * 140):
        problem = problems.gemm_problem(index, epilogue=epilogue)
        laws.gemm(numerics, problem)
        judged += problem.waiver is None
    assert judged >= 14


@pytest.mark.parametrize("epilogue", ["accumulator", "float", "codes"])
def test_row_alone_is_row_in_batch(epilogue):
    for index in range(60):
        laws.row_alone(numerics, problems.gemm_problem(index, epilogue=epilogue))


def test_exact_mode_equals_float64_without_rounding():
    """Powers of two: the result has one value in any arithmetic, so the reference rounds nothing."""
    for index in range(80):
        p = problems.gemm_problem(index, epilogue="exact")
        acc = brute.accumulate(p.call["x"], p.w_codes, p.call.get("x_zero_point"))
        want = torch.from_numpy(acc * brute.wide(p.call["w_scale"]) * 0.5).to(torch.float32)
        small = torch.from_numpy(abs(acc) < 2**24)
        got = getattr(numerics, p.op)(**p.call)
        accept.t1(got[small], want[small], what=p.repeat, waiver=p.waiver or "a subset")


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_leading_dimensions_are_rows(lead):
    draw = problems.Draw(problems.BASE_SEED, "lead", lead)
    x, w = draw.codes(-128, 127, *lead, 24).to(torch.int8), draw.codes(-128, 127, 7, 24).to(torch.int8)
    call = {
        "w_scale": problems.scales(draw, 7),
        "x_zero_point": draw.codes(-9, 9, *lead),
        "residual": draw.normal(*lead, 7),
        "x_scale": problems.scales(draw, *lead),
    }
    got = numerics.gemm(x, w, **call)
    assert got.shape == (*lead, 7)
    if lead and x.numel():
        flat = {
            **call,
            "x_zero_point": call["x_zero_point"].reshape(-1),
            "x_scale": call["x_scale"].reshape(-1),
            "residual": call["residual"].reshape(-1, 7),
        }
        accept.t1(got.reshape(-1, 7), brute.gemm(x.reshape(-1, 24), w, flat), waiver="small")


def test_scalar_and_per_token_scale_of_one_row_differ_as_documented():
    draw = problems.Draw(1, "one row")
    x, w = draw.codes(-127, 127, 1, 64).to(torch.int8), draw.codes(-127, 127, 4096, 64).to(torch.int8)
    w_scale, scale = problems.scales(draw, 4096), problems.scales(draw, 1)
    for given, per_token in ((scale, True), (scale.reshape(()), False)):
        want = brute.gemm(x, w, {"w_scale": w_scale, "x_scale": given})
        accept.t1(numerics.gemm(x, w, w_scale, given), want)
        assert numerics.is_per_token(given, x) == per_token
    batch = numerics.gemm(x.repeat(5, 1), w, w_scale, scale.reshape(()))
    accept.t1(batch[:1], numerics.gemm(x, w, w_scale, scale.reshape(())))
    assert not torch.equal(batch[:1], numerics.gemm(x, w, w_scale, scale)), "the data cannot tell the two orders apart"


def test_negative_zero_survives_an_absent_bias_and_not_a_present_one():
    x, w = torch.zeros(1, 1, dtype=torch.int8), torch.ones(20, 1, dtype=torch.int8)
    minus = torch.full((20,), -1.0)
    assert numerics.gemm(x, w, minus).signbit().all()
    assert not numerics.gemm(x, w, minus, bias=torch.zeros(20)).signbit().any()
    assert numerics.gemm(x, w, minus, activation="relu").signbit().all()


def test_a_nan_scale_gives_a_nan_row_only():
    draw = problems.Draw(1, "nan row")
    x, w = draw.codes(-127, 127, 4, 9).to(torch.int8), draw.codes(-127, 127, 6, 9).to(torch.int8)
    scale = torch.tensor([1.0, float("nan"), 1.0, 1.0])
    for activation in problems.ACTIVATIONS:
        got = numerics.gemm(x, w, torch.ones(6), scale, activation=activation, clamp_max=1.0)
        assert got[1].isnan().all(), activation
        assert got[[0, 2, 3]].isfinite().all(), activation


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_store_rounds_half_to_even_and_overflows_to_infinity(dtype):
    info = torch.finfo(dtype)
    one = torch.tensor([1.0], dtype=torch.float64)
    ties = torch.cat([one + info.eps / 2, one + 1.5 * info.eps, -one - info.eps / 2])
    if dtype != torch.float32:
        got = numerics.store(ties.to(torch.float32), dtype).double()
        accept.t0((got == torch.tensor([1.0, 1 + 2 * info.eps, -1.0], dtype=torch.float64)).all().item(), True)
    big = torch.tensor([info.max, -info.max, float("inf"), 3.4e38])
    want = brute.back(brute.wide(big), dtype)
    accept.t1(numerics.store(big, dtype), want)


def test_large_sums_are_exact():
    for seed in range(3):
        laws.large_sums(numerics, problems.BASE_SEED + seed)


def test_autocast_does_not_reach_the_integers():
    problem = problems.gemm_problem(3, epilogue="float", pair=("s8", "s8"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        laws.gemm(numerics, problem)


@pytest.mark.parametrize("layout", problems.layouts(for_codes=True), ids=lambda x: x.name)
def test_layout_does_not_matter(layout):
    draw = problems.Draw(problems.BASE_SEED, "gemm layout")
    codes = draw.codes(-128, 127, 6, 12).to(torch.int8)
    x = layout.build(codes)
    w = draw.codes(-128, 127, 5, x.shape[-1]).to(torch.int8)
    plain = x.as_subclass(torch.Tensor).clone(memory_format=torch.contiguous_format)
    got = numerics.gemm(x, w, torch.ones(5)).as_subclass(torch.Tensor)
    accept.t1(got, numerics.gemm(plain, w, torch.ones(5)), waiver="layouts")
    laid = layout.build(w)
    if laid.shape == w.shape:
        got = numerics.gemm(plain, laid).as_subclass(torch.Tensor)
        accept.t1(got, numerics.gemm(plain, laid.as_subclass(torch.Tensor).contiguous()), waiver="layouts")
