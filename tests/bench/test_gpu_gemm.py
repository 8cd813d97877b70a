"""The engine of the GPU benchmark, run on a CPU with small layers: what is checked, skipped, kept and told."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from pyquant.bench import gpu_gemm
from pyquant.bench.gpu_gemm import DeviceLost, GpuBench, run_gpu_bench, slice_of
from pyquant.bench.kernels import ADAPTERS, find_adapters
from pyquant.bench.kernels.adapter import Adapter, Built, Run
from pyquant.bench.kernels.layers import CHAIN_APART, CHAIN_CODES, LAYERS, layer_name
from pyquant.bench.kernels.torch_own import MM_BF16
from pyquant.bench.partial import Partial
from pyquant.bench.peers import PeerUnavailable
from pyquant.bench.problem import Inputs, Weights
from pyquant.errors import ArgumentError
from pyquant.measure.environment import describe_environment
from pyquant.measure.gpu_timing import copies_of
from pyquant.report.records.bench import Ceiling, GemmRow

ENVIRONMENT = describe_environment("cpu")
ON_CPU = [
    MM_BF16,
    "nn.Linear bf16",
    layer_name("W8A8Dynamic"),
    layer_name("W8A8"),
    layer_name("W4A16(group_size=128)"),
    layer_name("FP16(dtype=bfloat16)"),
    "QLinear W8A8 (codes in)",
    "QLinear W4A8(group_size=128) (codes in)",
    CHAIN_CODES,
    CHAIN_APART,
]
CEILINGS = [Ceiling("copy", 10.0, "GB/s"), Ceiling("bf16", 100.0, "Gop/s"), Ceiling("int8", 200.0, "Gop/s")]


class UnitClock:
    """Every call takes a microsecond."""

    name = "unit"

    def seconds(self, candidate, calls: int) -> float:
        for _ in range(calls):
            candidate()
        return calls * 1e-6


def bench(shapes, adapters=None, **more) -> GpuBench:
    adapters = find_adapters(ON_CPU) if adapters is None else adapters
    return GpuBench(
        shapes, adapters, device="cpu", clock="cpu", rounds=1, min_sample_s=0.0, rotate_bytes=100_000, **more
    )


def memory() -> Partial:
    return Partial({}, ENVIRONMENT)


def rows_of(record: Partial) -> dict[tuple[int, str], GemmRow]:
    return {(row.m, row.candidate): row for cell in record.cells.values() for row in cell.rows}


def faulty(name: str, run: Run | None, **more) -> Adapter:
    def build(weights: Weights) -> Built:
        if run is None:
            raise PeerUnavailable("not installed")
        return Built(weights.w.clone(), lambda inputs: lambda w: run(inputs.bf16 @ w.bfloat16().t()), **more)

    return Adapter(name, build, 16, 16, "bf16", has_bias=False, min_sqnr=30)


def test_every_layer_is_checked_timed_and_given_its_floor() -> None:
    record, seen = memory(), []
    shapes = [(1, 256, 64), (5, 256, 64), (40, 256, 64)]
    assert run_gpu_bench(bench(shapes), record, ceilings=CEILINGS, clock=UnitClock, on_shape=seen.append)
    assert seen == shapes
    rows = rows_of(record)
    assert {name for m, name in rows if m == 5} == set(ON_CPU)
    for (m, name), row in rows.items():
        assert row.exact is (True if "A8" in name else None), name
        assert row.median_us == pytest.approx(1.0)
        chain = name in (CHAIN_CODES, CHAIN_APART)
        assert row.ops == 2.0 * m * 256 * 64 * (2 if chain else 1)
        assert row.floor_us == pytest.approx(
            max(row.moved_bytes / 10e3, row.ops / (200e3 if row.peak == "int8" else 100e3))
        )
        assert row.ratio == pytest.approx(2.0 if chain else 1.0)
    assert rows[5, layer_name("W8A8Dynamic")].moved_bytes == 64 * 256 + 64 * 4 + 5 * 256 * 2 + 5 * 64 * 2
    assert "cpu" in rows[5, layer_name("W8A8Dynamic")].kernel


OURS = [adapter for adapter in LAYERS if adapter.name in ON_CPU]


@pytest.mark.parametrize("adapter", OURS, ids=lambda adapter: adapter.name)
def test_our_candidates_never_wait_for_the_device(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a value on the host would end a graph's capture; copies of a layer must not do it either."""
    weights = Weights(256, 64, torch.device("cpu"))
    built = adapter.build(weights)
    run, state = built.bind(Inputs(weights, 5)), copies_of(built.state, 2)[1]

    def refuse(*words: object) -> None:
        raise AssertionError("a value was read on the host")

    with monkeypatch.context() as patch, torch.inference_mode():
        for name in ("tolist", "item", "__bool__", "__int__", "__float__", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, refuse)
        y = run(state)
    assert y.dtype == torch.bfloat16


def test_what_computes_something_else_is_not_timed() -> None:
    adapters = [
        *find_adapters([MM_BF16]),
        faulty("wrong", lambda y: y * 1.1),
        faulty("unwritten", lambda y: y.index_fill(0, torch.tensor([1]), torch.nan)),
        faulty("shape", lambda y: y[:1]),
        faulty("absent", None),
        faulty("raises", lambda y: y.no_such_method()),
        faulty("honest", lambda y: y),
    ]
    record = memory()
    run_gpu_bench(bench([(3, 64, 32)], adapters), record, clock=UnitClock)
    cell = record.cells[3, 64, 32]
    assert {row.candidate for row in cell.rows} == {MM_BF16, "honest"}
    reasons = {u.candidate: u.reason for u in cell.unavailable}
    assert "wrong product" in reasons["wrong"]
    assert "wrong product" in reasons["unwritten"]
    assert "shape [1, 32]" in reasons["shape"]
    assert reasons["absent"] == "not installed"
    assert "AttributeError" in reasons["raises"]
    assert all(u.where == "M=3 K=64 N=32" for u in cell.unavailable)


def test_a_wrong_bit_is_told_and_not_hidden() -> None:
    def reference(inputs: Inputs, rows: torch.Tensor) -> torch.Tensor:
        y = (inputs.bf16 @ inputs.weights.w.bfloat16().t())[rows]
        y[-1, -1] = torch.nextafter(y[-1, -1], torch.tensor(torch.inf, dtype=y.dtype))
        return y

    record = memory()
    adapters = [*find_adapters([MM_BF16]), faulty("one ulp", lambda y: y, reference=reference)]
    run_gpu_bench(bench([(3, 64, 32)], adapters), record, clock=UnitClock)
    assert rows_of(record)[3, "one ulp"].exact is False


def test_weights_that_cannot_be_copied_are_refused() -> None:
    hidden = Adapter("hidden", lambda weights: Built("no tensor", lambda inputs: lambda s: inputs.bf16), 16, 16, "bf16")
    record = memory()
    run_gpu_bench(bench([(3, 64, 32)], [*find_adapters([MM_BF16]), hidden]), record, clock=UnitClock)
    assert "cache" in record.cells[3, 64, 32].unavailable[0].reason


def test_copies_are_what_is_called() -> None:
    used: set[int] = set()

    def build(weights: Weights) -> Built:
        def run(w: torch.Tensor, inputs: Inputs) -> torch.Tensor:
            used.add(w.data_ptr())
            return inputs.bf16 @ w.t()

        return Built(weights.w.bfloat16(), lambda inputs: lambda w: run(w, inputs))

    adapter = Adapter("spy", build, 16, 16, "bf16", has_bias=False)
    run_gpu_bench(bench([(3, 64, 32)], [*find_adapters([MM_BF16]), adapter]), memory(), clock=UnitClock)
    assert len(used) == -(-100_000 // (64 * 32 * 2))


def test_without_its_baseline_a_shape_has_no_rows() -> None:
    adapters = [faulty(MM_BF16, lambda y: y * 2), faulty("honest", lambda y: y)]
    record = memory()
    run_gpu_bench(bench([(3, 64, 32)], adapters), record, clock=UnitClock)
    assert record.cells[3, 64, 32].rows == []
    assert any("no ratios" in u.reason for u in record.cells[3, 64, 32].unavailable)
    with pytest.raises(ArgumentError, match="baseline"):
        GpuBench([(1, 8, 8)], adapters[1:])
    with pytest.raises(ArgumentError, match="sundial"):
        GpuBench([(1, 8, 8)], clock="sundial")


def test_a_deadline_stops_between_shapes_and_a_second_run_goes_on(tmp_path: Path) -> None:
    shapes = [(m, k, 32) for k in (64, 32) for m in (1, 2, 3)]
    adapters = find_adapters([MM_BF16])
    path, seen = tmp_path / "p.jsonl", []
    record = Partial({}, ENVIRONMENT, path)
    assert not run_gpu_bench(bench(shapes, adapters), record, deadline=time.monotonic(), clock=UnitClock)
    assert record.cells == {}

    class Killed(Exception):
        pass

    def die_at_the_third(shape) -> None:
        seen.append(shape)
        if len(seen) == 3:
            raise Killed

    with pytest.raises(Killed):
        run_gpu_bench(bench(shapes, adapters), record, clock=UnitClock, on_shape=die_at_the_third)
    record.close()
    seen.clear()
    with Partial({}, ENVIRONMENT, path) as again:
        assert set(again.cells) == set(shapes[:2])
        assert run_gpu_bench(bench(shapes, adapters), again, clock=UnitClock, on_shape=seen.append)
    assert seen == shapes[2:]
    with Partial({}, ENVIRONMENT, path) as last:
        assert set(last.cells) == set(shapes)


def test_a_candidate_that_breaks_the_device_is_named_and_skipped_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device check is replaced: a CPU cannot be broken."""

    def alive(record, device, name, where, error) -> None:
        record.crash(name, f"broke the device: {error}", where)
        raise DeviceLost(name)

    monkeypatch.setattr(gpu_gemm, "_alive", alive)
    adapters = [*find_adapters([MM_BF16]), faulty("raises", lambda y: y.no_such_method())]
    record = memory()
    with pytest.raises(DeviceLost):
        run_gpu_bench(bench([(3, 64, 32), (4, 64, 32)], adapters), record, clock=UnitClock)
    assert record.cells == {}
    monkeypatch.setattr(gpu_gemm, "_alive", lambda *arguments: None)
    assert run_gpu_bench(bench([(3, 64, 32)], adapters), record, clock=UnitClock)
    assert "broke the device" in {u.candidate: u.reason for u in record.cells[3, 64, 32].unavailable}["raises"]


def test_slices_cover_everything_once() -> None:
    shapes = [(m, k, n) for m in (1, 8) for k in (64, 128, 4096) for n in (64, 96)]
    for parts in (1, 2, 3, 5, 9):
        pieces = [slice_of(shapes, i + 1, parts) for i in range(parts)]
        assert sorted(s for piece in pieces for s in piece) == sorted(shapes)
    big = {s[1:] for s in slice_of(shapes, 1, 2)} & {(4096, 64), (4096, 96)}
    assert len(big) == 1  # the two largest do not meet
    for wrong in ((0, 2), (3, 2)):
        with pytest.raises(ArgumentError, match="slice"):
            slice_of(shapes, *wrong)


def test_names_are_unique_and_found_by_part() -> None:
    names = [adapter.name for adapter in ADAPTERS]
    assert len(set(names)) == len(names)
    assert [a.name for a in find_adapters(["SCALED_mm", "humming w4a16"])] == [
        "torch._scaled_mm fp8 rows",
        "humming W4A16 g128",
    ]
    with pytest.raises(ArgumentError, match="cublas"):
        find_adapters(["cublas"])
