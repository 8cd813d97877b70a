"""The harness around one linear problem: every candidate is checked before it is timed, and none disappears."""

from __future__ import annotations

import pytest
import torch

from pyquant.bench import gemm
from pyquant.bench.gemm import GemmBench, run_gemm_bench
from pyquant.bench.peers import FBGEMM, FP32, INT_MM_CODES, PEERS, Peer, PeerUnavailable
from pyquant.bench.problem import Inputs, Weights, inputs_of
from pyquant.core.presets import scheme_from_name
from pyquant.errors import ArgumentError
from pyquant.measure.exact import check_rows, is_exact
from pyquant.measure.floors import Limit, measure_ceilings
from pyquant.measure.timing import Timings

CPU = torch.device("cpu")
QUICK = {"rounds": 1, "shapes": [(3, 64, 40)]}


def test_rows_of_every_candidate() -> None:
    seen = []
    ceilings = measure_ceilings("cpu", size=64, rounds=1)
    bench = GemmBench(schemes=["W8A8Dynamic", "W4A8Dynamic(group_size=32)", "W8A8", "W8A16"], **QUICK)
    report = run_gemm_bench(bench, ceilings=ceilings, on_shape=seen.append)
    assert seen == [(3, 64, 40)]
    rows = {row.candidate: row for row in report.rows}
    assert set(rows) | {u.candidate for u in report.unavailable} == {p.name for p in PEERS} | {
        f"QLinear {s}" for s in bench.schemes
    }
    assert rows[FP32].ratio == 1.0
    assert (rows[FP32].sqnr_db or 0) > 100
    for scheme, exact in (("W8A8Dynamic", True), ("W4A8Dynamic(group_size=32)", True), ("W8A8", True), ("W8A16", None)):
        row = rows[f"QLinear {scheme}"]
        assert row.exact is exact
        assert row.ours
        assert row.kernel
        assert row.of_floor
    assert rows[INT_MM_CODES].sqnr_db is None  # it returns int32 of codes, not the product


def test_without_ceilings_there_is_no_floor() -> None:
    report = run_gemm_bench(GemmBench(schemes=[], peers=[], **QUICK))
    assert [row.floor_us for row in report.rows] == [None]


def test_the_limits_are_of_the_same_rounds_as_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slows down by four between the ceilings and the shape moves the floor with it."""
    asked: list[list[str]] = []

    def timed(candidates, **kwargs):
        asked.append(list(candidates))
        slow = {FP32: 8e-6, "QLinear W8A8Dynamic": 4e-6}
        return Timings("cpu", {name: [slow.get(name, 1e-6)] * 5 for name in candidates})

    ceilings = measure_ceilings("cpu", size=64, rounds=1)
    multiply = Limit(lambda: None, 3 * 64 * 40)
    monkeypatch.setattr(gemm, "multiply_limit", lambda clock: multiply)
    monkeypatch.setattr(gemm, "time_interleaved", timed)
    monkeypatch.setattr(gemm, "read_limit", lambda size, cold: Limit(lambda: None, 2 * size))
    report = run_gemm_bench(GemmBench(schemes=["W8A8Dynamic"], peers=[], **QUICK), ceilings=ceilings)
    row = next(row for row in report.rows if row.ours)
    assert len(asked) == 1
    assert {name.split(":")[0] for name in asked[0]} == {FP32, row.candidate, "limit"}
    assert (row.floor_us, row.floor_kind, row.of_floor) == pytest.approx((1.0, "ops", 0.25))
    multiply = Limit(
        lambda: None, 1 << 40
    )  # nothing binds but the bytes, of which a call of the stream reads twice as many
    report = run_gemm_bench(GemmBench(schemes=["W8A8Dynamic"], peers=[], **QUICK), ceilings=ceilings)
    row = next(row for row in report.rows if row.ours)
    assert (row.floor_us, row.floor_kind) == pytest.approx((0.5, "bytes"))


def test_unavailable_group_size_is_reported_not_dropped() -> None:
    report = run_gemm_bench(GemmBench(schemes=["W4A8Dynamic(group_size=48)"], peers=[], **QUICK))
    assert [u.candidate for u in report.unavailable] == ["QLinear W4A8Dynamic(group_size=48)"]
    assert "48" in report.unavailable[0].reason
    assert report.unavailable[0].where == "M=3 K=64 N=40"


def test_a_peer_that_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Peer("wrong", lambda case: lambda: torch.randn(case.m, case.weights.n), 32, 32, "fp32")
    shape = Peer("shape", lambda case: lambda: torch.zeros(1), 32, 32, "fp32")
    monkeypatch.setattr(gemm, "PEERS", (*PEERS[:1], wrong, shape))
    report = run_gemm_bench(GemmBench(schemes=[], **QUICK))
    assert [row.candidate for row in report.rows] == [FP32]
    reasons = {u.candidate: u.reason for u in report.unavailable}
    assert "wrong product" in reasons["wrong"]
    assert "shape" in reasons["shape"]


def test_a_baseline_that_fails_leaves_no_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(case: Inputs):
        raise PeerUnavailable("not today")

    monkeypatch.setattr(gemm, "PEERS", (Peer(FP32, build, 32, 32, "fp32"),))
    report = run_gemm_bench(GemmBench(schemes=[], **QUICK))
    assert report.rows == []
    assert {u.reason for u in report.unavailable} >= {"not today"}


@pytest.mark.parametrize(
    ("bench", "names"),
    [
        (GemmBench(schemes=["W3A3"], **QUICK), "W3A3"),
        (GemmBench(peers=["cuBLAS"], **QUICK), "cuBLAS"),
        (GemmBench(clock="sundial", **QUICK), "sundial"),
    ],
)
def test_wrong_names_are_refused_before_anything_runs(bench: GemmBench, names: str) -> None:
    with pytest.raises(ArgumentError, match=names):
        run_gemm_bench(bench, on_shape=lambda shape: pytest.fail("something was timed"))


def test_exactness_check_can_fail() -> None:
    layer, x = inputs_of(5, 64, 24).qlinear(scheme_from_name("W8A8Dynamic"), torch.float32)
    assert is_exact(layer, x)
    true_reference = layer.reference

    def off_by_one_ulp(rows: torch.Tensor) -> torch.Tensor:
        y = true_reference(rows).clone()
        y[-1, -1] = torch.nextafter(y[-1, -1], torch.tensor(float("inf")))
        return y

    layer.reference = off_by_one_ulp  # type: ignore[method-assign]
    assert not is_exact(layer, x)


def test_checked_rows_hold_first_and_last() -> None:
    for m, most in [*((m, 8) for m in (1, 2, 8, 9, 100, 513)), *((m, 1024) for m in (1, 2, 1024, 1025, 5000))]:
        rows = check_rows(m, most).tolist()
        assert len(rows) == min(m, most)
        assert rows == sorted(set(rows))
        assert (rows[0], rows[-1]) == (0, m - 1)
    assert check_rows(0).tolist() == []


def test_sqnr_of_known_noise() -> None:
    case = inputs_of(4, 32, 16)
    exact = (case.x.double() @ case.weights.w.double().t() + case.weights.bias.double()).float()
    assert case.sqnr_db(exact, with_bias=True) > 120
    assert case.sqnr_db(exact * 1.1, with_bias=True) == pytest.approx(20.0, abs=0.01)


def test_cases_are_deterministic_and_differ_by_seed() -> None:
    assert torch.equal(Weights(8, 4, CPU).w, Weights(8, 4, CPU).w)
    assert not torch.equal(Weights(8, 4, CPU).w, Weights(8, 4, CPU, seed=1).w)


def test_fbgemm_leaves_the_engine_as_it_was() -> None:
    before = torch.backends.quantized.engine
    peer = next(p for p in PEERS if p.name == FBGEMM)
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        with pytest.raises(PeerUnavailable):
            peer.build(inputs_of(2, 8, 4))
        return
    assert peer.build(inputs_of(2, 8, 4))().shape == (2, 4)
    assert torch.backends.quantized.engine == before
