"""Layers that are slower in integers are told with figures; what is told follows from the clock alone."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import pyquant
from pyquant import W8A8Dynamic
from pyquant.nn import speed
from pyquant.nn.reordered import Reordered
from pyquant.nn.whole_layer import without
from pyquant.ops.plan import Device


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 32))


def test_slow_layers_are_named_with_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"QLinear16": 4e-6, "Linear16": 2e-6, "QLinear32": 1e-6, "Linear32": 3e-6}
    monkeypatch.setattr(speed, "_seconds", lambda m, x: clock[f"{type(m).__name__}{m.in_features}"])
    with pytest.warns(pyquant.QuantizationWarning) as caught:
        quantised = pyquant.quantize_(model(), W8A8Dynamic(), check_speed=torch.randn(3, 16))
    assert caught[0].filename == __file__
    told = str(caught[0].message)
    assert "2 of 3 layers are slower" in told
    assert "all layers together: 0.78x" in told
    assert "0 [3, 16] 4 us against 2 us (0.50x); 4 [3, 16] 4 us against 2 us (0.50x)" in told
    records = pyquant.compare_speed(quantised, (torch.randn(3, 16),), seconds=0.01)
    assert [(r.name, round(r.ratio, 2)) for r in records] == [("0", 0.5), ("4", 0.5), ("2", 3.0)]
    clock["QLinear16"] = 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        pyquant.quantize_(model(), W8A8Dynamic(), check_speed={"input": torch.randn(3, 16)})


def test_a_layer_is_timed_with_what_is_done_to_its_inputs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: dict[str, torch.dtype] = {}
    clock = {"HadamardLinear": 3e-6, "Reordered": 2e-6, "Linear": 1e-6}

    def read(module: nn.Module, x: torch.Tensor) -> float:
        timed[type(module).__name__] = x.dtype
        return clock[type(module).__name__]

    monkeypatch.setattr(speed, "_seconds", read)
    monkeypatch.setattr(speed, "_at_rows", {})
    order = torch.randperm(16)
    first = pyquant.HadamardLinear.from_linear(nn.Linear(16, 16), 16)
    wrapped = nn.Sequential(first, Reordered(nn.Linear(16, 32), order)).bfloat16()
    quantised = pyquant.quantize_(copy.deepcopy(wrapped), W8A8Dynamic(), check_speed=False)
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    records = pyquant.compare_speed(quantised, x, seconds=0.01)
    assert [(r.name, round(r.ratio, 2)) for r in records] == [("0.linear", 0.33), ("1.linear", 0.5)]
    assert timed == dict.fromkeys(clock, torch.bfloat16)  # as the model calls them, not the float32 of the transform
    with pytest.warns(pyquant.QuantizationWarning, match=r"0.linear \[1, 16\] 3 us against 1 us"):
        pyquant.quantize_(copy.deepcopy(wrapped), pyquant.W8A16())
    for index, module in enumerate(wrapped):  # what they are compared with is the same function
        real = without(module, module.linear)
        assert type(real) is nn.Linear
        torch.testing.assert_close(real(x), module(x), rtol=0.05, atol=0.05)
        assert index == 0 or torch.equal(real.weight[:, order], module.linear.weight)


def test_an_example_that_fails_leaves_the_model_and_no_hooks() -> None:
    whole = model()
    with pytest.raises(pyquant.ArgumentError, match="in_features"):
        pyquant.quantize_(whole, W8A8Dynamic(), check_speed=torch.randn(3, 17))
    assert type(whole[0]) is nn.Linear  # type: ignore[index]
    quantised = pyquant.quantize_(whole, W8A8Dynamic())
    with pytest.raises(pyquant.ArgumentError, match="in_features"):
        pyquant.compare_speed(quantised, torch.randn(3, 17))
    assert not any(m._forward_pre_hooks for m in quantised.modules())


def test_convolutions_and_wrong_arguments() -> None:
    conv = pyquant.quantize_(nn.Sequential(nn.Conv2d(3, 8, 3)), W8A8Dynamic())
    assert [r.shape for r in pyquant.compare_speed(conv, torch.randn(1, 3, 8, 8), seconds=0.01)] == [(1, 3, 8, 8)]
    for wrong in (0, -1, float("inf"), "2", True):
        with pytest.raises(pyquant.ArgumentError, match="seconds"):
            pyquant.compare_speed(conv, torch.randn(1, 3, 8, 8), seconds=wrong)  # type: ignore[arg-type]
    with pytest.raises(pyquant.ArgumentError, match="without quantised layers"):
        pyquant.compare_speed(model(), torch.randn(3, 16))


# ---- without an example: convolutions of short rows


def mobile() -> nn.Module:
    """As MobileNet's: narrow 1x1 convolutions twice each, and a wide one."""
    narrow = [nn.Conv2d(16, 96, 1), nn.Conv2d(96, 16, 1), nn.Conv2d(16, 96, 1), nn.Conv2d(96, 16, 1)]
    return nn.Sequential(*narrow, nn.Conv2d(16, 64, 5), nn.Conv2d(64, 8, 3))


def fake_clock(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> list[str]:
    """Calls take what is said of a class and its channels; -> what was timed."""
    timed: list[str] = []

    def read(module: nn.Module, x: torch.Tensor) -> float:
        key = f"{type(module).__name__}{module.in_channels}"
        timed.append(key)
        assert x.shape == (1, module.in_channels, 28, 28)
        return seconds[key]

    monkeypatch.setattr(speed, "_seconds", read)
    monkeypatch.setattr(speed, "_timed", {})
    return timed


def test_small_convolutions_are_told_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = fake_clock(monkeypatch, QConv2d16=4e-6, Conv2d16=1e-6, QConv2d96=1.05e-6, Conv2d96=1e-6)
    with pytest.warns(pyquant.QuantizationWarning, match="slower in integers") as caught:
        pyquant.quantize_(mobile(), W8A8Dynamic())
    assert caught[0].filename == __file__
    told = str(caught[0].message)
    assert "2 convolutions are slower" in told
    assert "0 [1, 16, 28, 28] 4 us against 1 us (0.25x); 2 [1, 16, 28, 28] 4 us against 1 us (0.25x)." in told
    assert "one image of 28 x 28; check_speed=batch times the model's own shapes" in told
    assert set(timed) == {"QConv2d16", "Conv2d16", "QConv2d96", "Conv2d96"}
    assert "64" not in "".join(timed)  # 64 * 3 * 3 and 16 * 5 * 5 codes a patch: not short
    count = len(timed)
    with pytest.warns(pyquant.QuantizationWarning, match="slower in integers"):
        whole = pyquant.quantize_(mobile(), W8A8Dynamic())
    assert len(timed) == count  # once in a process
    assert isinstance(whole[0], pyquant.QConv2d)  # type: ignore[index]


def test_a_recipe_is_told_of_as_a_scheme_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_clock(monkeypatch, QConv2d16=4e-6, Conv2d16=1e-6, QConv2d96=1.05e-6, Conv2d96=1e-6)
    recipe = pyquant.Recipe.from_dict({"default": "W8A8Dynamic"})
    for quantise in (pyquant.quantize_, pyquant.quantize_recipe_):
        with pytest.warns(pyquant.QuantizationWarning, match="2 convolutions are slower") as caught:
            quantise(mobile(), recipe)  # type: ignore[operator]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        pyquant.quantize_(mobile(), recipe, check_speed=False)
        whole = mobile()
        with pytest.raises(pyquant.QuantizationWarning):
            pyquant.quantize_(whole, recipe)
    assert type(whole[0]) is nn.Conv2d  # type: ignore[index]
    with pytest.raises(pyquant.ArgumentError, match="check_speed"):
        pyquant.quantize_(model(), recipe, check_speed=True)


def test_nothing_is_timed_where_nobody_wants_it_or_nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = fake_clock(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        pyquant.quantize_(mobile(), W8A8Dynamic(), check_speed=False)
        pyquant.quantize_(mobile(), pyquant.W8A16())
        pyquant.quantize_(nn.Sequential(nn.Conv2d(64, 64, 3)), W8A8Dynamic())
        pyquant.quantize_(model(), W8A8Dynamic())
        watched = mobile()
        for layer in watched.children():
            layer.register_forward_hook(lambda *_: timed.append("a hook of the user's"))
        pyquant.quantize_(watched, W8A8Dynamic())
    assert timed == []
    with pytest.raises(pyquant.ArgumentError, match="check_speed"):
        pyquant.quantize_(model(), W8A8Dynamic(), check_speed=True)


def test_a_look_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_clock(monkeypatch, QConv2d16=4e-6, Conv2d16=1e-6, QConv2d96=4e-6, Conv2d96=1e-6)
    now = iter(range(10_000))
    monkeypatch.setattr(speed, "perf_counter", lambda: 0.1 * next(now))
    quantised = pyquant.quantize_(mobile(), W8A8Dynamic(), check_speed=False)
    assert [one.name for one in speed.short_convolutions(quantised)] == ["0", "2"]
    assert speed.short_convolutions(quantised, seconds=0.0)  # what was timed before is known


def test_a_warning_made_an_error_takes_the_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_clock(monkeypatch, QConv2d16=4e-6, Conv2d16=1e-6, QConv2d96=4e-6, Conv2d96=1e-6)
    whole = mobile()
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        with pytest.raises(pyquant.QuantizationWarning):
            pyquant.quantize_(whole, W8A8Dynamic())
    assert {type(m) for m in whole.children()} == {nn.Conv2d}


# ---- without an example: weight-only Linears, and what the plan knows


def weight_only() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(1024, 1025))


def test_weight_only_linears_of_a_cpu_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"QLinear1": 9e-6, "Linear1": 3e-6, "QLinear32": 8e-6, "Linear32": 4e-6}
    timed: list[int] = []

    def read(module: nn.Module, x: torch.Tensor) -> float:
        timed.append(module.in_features)
        return clock[f"{type(module).__name__}{len(x)}"]

    monkeypatch.setattr(speed, "_seconds", read)
    monkeypatch.setattr(speed, "_at_rows", {})
    with pytest.warns(pyquant.QuantizationWarning, match="slower in integers") as caught:
        pyquant.quantize_(weight_only(), pyquant.W8A16())
    told = str(caught[0].message)
    assert "2 weight-only Linears are slower" in told
    assert "(timed at 1 and 32 rows; check_speed" in told
    assert "0 [32, 16] 8 us against 4 us (0.50x); 1 [32, 32] 8 us against 4 us (0.50x)." in told
    assert set(timed) == {16, 32}  # beyond 2^20 weights a call is no moment
    count = len(timed)
    with pytest.warns(pyquant.QuantizationWarning, match="slower in integers"):
        pyquant.quantize_(weight_only(), pyquant.W8A16())
    assert len(timed) == count
    clock["QLinear1"] = 2e-6  # quicker at one of them: no word without an example
    monkeypatch.setattr(speed, "_at_rows", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        pyquant.quantize_(weight_only(), pyquant.W8A16())
        pyquant.quantize_(weight_only(), pyquant.W8A16(), check_speed=False)


def test_what_the_plan_knows_to_be_slower_at_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyquant._native", reason="the compiled module is not built")
    h200 = Device(sm=90, sm_count=132, shared_bytes=232448, l2_bytes=62914560, dram_gbps=4800)

    def layer(n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> pyquant.QLinear:
        return pyquant.QLinear(k, n, scheme=W8A8Dynamic(), device="meta", dtype=dtype)

    layers = {"small": layer(256, 256), "large": layer(8192, 8192), "wide": layer(256, 256, torch.float32)}
    ((one, source),) = speed.slower_by_plan(layers, h200, only_compiled=False)
    assert (one.name, source) == ("small", "by the cost model")
    assert one.ratio < 0.9
    monkeypatch.setattr(speed, "_known_by_plan", lambda model: [(one, source)])
    with pytest.warns(pyquant.QuantizationWarning, match="1 Linears on a GPU are slower") as caught:
        pyquant.quantize_(nn.Sequential(nn.Linear(16, 16)), W8A8Dynamic())
    assert "(at every number of rows, by the cost model; " in str(caught[0].message)
    assert f"small {list(one.shape)} " in str(caught[0].message)
