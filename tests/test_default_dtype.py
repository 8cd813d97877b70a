"""torch's default dtype is the user's: pyquant's own numbers have the types that it gives them."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pyquant

ROOT = Path(__file__).resolve().parents[1]
MAKERS = {"empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "zeros"}  # of floats, if not told
DEFAULTS = (torch.bfloat16, torch.float64)
PRESETS = (
    "W8A8",
    "W8A8Dynamic",
    "W4A8Dynamic(group_size=32)",
    "W4A8Dynamic(group_size=None)",
    "W4A8TwoLevelDynamic(group_size=32)",
    "W4A4Dynamic",
    "W4A16(group_size=32)",
    "W4A16(symmetric=False, group_size=32)",
    "W8A16",
    "FP16",
)


def without_dtype(source: str) -> Iterator[int]:
    """The lines of calls torch.<maker>(...) that name no type."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(of := node.func, ast.Attribute) and isinstance(of.value, ast.Name):
            named = {keyword.arg for keyword in node.keywords}
            if of.value.id == "torch" and of.attr in MAKERS and not named & {"dtype", "out", None}:
                yield node.lineno


def test_every_tensor_of_floats_is_made_of_a_named_type() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "pyquant").rglob("*.py"))
        if "bench" not in path.parts  # programs of their own
        for line in without_dtype(path.read_text())
    ]
    assert not found, f"made of the user's default type: {', '.join(found)}"


def test_the_rule_sees_what_it_is_for() -> None:
    source = "torch.zeros(3)\ntorch.zeros(3, dtype=t)\ntorch.zeros_like(x)\ntorch.arange(3)\ntorch.empty(\n  3, **like)"
    assert [*without_dtype(source)] == [1]


def net() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32), nn.LayerNorm(32), nn.Linear(32, 8)).eval()
    return model.float()


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(16, 64, generator=generator, dtype=torch.float32) ** 3 for _ in range(4)]


def preset(name: str, **options: object) -> Callable[[nn.Module], nn.Module]:
    return lambda model: pyquant.quantize_(model, name, data=data(), check_speed=False, num_batches=4, **options)


def calibrated(method: str) -> Callable[[nn.Module], nn.Module]:
    def run(model: nn.Module) -> nn.Module:
        pyquant.SelectiveQuantizer(verbose=False).quantize_module(model)
        pyquant.QuantizationCalibrator().calibrate_model(model, data(), method=method, num_calib_batches=4)
        return pyquant.convert_(model)

    return run


def trained(**options: object) -> Callable[[nn.Module], nn.Module]:
    def run(model: nn.Module) -> nn.Module:
        pyquant.prepare_qat_(model, pyquant.W4A8Dynamic(32), **options)
        pyquant.finetune(model, lambda m, x: m(x).square().mean(), data(), lr=0.01, steps=2)
        return pyquant.convert_(model)

    return run


FLOWS = {name: preset(name) for name in PRESETS}
FLOWS |= {name: preset("W4A8Dynamic(group_size=32)", improve=[name]) for name in ("gptq", "learn_rounding", "smooth")}
FLOWS |= {method: calibrated(method) for method in ("max", "percentile", "entropy", "mse")}
FLOWS |= {"training": trained(), "learned ranges": trained(learn_amax=True)}


@pytest.mark.parametrize("flow", FLOWS)
def test_numbers_are_the_same_under_any_default(flow: str) -> None:
    floats = net()
    want = FLOWS[flow](copy.deepcopy(floats)).state_dict()
    for dtype in DEFAULTS:
        torch.set_default_dtype(dtype)
        try:
            got = FLOWS[flow](copy.deepcopy(floats)).state_dict()
        finally:
            torch.set_default_dtype(torch.float32)
        assert got.keys() == want.keys()
        wrong = [n for n, t in want.items() if t.dtype != got[n].dtype or not torch.equal(t, got[n])]
        assert not wrong, f"{dtype}: {wrong}"
