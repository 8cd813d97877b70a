"""The runner: exactly N batches of any kind, a model that is as before, errors that name the layer, and resuming."""

from __future__ import annotations

import functools
from collections import UserDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant.calibrate import HistogramStatistics, RangeStatistics, run_calibration
from pyquant.calibrate.progress import FILE
from pyquant.errors import ArgumentError, CalibrationError, CheckpointError, NonFiniteError
from pyquant.simulate.calibrate import calibrate_


class Watched(nn.Linear):
    """The smallest CalibrationTarget."""

    statistics: HistogramStatistics | None = None

    def start_calibration(self) -> Mapping[str, RangeStatistics]:
        self.statistics = HistogramStatistics()
        return {"input": self.statistics}

    def stop_calibration(self) -> None:
        self.statistics = None

    def forward(self, x: Tensor) -> Tensor:
        if self.statistics is not None:
            self.statistics.observe(x)
        return super().forward(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.first, self.unused, self.second = Watched(4, 4), Watched(4, 4), Watched(4, 2)
        self.drop, self.norm, self.calls = nn.Dropout(0.5), nn.BatchNorm1d(4), 0
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=g)

    def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
        self.calls += 1
        x = x if scale is None else x * scale
        return self.second(self.norm(self.drop(self.first(x).relu())))

    def targets(self) -> list[Watched]:
        return [self.first, self.second]


def batches(n: int = 5) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=g) for _ in range(n)]


def fetched(data: list[Any], log: list[int]) -> Iterator[Any]:
    for i, batch in enumerate(data):
        log.append(i)
        yield batch


def picture(model: nn.Module) -> tuple[Any, ...]:
    """Everything that a run must leave alone."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return state, [m.training for m in model.modules()], hooks, torch.get_rng_state(), torch.is_grad_enabled()


def same_picture(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return (
        a[0].keys() == b[0].keys()
        and all(torch.equal(a[0][k], b[0][k]) for k in a[0])
        and a[1:3] == b[1:3]
        and torch.equal(a[3], b[3])
        and a[4] == b[4]
    )


@pytest.mark.parametrize("n", [1, 3, 5])
def test_n_means_n(n: int) -> None:
    model, log = Net(), []
    collected = run_calibration(model, model.targets(), fetched(batches(), log), n)
    assert model.calls == n
    assert log == list(range(n))
    assert set(collected) == {"first", "second"}
    want = HistogramStatistics()
    want.observe(torch.cat(batches()[:n]))
    assert torch.equal(collected["first"]["input"].counts, want.counts)  # type: ignore[attr-defined]
    assert model.first.statistics is None


def test_too_few_batches_are_an_error_with_both_numbers() -> None:
    model = Net()
    with pytest.raises(CalibrationError, match="7 batches were asked for, the data had 5; pass num_batches=5 "):
        run_calibration(model, model.targets(), batches(), 7)
    with pytest.raises(CalibrationError, match="the data had 0; pass data of at least 1"):
        run_calibration(model, model.targets(), [], 1)


@pytest.mark.parametrize("data", [torch.ones(6, 4), {"x": torch.ones(6, 4)}], ids=["tensor", "mapping"])
def test_one_batch_is_not_taken_for_an_iterable_of_batches(data: Any) -> None:
    model, plain = Net(), nn.Sequential(nn.Linear(4, 4))
    simulating = pyquant.insert_fake_quantize_(nn.Sequential(nn.Linear(4, 4)), pyquant.W4A8Dynamic(None))
    calls = (
        lambda: run_calibration(model, model.targets(), data, 2),
        lambda: pyquant.sensitivity(plain, data, num_batches=2),
        lambda: pyquant.gptq_(simulating, data, num_batches=2),
        lambda: pyquant.finetune(plain, lambda m, x: m(x).sum(), data, lr=0.1, steps=1),
    )
    for call in calls:
        with pytest.raises(ArgumentError, match=r"'(data|loader)': got one (tensor \[6, 4\]|mapping); .*\[batch\]"):
            call()
    assert model.calls == 0


class Encoding(UserDict[str, Any]):
    """A BatchEncoding of transformers is such a mapping, not a dict."""


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: (x, torch.zeros(3)),
        lambda x: [x, torch.zeros(3)],
        lambda x: {"x": x, "labels": torch.zeros(3), "token_type_ids": torch.zeros(3)},
        lambda x: Encoding(x=x, label=1),
        lambda x: ({"x": x}, torch.zeros(3)),
    ],
)
def test_every_kind_of_batch_gives_the_same_statistics(wrap: Any) -> None:
    model = Net()
    plain = run_calibration(model, model.targets(), batches(), 5)
    other = run_calibration(model, model.targets(), [wrap(b) for b in batches()], 5)
    for name in plain:
        assert torch.equal(plain[name]["input"].counts, other[name]["input"].counts)  # type: ignore[attr-defined]


def test_batch_to_inputs_replaces_the_rule() -> None:
    model = Net()
    data = [{"pixels": b, "y": 0} for b in batches()]
    for rule in (
        lambda b: b["pixels"] * 2,
        lambda b: (b["pixels"], 2.0),
        lambda b: {"x": b["pixels"], "scale": 2.0},
    ):
        collected = run_calibration(model, [model.second], data, 5, batch_to_inputs=rule)
        want = run_calibration(model, [model.second], [2 * b for b in batches()], 5)
        assert torch.equal(collected["second"]["input"].amax(), want["second"]["input"].amax())


@pytest.mark.parametrize("bad", ["text", 3, [], {"y": torch.ones(3, 4)}, {"labels": torch.ones(3, 4)}, object()])
def test_batches_that_mean_nothing_are_refused(bad: Any) -> None:
    model = Net()
    before = picture(model)
    with pytest.raises(ArgumentError, match="data"):
        run_calibration(model, model.targets(), [bad], 1)
    assert same_picture(before, picture(model))


def test_eval_mode_and_no_gradients_inside_and_everything_as_before_outside() -> None:
    model = Net().train()
    model.drop.eval()  # flags differ between modules, and must differ afterwards
    seen = []
    model.second.register_forward_hook(lambda m, a, y: seen.append((model.training, y.requires_grad, torch.rand(1))))
    before = picture(model)
    run_calibration(model, model.targets(), batches(), 2)
    assert seen[0][:2] == (False, False)
    assert same_picture(before, picture(model))


@pytest.mark.parametrize("at", range(5))
def test_an_exception_anywhere_leaves_the_model_as_it_was(at: int) -> None:
    """Raised in the data loader, the forward, a start, a callback or the user's rule."""
    model = Net().train()

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted")

    def loader() -> Iterator[Tensor]:
        yield batches()[0]
        if at == 0:
            broken()
        yield batches()[1]

    options: dict[str, Any] = {}
    if at == 1:
        model.norm.register_forward_pre_hook(broken)
    if at == 2:
        model.second.start_calibration = broken  # type: ignore[method-assign]
    if at == 3:
        options["on_batch"] = broken
    if at == 4:
        options["batch_to_inputs"] = broken
    before = picture(model)
    with pytest.raises(RuntimeError, match="planted"):
        run_calibration(model, model.targets(), loader(), 2, **options)
    assert same_picture(before, picture(model))
    assert model.first.statistics is None
    assert model.second.statistics is None


@pytest.mark.parametrize(("layer", "batch"), [("first", 2), ("second", 1)])
def test_a_bad_number_names_layer_and_batch(layer: str, batch: int) -> None:
    model, data = Net(), batches()
    if layer == "first":
        data[batch][1, 2] = torch.nan
    else:
        seen = []
        model.first.register_forward_hook(lambda m, a, y: seen.append(1) or (y + torch.inf if len(seen) == 2 else y))
    before = picture(model)
    with pytest.raises(NonFiniteError, match=rf"\({layer}, batch {batch}\)"):
        run_calibration(model, model.targets(), data, 5)
    assert same_picture(before, picture(model))


def test_layers_that_saw_no_data_are_named() -> None:
    model = Net()
    targets = {"a.b": model.first, "idle": model.unused}
    with pytest.raises(CalibrationError, match=r"1 of 2 layers saw no data: idle"):
        run_calibration(model, targets, batches(), 2)
    collected = run_calibration(model, targets, batches(), 2, on_silent="ignore")
    assert collected["idle"]["input"].count == 0


@pytest.mark.parametrize(
    "options",
    [
        {"num_batches": 0},
        {"num_batches": True},
        {"num_batches": 1.5},
        {"save_every": 2},
        {"save_to": "x"},
        {"save_every": 0, "save_to": "x"},
        {"on_silent": "warn"},
        {"targets": []},
        {"targets": [nn.Linear(1, 1)]},
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any]) -> None:
    model = Net()
    words = {"model": model, "targets": model.targets(), "data": batches(), "num_batches": 2, **options}
    with pytest.raises(ArgumentError):
        run_calibration(**words)


# ---- saving and resuming


@pytest.mark.parametrize("killed_at", range(5))
def test_a_run_that_was_cut_off_goes_on_at_the_batch_and_ends_the_same(killed_at: int, tmp_path: Path) -> None:
    def run(model: Net, data: Any, **options: Any) -> Any:
        return run_calibration(model, model.targets(), data, 5, save_every=2, save_to=str(tmp_path), **options)

    def cut_off() -> Iterator[Tensor]:
        yield from batches()[:killed_at]
        raise KeyboardInterrupt

    model = Net()
    with pytest.raises(KeyboardInterrupt):
        run(model, cut_off())
    model = Net()
    got = run(model, batches())
    assert model.calls == 5 - killed_at // 2 * 2
    fresh = Net()
    want = run_calibration(fresh, fresh.targets(), batches(), 5)
    for name in want:
        a, b = got[name]["input"].state_dict(), want[name]["input"].state_dict()
        assert all(torch.equal(a[k], b[k]) for k in b)


def test_progress_of_something_else_or_damaged_progress_is_refused(tmp_path: Path) -> None:
    def run(model: Net, n: int = 4, targets: Any = None) -> None:
        run_calibration(model, targets or model.targets(), batches(), n, save_every=2, save_to=str(tmp_path))

    run(Net())
    other = Net()
    other.first.bias.data += 1
    third = Net()
    for call in (lambda: run(other), lambda: run(Net(), 5), lambda: run(third, 4, [third.first])):
        with pytest.raises(CheckpointError, match="another"):
            call()
    whole = (tmp_path / FILE).read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], b"", whole[:-200_000] + b"\1" + whole[-199_999:]):
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(CheckpointError):
            run(Net())


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_a_batch_of_another_type_is_named_with_its_layer(dtype: torch.dtype) -> None:
    model = pyquant.prepare_(nn.Sequential(nn.Linear(4, 2)), {"calib_params": {"num_calib_batches": 1}})
    with pytest.raises(pyquant.ArgumentError, match=r"(int64|complex64) \[3, 4\] \(0\.input, batch 0\)"):
        pyquant.calibrate_recipe_(model, {"calib_params": {"num_calib_batches": 1}}, [torch.ones(3, 4, dtype=dtype)])


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.first(x) + y


@pytest.mark.parametrize("error", [ValueError("a or b"), AttributeError("no size"), KeyError("k"), IndexError("i")])
def test_what_a_model_raises_over_a_batch_names_the_batch(error: Exception) -> None:
    model = nn.Sequential(nn.Linear(4, 4))

    def raising(_: nn.Module, args: tuple[torch.Tensor]) -> None:
        if args[0].sum() > 0:
            raise error

    model.register_forward_pre_hook(raising)
    data = [-torch.ones(2, 4), torch.ones(2, 4)]
    with pytest.raises(pyquant.CalibrationError, match=f"on batch 1 the model raised: {type(error).__name__}: "):
        pyquant.quantize_(model, "W8A8", data=data)


def test_batches_that_forward_does_not_take_are_told_with_the_way_out() -> None:
    data = [(torch.ones(2, 4), torch.ones(2, 4))] * 2
    with pytest.raises(ArgumentError, match=r"'data'.*missing a required argument: 'y'.*batch_to_inputs"):
        pyquant.quantize_(TwoInputs(), "W8A8", data=data)
    pyquant.quantize_(TwoInputs(), "W8A8", data=data, batch_to_inputs=lambda batch: batch)


@pytest.mark.parametrize("method", ["max", "percentile", "mse", "entropy"])
def test_a_range_of_zeros_only_is_told(method: str) -> None:
    """A branch behind a gate that is closed until it is trained: its scale would be 1, whatever comes."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    pyquant.insert_fake_quantize_(model, pyquant.W8A8())
    with pytest.warns(pyquant.QuantizationWarning, match=r"only zeros for 1\.input: a scale of 1"):
        calibrate_(model, [torch.randn(8, 4)], 1, method=method)


def adds_y(forward: Any) -> Any:
    @functools.wraps(forward)
    def with_y(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x, torch.zeros(4))

    return with_y


class Decorated(TwoInputs):
    forward = adds_y(TwoInputs.forward)


class Called(TwoInputs):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x, torch.zeros(4))


def hooked_model() -> nn.Module:
    model = TwoInputs()
    model.register_forward_pre_hook(lambda module, args: (*args, torch.zeros(4)))
    return model


@pytest.mark.parametrize("make", [Decorated, Called, hooked_model])
def test_calls_that_work_are_not_judged_by_a_signature(make: Any) -> None:
    pyquant.quantize_(make(), "W8A8", data=[torch.ones(2, 4)])


def test_a_type_error_of_the_model_itself_goes_through() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_forward_hook(lambda module, args, y: y + "1")
    with pytest.raises(TypeError):
        pyquant.quantize_(model, "W8A8", data=[torch.ones(2, 4)])


def test_a_batch_on_meta_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"argument 'data': got float32 .2, 16. on meta"):
        pyquant.quantize_(nn.Sequential(nn.Linear(16, 8)), "W8A8", data=[torch.zeros(2, 16, device="meta")])


def test_layers_in_branches_of_torch_cond_are_named() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, self.one, self.other, (x,))

    with pytest.raises(CalibrationError, match=r"torch\.cond cannot be watched.*W8A8Dynamic"):
        pyquant.quantize_(Either(), "W8A8", data=[torch.randn(2, 8)], check_speed=False)
