"""Other people's architectures: they quantise, run, and give what the float model gives, to the precision of codes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architecture_table import CHAOTIC, NIGHTLY, QUICK, Made
from sample import sampled
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pyquant

_LEAST_DB = 20.0  # of the signal over the error; the worst of the random models gives 23


def _outputs(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    result = model(inputs["x"]) if set(inputs) == {"x"} else model(**inputs)
    result = result.to_tuple() if hasattr(result, "to_tuple") else result
    return [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]


def _decibels(real: Tensor, other: Tensor) -> float:
    return float(10 * torch.log10(real.double().square().sum() / (real.double() - other.double()).square().sum()))


def _check(make: Callable[[], Made], dtype: torch.dtype = torch.float32) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = _outputs(model, inputs)[0]
        pyquant.quantize_(model, pyquant.W8A8Dynamic(), embeddings=True, heads=True)
        assert any(isinstance(m, pyquant.QLinear | pyquant.QConv2d | pyquant.QEmbedding) for m in model.modules())
        got = _outputs(model, inputs)[0]
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert _decibels(want, got) > _LEAST_DB


@pytest.mark.parametrize("name", sampled([n for n in QUICK if n not in CHAOTIC], len(QUICK) // 2, "architectures"))
def test_it_runs_and_is_right(name: str) -> None:
    pytest.importorskip("transformers")
    _check(QUICK[name])


@pytest.mark.parametrize("name", sorted(CHAOTIC))
def test_every_layer_of_a_chaotic_model_is_right(name: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, inputs = QUICK[name]()
    floats = dict(copy.deepcopy(model).named_modules())
    pyquant.quantize_(model, pyquant.W8A8Dynamic(), embeddings=True, heads=True)
    found: dict[str, float] = {}

    def compare(layer: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
            found[layer] = _decibels(floats[layer](*args), y)

        return hook

    for layer, module in model.named_modules():
        if isinstance(module, pyquant.QLinear | pyquant.QConv2d):
            module.register_forward_hook(compare(layer))
    with torch.inference_mode():
        assert all(y.isfinite().all() for y in _outputs(model, inputs))
    assert len(found) == sum(isinstance(m, nn.Conv2d | nn.Linear) for m in floats.values()) > 20
    assert min(found.values()) > 30, found


@pytest.mark.nightly
@pytest.mark.parametrize("name", NIGHTLY)
def test_other_libraries(name: str) -> None:
    _check(NIGHTLY[name])


def test_the_comparison_can_fail() -> None:
    x = torch.randn(100)
    assert _decibels(x, x + 0.3 * torch.randn(100)) < _LEAST_DB


def test_t5_does_not_dequantise_what_it_only_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5 looks at wo.weight.dtype three times a call; that once cost more than all its products."""
    pytest.importorskip("transformers")
    from pyquant.nn import weight_view

    model, inputs = QUICK["T5"]()
    pyquant.quantize_(model, pyquant.W8A8Dynamic())

    def refuse(*args: object) -> None:
        raise AssertionError("a weight was dequantised")

    monkeypatch.setattr(weight_view.Form, "codes", refuse)
    with torch.inference_mode():
        _outputs(model, inputs)
