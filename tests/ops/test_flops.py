"""torch.utils.flop_counter sees quantised layers as it sees the float ones."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import pyquant
from pyquant import ops

FLOATS = {
    "linear": (nn.Linear(96, 64), (2, 5, 96)),
    "convolution": (nn.Conv2d(8, 12, 3, padding=1), (2, 8, 9, 9)),
    "groups": (nn.Conv2d(8, 12, 3, groups=2, stride=2), (2, 8, 9, 9)),
    "depthwise": (nn.Conv2d(8, 8, 3, groups=8), (2, 8, 9, 9)),
}


def counted(call: Any, *args: Any) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call(*args)
    return counter.get_total_flops()


SCHEMES = [
    pyquant.W8A8(),
    pyquant.W8A8Dynamic(),
    pyquant.W4A8Dynamic(group_size=None),
    pyquant.W8A16(),
    pyquant.W4A16(None),
    pyquant.FP16(),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("kind", FLOATS)
def test_layers(kind: str, scheme: pyquant.QScheme) -> None:
    layer, shape = FLOATS[kind]
    x, model = torch.randn(shape), nn.Sequential(copy.deepcopy(layer))
    want = counted(model, x)
    pyquant.quantize_(model, scheme, data=[x] if scheme.is_static else None, check_speed=False)
    assert type(model[0]) is not type(layer)
    assert counted(model, x) == want > 0


@pytest.mark.parametrize("scheme", [pyquant.W8A8Dynamic(), pyquant.W8A16(), pyquant.FP16()], ids=str)
def test_a_frozen_layer_costs_one_product_forward_and_one_back(scheme: pyquant.QScheme) -> None:
    """Under adapters: no product for a gradient of weights that have none."""
    model = pyquant.quantize_(nn.Sequential(nn.Linear(96, 64)), scheme, check_speed=False)
    x = torch.randn(5, 96, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert x.grad is not None
    assert counter.get_total_flops() == 2 * 2 * 5 * 96 * 64


def test_products_of_a_derivative_are_those_that_are_asked_for() -> None:
    x, w = torch.randn(5, 96), torch.randn(64, 96)
    for needs in ((True, False), (False, True), (True, True)):
        leaves = [t.clone().requires_grad_(need) for t, need in zip((x, w), needs, strict=True)]
        with FlopCounterMode(display=False) as counter:
            ops.float_linear(*leaves).sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == list(needs)
        assert counter.get_total_flops() == (1 + sum(needs)) * 2 * 5 * 96 * 64


def _codes(*shape: int) -> Tensor:
    return torch.randint(-7, 8, shape, dtype=torch.int8)


@pytest.mark.parametrize(
    ("product", "x", "w"),
    [
        (ops.gemm_s8s8, _codes(3, 32), _codes(5, 32)),
        (ops.gemm_s8s4, _codes(3, 32), ops.pack_int4(_codes(5, 32))),
        (ops.gemm_s4s4, ops.pack_int4(_codes(3, 32)), ops.pack_int4(_codes(5, 32))),
        (ops.gemm, _codes(3, 32), ops.pack_int4(_codes(5, 32))),
    ],
)
def test_products(product: Any, x: Tensor, w: Tensor) -> None:
    assert counted(partial(product, out_dtype=torch.int32), x, w) == 2 * 3 * 5 * 32


@pytest.mark.skipif(not ops.native_available(), reason="without the compiled library")
@pytest.mark.parametrize("scheme", [pyquant.W8A8Dynamic(), pyquant.W4A16(None)], ids=str)
def test_layers_that_share_a_call(scheme: pyquant.QScheme) -> None:
    layers = [pyquant.QLinear.from_float(nn.Linear(32, 8), scheme) for _ in range(3)]
    x, ends = torch.randn(6, 32), torch.tensor([1, 1, 6], dtype=torch.int32)
    storage = [layer.storage for layer in layers]
    if scheme.is_integer:
        call = torch.ops.pyquant._grouped_linear.default
        assert counted(call, x, storage, ends, layers[0]._spec) == 2 * 6 * 32 * 8
    else:
        call, scales = torch.ops.pyquant._grouped_weight_only.default, [layer.weight_scale for layer in layers]
        assert counted(call, x, storage, scales, [], [], ends, 4, 0, "none", 0.0, 0.0) == 2 * 6 * 32 * 8


PROGRAM = """
import sys, torch
{first}
import pyquant
assert ("torch.utils.flop_counter" in sys.modules) is {early}, "imported for everybody"
model = pyquant.quantize_(torch.nn.Sequential(torch.nn.Linear(8, 4)), "W8A8Dynamic", check_speed=False)
import importlib.util
assert importlib.util.find_spec("torch.utils.flop_counter") is not None  # who only asks takes nothing away
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    model(torch.zeros(3, 8))
print(counter.get_total_flops(), sum("pyquant" in type(finder).__module__ for finder in sys.meta_path))
"""


@pytest.mark.parametrize("early", [False, True])
def test_the_counter_is_imported_by_those_who_count(early: bool) -> None:
    """It imports triton."""
    first = "import torch.utils.flop_counter" if early else ""
    command = [sys.executable, "-c", PROGRAM.format(first=first, early=early)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.stdout.split() == [str(2 * 3 * 4 * 8), "0"], run.stderr
