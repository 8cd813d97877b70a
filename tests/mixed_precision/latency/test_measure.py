"""Latencies that were planted are found: a clock that only layers move, with noise, drift, outliers and borders."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.measure.gpu_timing import CudaGraphClock
from pyquant.mixed_precision.choices.switchable import SwitchableModel
from pyquant.mixed_precision.latency import estimate, in_place
from pyquant.mixed_precision.latency.isolated import layer_calls, rotating
from pyquant.mixed_precision.latency.measure import latency_fingerprint, load_latency, measure_latency
from pyquant.mixed_precision.latency.samples import design, held_out, median_interval
from pyquant.mixed_precision.latency.timers import stamping
from pyquant.nn import hadamard_linear
from pyquant.nn.hadamard_linear import HadamardLinear
from pyquant.report.records.latency import LatencyTable

FORMATS = ("fp32", "W8A8Dynamic", "W4A8Dynamic(group_size=8)")
# Microseconds of each group in each format.
COST = {"0": (90.0, 40.0, 55.0), "2": (60.0, 35.0, 20.0), "4": (200.0, 70.0, 90.0), "6": (30.0, 25.0, 28.0)}
BASE = 50.0


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted times need no long samples; three calls still show that the middle one is taken."""
    monkeypatch.setattr(in_place, "_MOST_CALLS", 3)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    linear = (nn.Linear(8, 8) for _ in range(4))
    return nn.Sequential(*(part for layer in linear for part in (layer, nn.Tanh())))[:-1].eval()


class FakeClock:
    """Time that passes only when `spend` says so; reading it may cost time too."""

    name = "fake"

    def __init__(self, read_us: float = 0.0) -> None:
        self.us, self.speed, self._read = 0.0, 1.0, read_us

    def spend(self, us: float) -> None:
        self.us += us / self.speed

    def now_ns(self) -> int:
        self.us += self._read
        return round(self.us * 1000)


class FakeDevice:
    """A device whose graphs replay by calling again; seconds are those of the clock."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock, self.captured = clock, 0

    def warm(self, run: Callable[[], object]) -> None:
        run()

    def capture(self, run: Callable[[], object]) -> Callable[[], None]:
        self.captured += 1
        return lambda: [run() for _ in range(1)].clear()

    def seconds(self, run: Callable[[], object]) -> float:
        before = self._clock.us
        run()
        return (self._clock.us - before) * 1e-6


class Planted:
    """A small model whose layers spend given time on a fake clock.

    noise   factor of one call's time. borders: {(before, own): us} for every border. last: the format of the group
            before, as the layers see it.
    """

    def __init__(
        self,
        clock: FakeClock,
        *,
        noise: Callable[[], float] = lambda: 1.0,
        borders: dict[tuple[int, int], float] | None = None,
        base_us: float = BASE,
    ) -> None:
        self.clock, self.noise, self.borders, self.last = clock, noise, borders or {}, 0
        self.switchable = SwitchableModel(_model(), FORMATS, grouping="none")
        for group in self.switchable.groups:
            for name, f in itertools.product(group.layers, range(len(FORMATS))):
                self._plant(self.switchable.layer(name, f), name, f)
        if base_us:
            self.switchable.model.register_forward_pre_hook(lambda m, a: clock.spend(base_us * noise()))
        self.calls: list[tuple[str, int]] = []

    def _plant(self, layer: nn.Module, name: str, f: int) -> None:
        inside = layer.forward

        def forward(x: Tensor) -> Tensor:
            self.calls.append((name, f))
            us = COST[name][f] + (self.borders.get((self.last, f), 0.0) if name != "0" else 0.0)
            self.clock.spend(us * self.noise())
            self.last = f
            return inside(x)

        layer.forward = forward  # type: ignore[method-assign]

    def truth(self, config: tuple[int, ...]) -> float:
        costs = sum(COST[name][f] for name, f in zip(COST, config))
        return BASE + costs + sum(self.borders.get(pair, 0.0) for pair in itertools.pairwise(config))

    def measure(self, **options: Any) -> LatencyTable:
        options = {"rounds": 4, "min_rounds": 4, "held_out": 6, "clock": self.clock, **options}
        return measure_latency(self.switchable, torch.ones(2, 8), **options)


def _everything() -> Iterator[tuple[int, ...]]:
    return itertools.product(range(3), repeat=4)


def _error(planted: Planted, table: LatencyTable) -> float:
    return max(abs(table.predict(config) / planted.truth(config) - 1) for config in _everything())


def test_planted_costs_are_found_exactly() -> None:
    planted = Planted(FakeClock())
    table = planted.measure()
    assert table.groups == tuple(COST)
    for row, costs in zip(table.group_us, COST.values()):
        assert row == pytest.approx(costs, rel=1e-9)
    assert table.base_us == pytest.approx(BASE)
    assert (table.border_us, table.scale, table.clock, table.rounds) == (None, 1.0, "fake", 4)
    assert _error(planted, table) < 1e-9
    assert table.worst_error < 1e-9
    assert len(table.held_out) == 6
    assert len(table.uniform) == 3


def test_reading_the_clock_costs_nothing_in_the_table() -> None:
    planted = Planted(FakeClock(read_us=0.7))
    table = planted.measure()
    assert _error(planted, table) < 1e-9
    assert table.base_us == pytest.approx(BASE)
    assert table.us("2", "fp32") == pytest.approx(COST["2"][0])


def test_borders_are_found_exactly() -> None:
    borders = {(a, b): 7.0 * a + 3.0 * b for a in range(3) for b in range(3) if a != b}
    planted = Planted(FakeClock(), borders=borders)
    table = planted.measure(borders=True)
    assert _error(planted, table) < 1e-9
    assert table.border_us is not None
    for row, f in itertools.product(table.border_us, range(3)):
        assert [row[a][f] for a in range(3)] == pytest.approx([borders.get((a, f), 0.0) for a in range(3)])
    without = planted.measure(borders=False)
    assert without.border_us is None
    assert without.worst_error > 0.01  # what a table without borders says of it is stated
    assert _error(planted, without) > 0.03


def test_gaps_between_layers_belong_to_borders() -> None:
    clock = FakeClock()
    planted = Planted(clock)
    for layer in planted.switchable.model[1::2]:  # converting back after an integer layer is outside of the layers
        layer.register_forward_pre_hook(lambda m, a: clock.spend(25.0 if planted.last else 0.0))
    truth = {c: planted.truth(c) + 25.0 * sum(f > 0 for f in c[:3]) for c in _everything()}
    for borders in (False, True):
        table = planted.measure(borders=borders)
        assert max(abs(table.predict(c) / us - 1) for c, us in truth.items()) < 1e-9


def test_noise_and_outliers_hardly_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "_MOST_CALLS", 1)
    rng = random.Random(5)
    planted = Planted(FakeClock(), noise=lambda: rng.lognormvariate(0.0, 0.1) * (20.0 if rng.random() < 0.01 else 1.0))
    table = planted.measure(rounds=40, min_rounds=40)
    assert _error(planted, table) < 0.05
    assert abs(table.bias - 1) < 0.03
    for (low, high), us in zip((p for row in table.interval_us for p in row), (c for r in table.group_us for c in r)):
        assert low < us < high


def test_drift_is_taken_out() -> None:
    clock = FakeClock()
    planted = Planted(clock)

    def slower(done: int, total: int, what: str) -> None:
        clock.speed = 1.0 / (1.0 + 0.5 * done)

    table = planted.measure(rounds=9, min_rounds=9, progress=slower)
    ratios = [table.predict(c) / planted.truth(c) for c in _everything()]
    assert max(ratios) / min(ratios) - 1 < 1e-4
    assert ratios[0] == pytest.approx(3.0, rel=1e-3)  # the speed of the median round
    intervals = [pair for row in table.interval_us for pair in row]
    assert all(high - low < 0.01 * high for low, high in intervals)
    assert all(m.high_us - m.low_us < 0.01 * m.measured_us for m in table.held_out)


def test_what_has_no_base_or_no_borders_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    borders = {(a, b): 30.0 for a in range(3) for b in range(3) if a != b}
    planted = Planted(FakeClock(), borders=borders)
    right = planted.measure(borders=True)
    assert right.median_error < 1e-9

    def groups_only(self: estimate.Estimate, config: tuple[int, ...]) -> float:
        return sum(self.groups[g, f][0] for g, f in enumerate(config))

    monkeypatch.setattr(estimate.Estimate, "of", groups_only)
    wrong = planted.measure(borders=True)
    assert wrong.median_error > 0.1
    assert wrong.bias < 0.9


def test_fewer_batches_than_usual_are_enough_where_nobody_asks_for_more() -> None:
    data: list[Any] = [torch.randn(4, 8) for _ in range(3)]
    options: dict[str, Any] = {"rounds": 1, "min_rounds": 1, "held_out": 0, "clock": FakeClock()}
    assert measure_latency(_model(), None, ("fp32", "int8"), data, **options).formats == ("fp32", "int8")
    with pytest.raises(ArgumentError, match="num_batches"):
        measure_latency(_model(), None, ("fp32", "int8"), data, num_batches=4, **options)


def test_refused_formats_are_neither_run_nor_predicted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 3)).eval()
    formats = ("fp32", "W8A8Dynamic", "W4A8Dynamic(group_size=64)")
    switchable = SwitchableModel(model, formats)
    assert switchable.allowed[1] == (True, True, False)
    table = measure_latency(switchable, torch.randn(3, 64), rounds=2, min_rounds=1, held_out=5)
    assert table.allowed == switchable.allowed
    assert table.interval_us[1][2] is None
    assert table.layer_us["2"][2] is None
    assert table.predict((2, 1, 2)) > 0
    with pytest.raises(ArgumentError, match="2: W4A8Dynamic"):
        table.predict((2, 2, 2))
    assert len(table.held_out) == 5


def test_groups_add_up_their_layers_and_their_calls() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.out(self.q(x) + self.k(x) + self.v(x)))

    clock = FakeClock()
    switchable = SwitchableModel(Attention().eval(), ("fp32", "W8A8Dynamic"))
    costs = {"q": 10.0, "k": 20.0, "v": 30.0, "out": 5.0}
    for name, f in itertools.product(costs, range(2)):
        layer = switchable.layer(name, f)
        layer.register_forward_hook(lambda m, a, y: None)  # hooks are not in the way

        def forward(x: Tensor, inside: Any = layer.forward, us: float = costs[name] / (1 + f)) -> Tensor:
            clock.spend(us)
            return inside(x)

        layer.forward = forward  # type: ignore[method-assign]
    table = measure_latency(switchable, torch.ones(2, 8), rounds=2, min_rounds=2, clock=clock)
    assert table.groups == ("q+k+v", "out")
    assert table.group_us[0] == pytest.approx((60.0, 30.0))
    assert table.group_us[1] == pytest.approx((10.0, 5.0))
    assert table.layer_us["k"] == pytest.approx((20.0, 10.0))
    assert table.base_us == pytest.approx(0.0, abs=1e-6)
    assert "small" in table.notes[0]


def test_the_model_is_as_before_also_after_ctrl_c() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).train()
    x, before = torch.randn(3, 8), dict(model.named_modules())
    expected, threads = model(x), torch.get_num_threads()

    def interrupt(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    options: dict[str, Any] = {"rounds": 2, "min_rounds": 1, "threads": threads + 1}
    with pytest.raises(KeyboardInterrupt):
        measure_latency(model, x, ("fp32", "W8A8Dynamic"), progress=interrupt, **options)
    measure_latency(model, x, ("fp32", "W8A8Dynamic"), **options)
    assert dict(model.named_modules()) == before
    assert all(module.training and "forward" not in module.__dict__ for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(model(x), expected)
    assert torch.get_num_threads() == threads


def test_timers_give_a_layer_its_own_forward_back() -> None:
    layer, clock = nn.Linear(2, 2), FakeClock()
    own = layer.forward
    layer.forward = own  # type: ignore[method-assign]  # as other tools do it
    with stamping({layer: 3}, clock) as stamps:
        layer(torch.ones(1, 2))
        assert stamps == [(3, 0, 0)]
    with pytest.raises(RuntimeError, match=r"shapes"), stamping({layer: 3}, clock):
        layer(torch.ones(1, 3))
    assert layer.__dict__["forward"] is own


def test_layers_alone_on_a_clock_of_graphs() -> None:
    clock = FakeClock()
    planted = Planted(clock)
    device = FakeDevice(clock)
    table = planted.measure(clock=CudaGraphClock(device))
    assert table.clock == "cuda-graph"
    assert device.captured > 12
    assert _error(planted, table) < 1e-9
    assert table.base_us == pytest.approx(BASE)
    assert "alone" in table.notes[0]


def test_alone_layers_see_the_inputs_of_the_model() -> None:
    seen: dict[str, set[tuple[int, ...]]] = {}
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)).eval()
    switchable = SwitchableModel(model, ("fp32", "W8A8Dynamic"))
    for name, f in itertools.product(("0", "2"), range(2)):
        layer = switchable.layer(name, f)
        layer.register_forward_pre_hook(lambda m, a, name=name: seen.setdefault(name, set()).add(tuple(a[0].shape)))
    table = measure_latency(
        switchable, torch.randn(5, 8), rounds=2, min_rounds=1, clock=CudaGraphClock(FakeDevice(FakeClock()))
    )
    assert seen == {"0": {(5, 8)}, "2": {(5, 16)}}
    assert table.group_us == ((0.0, 0.0), (0.0, 0.0))


@pytest.mark.parametrize("alone", [False, True])
def test_what_is_done_to_the_inputs_first_is_time_of_the_layer(monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    clock = FakeClock()

    def costs(holder: Any, name: str, us: float) -> None:
        inside = getattr(holder, name)
        monkeypatch.setattr(holder, name, lambda *a, **k: (clock.spend(us), inside(*a, **k))[1])

    costs(hadamard_linear.ops, "hadamard_quantize", 3.0)  # one kernel with the quantiser: the layer has no call then
    costs(hadamard_linear.ops, "hadamard_transform", 2.0)
    costs(nn.Linear, "forward", 20.0)
    costs(pyquant.QLinear, "forward", 999.0)  # not what the model calls
    costs(pyquant.QLinear, "_multiply_tokens", 5.0)
    model = nn.Sequential(HadamardLinear.from_linear(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 4)).eval()
    switchable = SwitchableModel(model, ("fp32", "W4A4Dynamic"), grouping="none")
    options: dict[str, Any] = {"clock": CudaGraphClock(FakeDevice(clock)) if alone else clock}
    table = measure_latency(switchable, torch.ones(2, 16), rounds=4, min_rounds=4, **options)
    assert [table.us("0.linear", name) for name in ("fp32", "W4A4Dynamic")] == pytest.approx([22.0, 8.0])
    assert [table.us("2", name) for name in ("fp32", "W4A4Dynamic")] == pytest.approx([20.0, 999.0])
    assert table.base_us == pytest.approx(0.0)
    said = latency_fingerprint(switchable, torch.ones(2, 16))["layer '0.linear'"]
    assert said == "Linear 16 x 16 float32 behind HadamardLinear(block=16), in group 0.linear"


def test_a_table_belongs_to_its_machine_and_inputs(tmp_path: Path) -> None:
    planted = Planted(FakeClock())
    path = planted.measure(rounds=1, min_rounds=1).save(tmp_path / "latency.json")
    batch = torch.ones(2, 8)
    assert load_latency(path, planted.switchable, batch).fingerprint["input 0"] == "float32 [2, 8]"
    with pytest.raises(CheckpointError, match=r"input 0 is 'float32 \[2, 8\]', and 'float32 \[3, 8\]' here"):
        load_latency(path, planted.switchable, torch.ones(3, 8))
    with pytest.raises(CheckpointError, match="threads is"):
        load_latency(path, planted.switchable, batch, threads=torch.get_num_threads() + 1)
    other = SwitchableModel(_model(), ("fp32", "W8A8Dynamic"), grouping="none")
    with pytest.raises(CheckpointError, match="formats is"):
        load_latency(path, other, batch)
    mapping = latency_fingerprint(planted.switchable, torch.ones(2, 8, dtype=torch.float64))
    assert mapping["input 0"] == "float64 [2, 8]"
    assert mapping["layer '0'"] == "Linear 8 x 8 float32, in group 0"


def test_bad_arguments_are_named() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval(), torch.ones(2, 4)
    formats = ("fp32", "W8A8Dynamic")
    for argument, options in {
        "formats": {"formats": None},
        "clock": {"clock": "sundial"},
        "rounds": {"rounds": 0},
        "min_rounds": {"rounds": 2, "min_rounds": 3},
        "max_seconds": {"max_seconds": 0.0},
        "held_out": {"held_out": -1},
        "tolerance": {"tolerance": -1.0},
        "threads": {"threads": 0},
        "example_inputs": {"example_inputs": None},
    }.items():
        with pytest.raises(ArgumentError, match=f"argument '{argument}'"):
            measure_latency(model, **{"example_inputs": x, "formats": formats, **options})
    with pytest.raises(ArgumentError, match="argument 'clock': got 'cpu' with 2 threads"):
        measure_latency(model, x, formats, clock="cpu", threads=2)
    with pytest.raises(ArgumentError, match=r"argument 'clock'.*'cpu', 'wall' for a model on cpu"):
        measure_latency(model, x, formats, clock="cuda-graph")
    with pytest.raises(ArgumentError, match="argument 'formats'"):
        measure_latency(SwitchableModel(model, formats), x, formats)


def test_a_layer_that_is_never_called_is_named() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    with pytest.raises(ArgumentError, match="'unused' is not called"):
        measure_latency(Half().eval(), torch.ones(1, 4), ("fp32", "W8A8Dynamic"))


def test_fused_encoder_layers_are_measured_where_they_call_their_layers() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    model, x, formats = nn.Sequential(layer), torch.randn(2, 5, 16), ("fp32", "W8A8Dynamic")
    options: dict[str, Any] = {"rounds": 2, "min_rounds": 1}
    table = measure_latency(model, x, formats, **options)
    assert table.groups == ("0.linear1", "0.linear2")
    assert table.predict((0, 0)) > 0
    assert layer.activation_relu_or_gelu == 1
    with pytest.raises(ArgumentError, match=r"argument 'grouping'.*both: in fp32 the model never calls"):
        measure_latency(model, x, formats, grouping={"both": ["0.linear*"]}, **options)


def test_weights_rotate_over_copies_as_large_as_the_model() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 256)).eval()
    switchable = SwitchableModel(model, ("fp32", "W8A8Dynamic"))
    calls = layer_calls(switchable, (torch.randn(2, 64),), {})
    for f in range(2):
        small, large = (rotating(switchable, name, f, calls[name]) for name in ("0", "3"))
        assert (small.period, large.period) == (7, 2)
        first, second = small(), small()
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[0], switchable.layer("0", f)(calls["0"][0][0][0]))


def test_borders_need_groups_in_the_order_of_the_model() -> None:
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.first = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    with pytest.raises(ArgumentError, match="argument 'borders'"):
        measure_latency(Reversed().eval(), torch.ones(1, 4), ("fp32", "W8A8Dynamic"), borders=True)


def test_every_pair_of_neighbours_is_in_the_design() -> None:
    for count, groups in ((2, 5), (3, 4), (4, 6), (6, 3)):
        configs = design([[True] * count] * groups)
        assert len(configs) == count * count
        for g in range(groups - 1):
            assert len({c[g : g + 2] for c in configs}) == count * count
    assert held_out([[True, True]] * 2, design([[True, True]] * 2), 5, seed=0) == []
    drawn = held_out([[True, False, True]] * 5, [(0,) * 5], 20, seed=0)
    assert len(set(drawn)) == 20
    assert not any(1 in config or config == (0,) * 5 for config in drawn)


def test_intervals_of_medians_hold() -> None:
    rng = random.Random(0)
    inside = 0
    for _ in range(400):
        _, low, high = median_interval([rng.expovariate(1.0) for _ in range(25)])
        inside += low <= 0.6931 <= high
    assert 0.92 < inside / 400 < 0.995


def test_learned_precision_takes_a_table() -> None:
    planted = Planted(FakeClock())
    table = planted.measure(rounds=1, min_rounds=1)
    with pytest.raises(ArgumentError, match="layer '1'"):  # of other layers
        pyquant.LearnedPrecision(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), target=0.8, steps=10, cost=table)
    learned = pyquant.LearnedPrecision(_model(), target=0.8, steps=10, cost=table)
    full, at_8 = (sum(COST[name][f] for name in COST) for f in (0, 1))
    assert float(learned.cost()) == pytest.approx(at_8 / full, rel=1e-5)
