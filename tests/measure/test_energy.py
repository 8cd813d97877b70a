"""Millijoules a call: from one step of the counter to another, with a driver that is made up."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyquant.bench import gpu_gemm
from pyquant.bench.gpu_gemm import GpuBench, run_gpu_bench
from pyquant.bench.kernels import find_adapters
from pyquant.bench.kernels.torch_own import MM_BF16
from pyquant.bench.partial import Partial
from pyquant.measure.energy import EnergyMeter, EnergyUnavailable, energy_meter
from pyquant.measure.environment import describe_environment
from pyquant.report.gemm import gemm_markdown, to_csv
from pyquant.report.records.bench import GemmReport
from pyquant.report.registry import render

ENVIRONMENT = describe_environment("cpu")


class UnitClock:
    """Every call takes a microsecond."""

    name = "unit"

    def seconds(self, candidate: Any, calls: int) -> float:
        for _ in range(calls):
            candidate()
        return calls * 1e-6


class Board:
    """A device of `watts` whose counter steps every `tick` seconds; a call takes `call` seconds."""

    def __init__(self, watts: float = 200.0, tick: float = 0.02, call: float = 0.0013, start: float = 0.0077) -> None:
        self.watts, self.tick, self.call, self.time = watts, tick, call, start

    def now(self) -> float:
        return self.time

    def read(self) -> int:
        return round(self.time // self.tick * self.tick * self.watts * 1e3) + 10**9

    def run(self, calls: int = 3) -> int:
        self.time += calls * self.call
        return calls


@pytest.mark.parametrize("start", [0.0, 0.0077, 0.0199])
def test_a_figure_begins_and_ends_at_a_step_of_the_counter(start: float) -> None:
    board = Board(start=start)
    found = EnergyMeter(board.read, board.now).a_call(board.run, seconds=1.0)
    assert found == pytest.approx(200.0 * 0.0013 * 1e3, rel=0.01)  # 260 mJ; a tick of 20 ms is 2 % of a second
    assert board.time - start < 1.1


def test_a_counter_that_stands_still_or_turns_back_gives_no_figure() -> None:
    board = Board()
    with pytest.raises(EnergyUnavailable, match=r"did not move for 0\.5 s"):
        EnergyMeter(lambda: 5, board.now).a_call(board.run, patience=0.5)
    values = iter([5, 9, 3])
    with pytest.raises(EnergyUnavailable, match="backwards"):
        EnergyMeter(lambda: next(values), board.now).a_call(board.run)


class NVMLError(Exception):
    pass


def _nvml(board: Board, *, broken: str = "") -> Any:
    def step(name: str, value: Any) -> Any:
        def call(*words: Any) -> Any:
            if name == broken:
                raise NVMLError("Not Supported")
            seen.append((name, *words))
            return value() if callable(value) else value

        return call

    seen: list[tuple[Any, ...]] = []
    return SimpleNamespace(
        NVMLError=NVMLError,
        seen=seen,
        nvmlInit=step("init", None),
        nvmlDeviceGetHandleByUUID=step("handle", "the handle"),
        nvmlDeviceGetTotalEnergyConsumption=step("read", board.read),
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"1234-{device.index}")
    )
    return monkeypatch


def test_the_device_is_found_by_its_uuid_and_not_by_its_number(gpu: pytest.MonkeyPatch) -> None:
    nvml = _nvml(Board())
    gpu.setitem(sys.modules, "pynvml", nvml)
    assert energy_meter("cuda:1").read() >= 10**9
    assert nvml.seen[1] == ("handle", "GPU-1234-1")  # CUDA_VISIBLE_DEVICES renumbers CUDA's devices, not NVML's
    assert nvml.seen[-1] == ("read", "the handle")


@pytest.mark.parametrize("broken", ["init", "handle", "read"])
def test_what_the_driver_refuses_is_told(gpu: pytest.MonkeyPatch, broken: str) -> None:
    gpu.setitem(sys.modules, "pynvml", _nvml(Board(), broken=broken))
    with pytest.raises(EnergyUnavailable, match="NVML: Not Supported"):
        energy_meter("cuda:0")


def test_without_nvml_the_extra_is_named(gpu: pytest.MonkeyPatch) -> None:
    gpu.setitem(sys.modules, "pynvml", None)
    with pytest.raises(EnergyUnavailable, match=r"pip install nvidia-ml-py$"):
        energy_meter("cuda:0")
    with pytest.raises(EnergyUnavailable, match="not of 'cpu'"):
        energy_meter("cpu")


def _bench(**more: Any) -> GpuBench:
    adapters = find_adapters([MM_BF16, "nn.Linear bf16"])
    return GpuBench(
        [(1, 64, 32), (2, 64, 32)],
        adapters,
        device="cpu",
        clock="cpu",
        rounds=1,
        min_sample_s=0.0,
        rotate_bytes=9000,
        **more,
    )


def test_every_row_gets_its_energy_and_the_files_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()

    class BoardClock(UnitClock):
        def seconds(self, candidate: Any, calls: int) -> float:
            assert calls % candidate.period == 0  # whole turns of the rotation: no weights found in a cache
            board.run(calls)
            return super().seconds(candidate, calls)

    monkeypatch.setattr(gpu_gemm, "energy_meter", lambda device: EnergyMeter(board.read, board.now))
    record = Partial({}, ENVIRONMENT)
    run_gpu_bench(_bench(energy=True), record, clock=BoardClock)
    rows = [row for cell in record.cells.values() for row in cell.rows]
    assert len(rows) == 4
    for row in rows:
        assert row.energy_mj == pytest.approx(260.0, rel=0.02)
    report = GemmReport(ENVIRONMENT, MM_BF16, rows)
    assert gemm_markdown(report).count("| energy per call, mJ ") == 2
    assert to_csv(report).splitlines()[0].endswith(",energy_mj")
    assert '"energy_mj": 2' in render(report, "json").decode()


def test_where_nothing_counts_the_column_is_empty_and_the_reason_is_told() -> None:
    record = Partial({}, ENVIRONMENT)
    run_gpu_bench(_bench(energy=True), record, clock=UnitClock)
    rows = [row for cell in record.cells.values() for row in cell.rows]
    assert [row.energy_mj for row in rows] == [None] * 4
    told = [item for cell in record.cells.values() for item in cell.unavailable]
    assert [(item.candidate, item.where) for item in told] == [("energy per call", f"M={m} K=64 N=32") for m in (1, 2)]
    assert "not of 'cpu'" in told[0].reason
    quiet = Partial({}, ENVIRONMENT)
    run_gpu_bench(_bench(), quiet, clock=UnitClock)
    assert not [item for cell in quiet.cells.values() for item in cell.unavailable]
    report = GemmReport(ENVIRONMENT, MM_BF16, rows, unavailable=told)
    assert "energy per call, mJ" not in gemm_markdown(report)
    assert "- energy per call: NVML counts the energy of NVIDIA GPUs, not of 'cpu' (2x)" in gemm_markdown(report)
