"""tune(): the quickest right kernel wins, with a made-up clock and without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest
import torch

from pyquant import scheme_from_name
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.measure import tune_rig
from pyquant.measure.tune import WITHIN, TuneOutcome, as_device, candidates, problems_for, time_layers, tune
from pyquant.numerics.gemm import gemm as specification
from pyquant.numerics.pack import unpack_int4
from pyquant.ops import layer_time, plan, tuned
from pyquant.ops.rows_layout import BLOCKED

native = pytest.importorskip("pyquant._native", reason="the compiled module is not built")

DEVICE = {"sm": 80, "sm_count": 108, "name": "GPU X"}


class FakeRig:
    """Rows take the times that a test gives them: by default what the model predicts."""

    device = DEVICE

    def __init__(
        self, us: dict[str, float] | None = None, wrong: set[str] = frozenset(), broken: set[str] = frozenset()
    ):
        self.us, self.wrong, self.broken = us or {}, wrong, broken
        self.clock = self
        self.name = "fake"

    def prepare(self, problem: dict) -> Callable[[str], tuple[Callable[[], str], bool]]:
        def build(name: str) -> tuple[Callable[[], str], bool]:
            if name in self.broken:
                raise RuntimeError(f"{name} failed\nat a place")
            us = self.us.get(name) or (1e6 if name == "torch" else native.cost_us(name, problem, DEVICE))
            run = lambda: name  # noqa: E731
            run.us = us
            return run, name not in self.wrong

        return build

    def seconds(self, candidate: Callable, calls: int) -> float:
        return candidate.us * 1e-6 * calls


def outcome(rig: FakeRig, problem: dict | None = None) -> TuneOutcome:
    (found,) = tune([problem or problems_for([(4096, 4096, "W8A8")], [64])[0]], rig, rounds=3, only_compiled=False)
    return found


def test_problems_are_those_that_the_plan_is_asked_for_once_each() -> None:
    found = problems_for([(100, 70, "W4A8Dynamic(group_size=10)"), (100, 70, "W4A8Dynamic(group_size=10)")], [3, 4, 50])
    assert [p["m"] for p in found] == [4, 64]
    assert found[0]["w"] == "s4"
    assert found[0]["group_size"] == 10
    assert found[0]["k"] == 70
    (float_one,) = problems_for([(64, 64, "FP16")], [1], torch.bfloat16)
    assert (float_one["x"], float_one["w"], float_one["out"]) == ("bf16", "bf16", "bf16")
    for scheme, dtype in (("W8A16", torch.float32), ("nonsense", torch.float16), ("FP16", torch.float32)):
        with pytest.raises(ArgumentError):
            problems_for([(64, 64, scheme)], [1], dtype)


def test_candidates_are_the_rows_near_the_models_best() -> None:
    problem = problems_for([(4096, 4096, "W8A8")], [64])[0]
    names = candidates(problem, DEVICE, only_compiled=False)
    us = [native.cost_us(name, problem, DEVICE) for name in names]
    assert us == sorted(us)
    assert names[0] == native.select(problem, DEVICE, only_compiled=False)[0]
    assert len(names) > 1
    assert us[-1] <= WITHIN * us[0]
    assert "gemm_simt_any" not in names
    assert candidates(problem | {"x": "f16", "w": "u8"}, DEVICE, only_compiled=False) == []


def test_the_models_choice_stays_unless_another_is_clearly_quicker() -> None:
    by_model = outcome(FakeRig())
    assert by_model.choice is not None
    assert by_model.choice.row == by_model.choice.model_row
    first, second = list(by_model.times)[:2]
    close = outcome(FakeRig({first: 10.0, second: 9.9}))
    assert close.choice is not None
    assert close.choice.row == first
    clear = outcome(FakeRig({first: 10.0, second: 5.0}))
    assert clear.choice is not None
    assert (clear.choice.row, clear.choice.us, clear.choice.model_row, clear.choice.model_us) == (second, 5, first, 10)
    assert clear.choice.m == 64


def test_wrong_and_failing_kernels_are_dropped_with_the_reason() -> None:
    first, second, third = list(outcome(FakeRig()).times)[:3]
    found = outcome(FakeRig({first: 1.0, second: 2.0}, wrong={first}, broken={second}))
    assert found.dropped == {first: "its result differs from the specification", second: f"{second} failed"}
    assert found.choice is not None
    assert found.choice.row == third or found.choice.row not in (first, second)
    nothing = outcome(FakeRig(wrong=set(native_names())))
    assert nothing.choice is None
    assert len(nothing.dropped) >= 3


def native_names() -> list[str]:
    return [row["name"] for row in native.kernel_table()]


def test_a_problem_that_nothing_takes_has_no_choice() -> None:
    found = outcome(FakeRig(), {"m": 1, "n": 8, "k": 200000, "out": "f16"})
    assert found.choice is None
    assert found.dropped == {"all": "no kernel takes the problem"}


def test_torch_is_a_candidate_of_float_products_only() -> None:
    (problem,) = problems_for([(4096, 4096, "FP16")], [64])
    if not candidates(problem, DEVICE, only_compiled=False):
        pytest.skip("the table has no float rows")
    found = outcome(FakeRig({"torch": 0.5}), problem)
    assert found.choice is not None
    assert found.choice.row == "torch"
    assert "torch" not in outcome(FakeRig()).times


def test_progress_is_told_of_every_problem() -> None:
    seen: list[int] = []
    problems = problems_for([(4096, 4096, "W8A8")], [1, 64])
    tune(problems, FakeRig(), rounds=1, only_compiled=False, on_problem=lambda p: seen.append(p["m"]))
    assert seen == [1, 64]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_error_says_so() -> None:
    with pytest.raises(UnsupportedError, match="GPU"):
        tune_rig.GpuRig()


# ---- the operands and the check, with a stand-in for the launch that reads and writes the same addresses


def read(address: int, like: torch.Tensor) -> torch.Tensor:
    nbytes = like.numel() * like.element_size()
    buffer = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(buffer, dtype=like.dtype).reshape(like.shape)


@pytest.mark.parametrize("flaw", [None, "one bit", "not written"])
@pytest.mark.parametrize(
    "scheme", ["W8A8", "W8A8Dynamic(symmetric_inputs=False)", "W4A8Dynamic(group_size=32)", "W4A4"]
)
def test_a_bench_checks_what_a_launch_writes(scheme: str, flaw: str | None) -> None:
    (problem,) = problems_for([(48, 64, scheme)], [16], torch.float16)

    class Native:
        @staticmethod
        def workspace_bytes(name: str, problem: dict, device: int) -> int:
            return 5

    def launch(name: str, problem: dict, operands: dict, epilogue: dict, device: int, stream: int) -> None:
        m, n, k = problem["m"], problem["n"], problem["k"]
        assert name == "row"
        assert operands["workspace"]
        x = read(operands["x"], bench.x)[:, :k]
        w = read(operands["w"], bench.stored[0])
        w = unpack_int4(w, problem["ldw"])[:, :k] if problem["w"] == "s4" else w[:, :k]
        zero_point = read(operands["x_zero_point"], bench.x_zero_point) if "x_zero_point" in operands else None
        assert ("w_sum" in operands) == bool(problem["has_zero_point"])
        w_scale = read(operands["w_scale"], bench.w_scale)
        y = specification(
            x,
            w,
            w_scale if problem["group_size"] else w_scale.reshape(-1),
            read(operands["x_scale"], bench.x_scale),
            zero_point,
            group_size=problem["group_size"],
            out_dtype=torch.float16,
        )
        out = read(operands["out"], bench.out)
        assert out.shape == (m, n)
        if flaw != "not written":
            out.copy_(y)
        if flaw == "one bit":
            out.view(torch.int16)[-1, -1] ^= 1

    bench = tune_rig.Bench(problem, torch.device("cpu"), launch, Native)
    run, right = bench.build("row")
    assert right == (flaw is None)
    assert run() is not None
    if bench.w_sum is not None:
        w = bench.w[:, : problem["k"]].long()
        groups = problem["group_size"] or problem["k"]
        assert torch.equal(bench.w_sum.long(), w.reshape(48, -1, groups).sum(-1))


def test_a_float_bench_takes_torchs_product_and_refuses_a_wrong_one() -> None:
    (problem,) = problems_for([(48, 64, "FP16")], [16])
    bench = tune_rig.Bench(problem, torch.device("cpu"), lambda *a: None, None)
    assert bench.build("torch")[1]

    class Native:
        workspace_bytes = staticmethod(lambda *a: 0)

    assert not tune_rig.Bench(problem, torch.device("cpu"), lambda *a: None, Native).build("row")[1]


# ---- what is measured is found again


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """A GPU whose layers have int4 weights in blocks, as a build with kernels decides."""
    monkeypatch.setattr(plan, "weight_layout", lambda spec, device: BLOCKED if spec.w_bits == 4 else "rows")
    yield {"sm": 90, "sm_count": 132, "dram_gbps": 4800, "name": "GPU H"}
    tuned.activate(tuned.load())


def slowest_wins(problem: dict, device: dict) -> TuneOutcome:
    """Measured otherwise than the model thinks: the last of its candidates is the quickest."""
    rig = FakeRig({name: 100.0 - i for i, name in enumerate(candidates(problem, device, only_compiled=False))})
    rig.device = device
    (found,) = tune([problem], rig, rounds=1, only_compiled=False)
    assert found.choice is not None
    assert found.choice.row != found.choice.model_row
    return found


def follow(*outcomes: TuneOutcome) -> None:
    table = tuned.Table()
    table.add("GPU H", [o.choice for o in outcomes if o.choice is not None])
    tuned.activate(tuned.parse(tuned.dumps(table), "t.json"))


def selected(text: str, device: dict, has_residual: bool = False) -> plan.Selection:
    """What a layer's own spec gets."""
    spec = layer_time.spec_of(scheme_from_name(text), 4096, 4096, as_device(device))
    how = {"has_residual": has_residual, "only_compiled": False}
    return plan.select(spec, 64, torch.bfloat16, as_device(device), **how)


TEXTS = ("W8A8Dynamic", "W8A8Dynamic(symmetric_inputs=False)", "W4A8Dynamic", "W4A8Dynamic(group_size=128)", "W8A8")


@pytest.mark.parametrize("text", TEXTS)
def test_a_layer_finds_what_was_measured_for_it(text: str, hopper: dict) -> None:
    (problem,) = problems_for([(4096, 4096, text)], [64], torch.bfloat16, hopper)
    found = slowest_wins(problem, hopper)
    follow(found)
    assert selected(text, hopper).is_measured
    assert selected(text, hopper).kernel == found.choice.row
    assert selected(text, hopper, has_residual=True).is_measured  # better known without than by the model


def test_planted_problems_of_natural_rows_are_not_found(hopper: dict) -> None:
    (problem,) = problems_for([(4096, 4096, "W4A8Dynamic")], [64], torch.bfloat16)
    follow(slowest_wins(problem, hopper))
    assert not selected("W4A8Dynamic", hopper).is_measured


def test_zero_points_and_residuals_have_choices_of_their_own(hopper: dict) -> None:
    texts = ("W8A8Dynamic", "W8A8Dynamic(symmetric_inputs=False)")
    problems = problems_for([(4096, 4096, t) for t in texts], [64], torch.bfloat16, hopper, residuals=True)
    assert len(problems) == 4
    outcomes = [slowest_wins(problem, hopper) for problem in problems]
    for us, outcome in enumerate(outcomes):
        object.__setattr__(outcome.choice, "us", 1.0 + us)
    follow(*outcomes)
    got = [selected(text, hopper, residual).predicted_us for text in texts for residual in (False, True)]
    assert got == [1.0, 2.0, 3.0, 4.0]
    old = {k: v for k, v in asdict(outcomes[0].choice).items() if k not in ("zero_point", "residual")}
    table = tuned.Table()
    table.add("GPU H", [tuned.Choice(**old)])
    tuned.activate(table)  # a file of before tells them not apart
    assert all(selected(text, hopper, residual).is_measured for text in texts for residual in (False, True))


def test_weight_only_layers_are_measured_and_followed(hopper: dict) -> None:
    (problem,) = problems_for([(4096, 4096, "W4A16(group_size=128)")], [4], torch.bfloat16, hopper)
    assert (problem["x"], problem["w"], problem["group_size"]) == ("bf16", "s4", 128)

    def form() -> str:
        return str(native.route("float_linear", problem, hopper, only_compiled=False)[0])

    assert form() == "given"
    rig = FakeRig({"torch": 0.1})
    rig.device = hopper
    (found,) = tune([problem], rig, rounds=1, only_compiled=False)
    assert found.choice is not None
    assert found.choice.row == "torch"
    follow(found)
    assert form() == "framework"
    us = native.layer_time("float_linear", problem, hopper, only_compiled=False)
    assert us == (0.1, True, None)


@pytest.mark.parametrize("scheme", ["W8A16", "W4A16(group_size=32)"])
def test_a_weight_only_bench_dequantises_and_adds_the_residual(scheme: str) -> None:
    _, problem = problems_for([(48, 64, scheme)], [16], torch.bfloat16, residuals=True)
    bench = tune_rig.Bench(problem, torch.device("cpu"), lambda *a: None, None)
    assert bench.residual is not None
    assert bench.build("torch")[1]
    bench.w_scale *= 1.5  # the codes stand for other weights than the specification has
    assert not bench.build("torch")[1]


# ---- whole layers


@pytest.mark.parametrize("text", ["W8A8Dynamic", "W8A8", "W8A8(symmetric_inputs=False)", "W4A8Dynamic", "W4A16"])
def test_a_whole_layer_is_checked_before_it_is_timed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, cpu = scheme_from_name(text), torch.device("cpu")
    ours, theirs, right = tune_rig.layer_pair(64, 128, scheme, 8, torch.bfloat16, cpu)
    assert right
    assert ours().shape == theirs().shape == (8, 64)
    forward = tune_rig.QLinear.forward
    monkeypatch.setattr(tune_rig.QLinear, "forward", lambda layer, x, r=None: 1.1 * forward(layer, x, r))
    assert not tune_rig.layer_pair(64, 128, scheme, 8, torch.bfloat16, cpu)[2]


class LayerRig:
    """Layers that take 2 us a code of x, torch's 3; one size is wrong, and one fails."""

    name = "fake"

    def __init__(self) -> None:
        self.layer_clock = self

    def layer(self, n: int, k: int, scheme: object, m: int, dtype: torch.dtype) -> tuple[Callable, Callable, bool]:
        if n == 7:
            raise RuntimeError("no memory\nat all")
        return (lambda: 2.0 * m), (lambda: 3.0 * m), n != 9

    def seconds(self, candidate: Callable, calls: int) -> float:
        return float(candidate()) * 1e-6 * calls


def test_whole_layers_are_timed_once_a_bucket_and_decide() -> None:
    layers = [(64, 32, "W8A8Dynamic"), (64, 32, "W8A8Dynamic"), (7, 32, "W8A8Dynamic"), (9, 32, "W4A16")]
    layers.append((64, 32, "FP16"))
    seen: list[int] = []
    found, dropped = time_layers(
        layers, [3, 4, 50], torch.bfloat16, LayerRig(), rounds=1, on_layer=lambda m, n, k: seen.append(m)
    )
    assert [(one.m, one.us, one.float_us) for one in found] == [(4, 8.0, 12.0), (64, 128.0, 192.0)]
    assert seen == [4, 64, 4, 64, 4, 64]
    assert set(dropped.values()) == {"no memory", "its result differs from the specification"}
    table = tuned.Table()
    table.add("GPU L", [], {"torch": "2"}, found)
    again = tuned.parse(tuned.dumps(table), "t.json")
    assert again == table
    device = plan.Device(90, 132, 232448, 62914560, 4800, "GPU L")
    try:
        tuned.activate(again)
        ours, theirs = layer_time.beside(scheme_from_name("W8A8Dynamic"), 64, 32, 50, torch.bfloat16, device)
        assert (ours, theirs) == (
            layer_time.LayerTime(128.0, "measured on GPU L"),
            layer_time.LayerTime(192.0, "measured on GPU L"),
        )
    finally:
        tuned.activate(tuned.load())
    with pytest.raises(ArgumentError, match="dtype"):
        time_layers(layers, [1], torch.float32, LayerRig())
