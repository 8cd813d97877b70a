"""Distances of outputs against float64 references by hand; the cut into batches changes not one bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import pyquant
from pyquant.errors import ArgumentError, CalibrationError, NonFiniteError
from pyquant.mixed_precision.loss import metrics
from pyquant.mixed_precision.loss.metrics import (
    OUTPUT_METRICS,
    Accumulator,
    find_metric,
)


def _pair(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(shape, generator=generator)
    return (reference * 3).to(dtype), (reference * 3 + torch.randn(shape, generator=generator)).to(dtype)


def _distance(name: str, reference: torch.Tensor, output: torch.Tensor) -> float:
    accumulator = Accumulator(name)
    accumulator.add(reference, output)
    return accumulator.value()


def _by_hand(name: str, reference: torch.Tensor, output: torch.Tensor) -> float:
    rows = [t.double().reshape(-1, t.shape[-1]).numpy() for t in (reference, output)]
    total, count, signal = [], 0, []
    for a, b in zip(*rows, strict=True):
        count += 1
        if name == "kl":
            p, q = (np.exp(v - v.max()) / np.exp(v - v.max()).sum() for v in (a, b))
            total.append(math.fsum(p * np.log(p / q)))
        elif name == "cosine":
            total.append(1 - float(a @ b) / math.sqrt(float(a @ a) * float(b @ b)))
        else:
            total.append(math.fsum((a - b) ** 2) / (len(a) if name == "mse" else 1))
            signal.append(math.fsum(a**2))
    return math.fsum(total) / (math.fsum(signal) if name == "sqnr" else count)


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 11), (1, 2), (9,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["kl", "sqnr", "mse", "cosine"])
def test_against_the_definition(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    reference, output = _pair(*shape, dtype=dtype)
    expected = _by_hand(name, reference, output)
    assert _distance(name, reference, output) == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert expected > 1e-4


@pytest.mark.parametrize("name", OUTPUT_METRICS)
def test_the_cut_into_batches_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, output = _pair(37, 13)
    values = set()
    for cut in ([37], [1] * 37, [5, 20, 12], [36, 1]):
        for chunk in (2**22, 50):
            monkeypatch.setattr(metrics, "_CHUNK", chunk)
            distance = Accumulator(name)
            for a, b in zip(reference.split(cut), output.split(cut), strict=True):
                distance.add(a, b)
            values.add(distance.value())
    assert len(values) == 1
    backwards = Accumulator(name)
    backwards.add(reference.flip(0), output.flip(0))
    assert values == {backwards.value()}


@pytest.mark.parametrize("name", OUTPUT_METRICS)
def test_equal_outputs_have_no_distance(name: str) -> None:
    reference, _ = _pair(4, 6)
    assert _distance(name, reference, reference.clone()) == 0


def test_edges() -> None:
    zero, one = torch.zeros(2, 3), torch.ones(2, 3)
    assert _distance("sqnr", zero, zero) == _distance("sqnr", one, one) == 0
    assert _distance("sqnr", zero, one) == math.inf
    assert _distance("sqnr", 10 * one, 11 * one) == pytest.approx(0.01)
    assert _distance("cosine", zero, zero) == 0
    assert _distance("cosine", zero, one) == _distance("cosine", one, zero) == 1
    assert _distance("cosine", one, -one) == pytest.approx(2)
    tiny = torch.tensor([[1.0, 1e-7]], dtype=torch.float64)
    assert _distance("cosine", torch.tensor([[1.0, 0.0]], dtype=torch.float64), tiny) == pytest.approx(
        0.5e-14, rel=0.05
    )
    assert _distance("kl", torch.tensor([[1e4, -1e4]]), torch.tensor([[1e4, -1e4]])) == 0
    assert _distance("kl", torch.tensor([[0.0, -1e4]]), torch.tensor([[0.0, 1e4]])) == pytest.approx(1e4, rel=1e-3)


@pytest.mark.parametrize("metric", ["kl", "cosine"])
def test_one_number_a_row_has_no_direction(metric: str) -> None:
    with pytest.raises(ArgumentError, match=rf"'{metric}' of outputs \[..., 1\]; allowed: 'mse' or 'sqnr'"):
        _distance(metric, torch.rand(5, 1), torch.rand(5, 1))


@pytest.mark.parametrize("metric", ["fisher", "hessian", "noise", "kl", "cosine"])
def test_layers_of_a_model_with_one_output_are_not_said_to_cost_nothing(metric: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).eval()
    data = [torch.randn(6, 4) for _ in range(2)]
    with pytest.raises(ArgumentError, match=r"of outputs \[..., 1\]; allowed: 'mse' or 'sqnr'"):
        pyquant.sensitivity(model, data, ("float", "W8A8Dynamic"), metric=metric, num_batches=2)


def test_bad_input_is_refused_with_its_batch() -> None:
    good = torch.ones(2, 3)
    for name in OUTPUT_METRICS:
        distance = Accumulator(name)
        with pytest.raises(CalibrationError, match="no rows"):
            distance.value()
        distance.add(good, good)
        for value in (math.nan, math.inf):
            bad = good.clone()
            bad[1, 2] = value
            with pytest.raises(NonFiniteError, match="batch 1"):
                distance.add(good, bad)
    with pytest.raises(ArgumentError, match=r"\[2, 3\]"):
        _distance("mse", good, torch.ones(3, 2))
    with pytest.raises(ArgumentError, match="floating-point"):
        _distance("mse", good, torch.ones(2, 3, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="floating-point"):
        _distance("mse", torch.tensor(1.0), torch.tensor(1.0))
    with pytest.raises(ArgumentError, match="two columns"):
        _distance("kl", torch.ones(4, 1), torch.ones(4, 1))
    with pytest.raises(ArgumentError, match="'kl'"):
        find_metric("entropy")
