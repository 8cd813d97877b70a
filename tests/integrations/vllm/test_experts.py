"""Experts in vLLM's RoutedExperts without an engine: what is served, what is left to vLLM, and what is an error."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import accept
import pytest
import torch

import pyquant
from pyquant import W4A16, W8A8Dynamic
from pyquant.io.compressed_tensors import pack_to_int32

pytestmark = pytest.mark.nightly
pytest.importorskip("vllm", reason="vLLM is in an environment of its own: make nightly-vllm")

experts = importlib.import_module("pyquant.integrations.vllm.experts")
E, H, WIDE = 3, 64, 32


def words(**changes: Any) -> SimpleNamespace:
    said = {
        "num_bits": 8,
        "type": "int",
        "strategy": "channel",
        "symmetric": True,
        "dynamic": False,
        "group_size": None,
    }
    return SimpleNamespace(**said | changes)


def bank(**changes: Any) -> torch.nn.Module:
    """As much of vLLM's RoutedExperts as a method looks at."""
    layer = torch.nn.Module()
    held = {"activation": SimpleNamespace(value="silu"), "apply_router_weight_on_input": False, "expert_map": None}
    layer.__dict__.update(held | {"moe_config": SimpleNamespace(has_bias=False)} | changes)
    return layer


BY_TOKEN = words(strategy="token", dynamic=True)
LEFT: dict[str, tuple[dict[str, Any], Any, Any, str]] = {
    "fp8": ({}, words(type="float"), None, "type float"),
    "3 bits": ({}, words(num_bits=3), None, "3 bits"),
    "affine": ({}, words(symmetric=False), None, "zero points"),
    "static": ({}, words(), words(strategy="tensor"), "inputs other than"),
    "activation": ({"activation": SimpleNamespace(value="swigluoai")}, words(), None, "activation swigluoai"),
    "limit": ({"swiglu_limit": 7.0}, words(), None, "silu with swiglu_limit"),
    "biases": ({"moe_config": SimpleNamespace(has_bias=True)}, words(), None, "biases"),
    "weighted": ({"apply_router_weight_on_input": True}, words(), None, "routing weights"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_to_vllm_has_a_reason(case: str) -> None:
    changes, weights, inputs, told = LEFT[case]
    why = experts.why_left(bank(**changes), {"weights": weights, "input_activations": inputs}, "int-quantized")
    assert isinstance(why, str)
    assert told in why


def filled(scheme: pyquant.QScheme, **changes: Any) -> tuple[Any, torch.nn.Module, list[tuple[Any, Any]]]:
    """A method, its layer with numbers of QLinears in it, and those."""
    torch.manual_seed(3)
    sizes = ((2 * WIDE, H), (H, WIDE))
    floats = [[torch.nn.Linear(k, n, bias=False) for n, k in sizes] for _ in range(E)]
    pairs = [tuple(pyquant.QLinear.from_float(one, scheme) for one in pair) for pair in floats]
    w = scheme.weights
    said = words(num_bits=w.bits, strategy="group" if w.group_size else "channel", group_size=w.group_size)
    packed = "pack-quantized" if scheme.inputs is None else "int-quantized"
    inputs = None if scheme.inputs is None else BY_TOKEN
    layer = bank(**changes)
    served = experts.why_left(layer, {"weights": said, "input_activations": inputs}, packed)
    method = experts.PyquantExpertsMethod.__new__(experts.PyquantExpertsMethod)
    method.served, method.name = served, "experts"
    method.create_weights(layer, E, H, WIDE, torch.float32, weight_loader=None)
    for e, pair in enumerate(pairs):
        for part, own in zip(("w13", "w2"), pair):
            codes = pack_to_int32(own.codes, w.bits) if scheme.inputs is None else own.codes
            name = f"{part}_weight" + ("_packed" if scheme.inputs is None else "")
            getattr(layer, name).data[e] = codes
            getattr(layer, f"{part}_weight_scale").data[e] = own.weight_scale.reshape(len(codes), -1)
    return method, layer, pairs


def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(E, generator=generator)[:2] for _ in range(7)])
    return torch.randn(7, H, generator=generator), torch.rand(7, 2, generator=generator), ids.int()


@pytest.mark.parametrize("scheme", [W8A8Dynamic(), W4A16(16)], ids=str)
@pytest.mark.parametrize("places", [None, [1, -1, 0]])
def test_experts_have_the_bits_of_their_layers(scheme: pyquant.QScheme, places: list[int] | None) -> None:
    """places: where the experts are on this rank, in vLLM's words; -1: on another."""
    table = None if places is None else torch.tensor(places, dtype=torch.int32)
    method, layer, pairs = filled(scheme, expert_map=table)
    method.process_weights_after_loading(layer)
    assert all(p is None for p in layer._parameters.values())
    x, weights, ids = routed()
    got = method.apply(layer, x, weights, ids, None, None)
    wanted = torch.zeros_like(x)
    for t in range(len(x)):
        for j in range(2):
            place = int(ids[t, j]) if places is None else places[int(ids[t, j])]
            if place >= 0:
                up, down = pairs[place]
                gate, value = up(x[t : t + 1]).chunk(2, -1)
                wanted[t] += weights[t, j] * down(torch.nn.functional.silu(gate) * value)[0]
    accept.t1(got, wanted)


def test_a_scale_that_no_file_had_is_an_error() -> None:
    method, layer, _ = filled(W8A8Dynamic())
    layer.w2_weight_scale.data[1] = float("nan")
    with pytest.raises(pyquant.CheckpointError, match=r"'experts'.*was it in the checkpoint"):
        method.process_weights_after_loading(layer)


def test_weights_are_loaded_once() -> None:
    method, layer, _ = filled(W8A8Dynamic())
    method.process_weights_after_loading(layer)
    with pytest.raises(pyquant.CheckpointError, match=r"were packed.*start a new engine"):
        method.process_weights_after_loading(layer)


def test_groups_that_do_not_divide_a_share_are_an_error() -> None:
    method, _, _ = filled(W4A16(16))
    with pytest.raises(pyquant.CheckpointError, match=r"24 inputs of w2; allowed: multiples of 16"):
        method.create_weights(bank(), E, H, 24, torch.float32, weight_loader=None)
