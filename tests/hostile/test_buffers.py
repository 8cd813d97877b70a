"""Buffers that an op writes share no memory with its operands and are no leaves; loads name what is wrong."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyquant
from pyquant import ops
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io import load_checkpoint, read_manifest, save_checkpoint
from pyquant.io.atomic import read_file
from pyquant.ops import fallback, translate

GIVEN = ("per_tensor", 0, -127, 127)


def registered(name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        try:
            return getattr(torch.ops.pyquant, name)(*args)
        except RuntimeError as error:
            translate.reraise(error)

    return call


@pytest.fixture(params=["registered", "fallback"])
def op(request: pytest.FixtureRequest) -> Callable[[str], Callable[..., Any]]:
    return registered if request.param == "registered" else lambda name: fallback.IMPLEMENTATIONS[name]


def test_overlapping_buffers_of_fake_quantize_out_are_refused(op: Callable[[str], Callable[..., Any]]) -> None:
    memory, scale, zero = torch.randn(64), torch.ones(1), torch.zeros(1, dtype=torch.int32)
    x, mask = memory[:32], torch.empty(4, dtype=torch.uint8)
    run = op("fake_quantize_out")
    for name, y, written_mask in [
        ("y", memory[1:33], mask),
        ("y", memory[31:63], mask),
        ("mask", memory[32:], memory.view(torch.uint8)[124:128]),
        ("mask", memory[32:], memory.view(torch.uint8)[200:204]),
        ("y", memory.as_strided((32,), (1,), 8), mask),
    ]:
        with pytest.raises(ArgumentError, match=f"argument '{name}': got memory that argument"):
            run(x, scale, zero, *GIVEN, y, written_mask)
    with pytest.raises(ArgumentError, match="argument 'y': got memory that argument 'scale' shares"):
        run(x, memory[40:41].fill_(1.0), None, *GIVEN, memory[32:], mask)
    want = ops.fake_quantize(x, scale, zero)
    run(x, scale, zero, *GIVEN, memory[32:], mask)  # neighbours
    torch.testing.assert_close(memory[32:], want[0], rtol=0, atol=0)
    run(x, scale, zero, *GIVEN, x, mask)  # in place
    torch.testing.assert_close(x, want[0], rtol=0, atol=0)
    assert torch.equal(mask, want[1])


def test_overlapping_buffers_of_the_others_are_refused(op: Callable[[str], Callable[..., Any]]) -> None:
    memory = torch.randn(64)
    integers = memory.view(torch.int32)
    x, y, scale = memory[:32].view(4, 8), memory[32:64].view(4, 8), torch.empty(4)
    given = ("per_token", 0, True, -7, 7)
    run = op("fake_quantize_dynamic_out")
    for name, buffers in {
        "y": (memory[8:40].view(4, 8), scale, torch.empty(4, dtype=torch.int32)),
        "scale": (y, memory[:4], torch.empty(4, dtype=torch.int32)),
        "zero_point": (y, scale, integers[60:]),
    }.items():
        with pytest.raises(ArgumentError, match=f"argument '{name}': got memory"):
            run(x, *given, *buffers)
    run(x, *given, x, scale, torch.empty(4, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="argument 'grad': got memory that argument 'mask' shares"):
        op("fake_quantize_backward_")(memory[:32], memory.view(torch.uint8)[:4])


def test_leaves_that_require_grad_are_not_written() -> None:
    leaf, mask = torch.zeros(8, requires_grad=True), torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match="argument 'grad': got a leaf that requires grad"):
        ops.fake_quantize_backward_(leaf, mask)
    with pytest.raises(ArgumentError, match="argument 'y': got a leaf"):
        ops.fake_quantize_out(torch.zeros(8), torch.ones(1), None, *GIVEN, leaf, mask)
    with pytest.raises(ArgumentError, match="argument 'y': got a leaf"):
        ops.fake_quantize_dynamic_out(
            torch.zeros(8), "per_tensor", 0, True, -7, 7, leaf, torch.ones(1), torch.zeros(1, dtype=torch.int32)
        )
    with torch.no_grad():
        ops.fake_quantize_backward_(leaf, mask)


# ---- loads


@pytest.mark.parametrize("bad", [None, b"", b"x", "", "a\0b", 1, ["x"], object()])
def test_what_is_no_path_is_named(bad: Any) -> None:
    for function in (load_checkpoint, read_manifest, lambda path: save_checkpoint(path, [], {}, extra={})):
        with pytest.raises(ArgumentError, match="argument 'directory'"):
            function(bad)


@pytest.mark.parametrize("key", ["aliases", "dtypes", "fused"])
@pytest.mark.parametrize("value", [{"0": []}, {"0": {}}, {"0": None}, {"0": 1}, [], "x", 1, {"0": "nobody"}])
def test_what_the_file_says_of_layers_is_checked(key: str, value: Any, tmp_path: Path) -> None:
    model = pyquant.quantize_(nn.Sequential(nn.Linear(8, 8)), pyquant.W8A8Dynamic())
    pyquant.save_pretrained(model, tmp_path / "a")
    good = load_checkpoint(tmp_path / "a")
    name = next(k for k in good.extra if isinstance(good.extra[k], dict) and "aliases" in good.extra[k])
    extra = {**good.extra, name: {**good.extra[name], key: value}}
    save_checkpoint(tmp_path / "b", good.layers, good.tensors, extra=extra)
    with pytest.raises(CheckpointError, match=r"extra|was saved with activation"):
        pyquant.load_pretrained(tmp_path / "b", nn.Sequential(nn.Linear(8, 8)))


def test_an_alias_names_a_layer_and_nothing_else(tmp_path: Path) -> None:
    model = pyquant.quantize_(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), pyquant.W8A8Dynamic())
    pyquant.save_pretrained(model, tmp_path / "a")
    good = load_checkpoint(tmp_path / "a")
    name = next(k for k in good.extra if isinstance(good.extra[k], dict) and "aliases" in good.extra[k])
    extra = {**good.extra, name: {**good.extra[name], "aliases": {"1": "0"}}}
    save_checkpoint(tmp_path / "b", good.layers, good.tensors, extra=extra)
    with pytest.raises(CheckpointError, match="alias '1' is a ReLU; allowed: Linear"):
        pyquant.load_pretrained(tmp_path / "b", nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


def test_a_sparse_file_without_memory_for_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 2**40)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**37, hard))
    try:
        with pytest.raises(CheckpointError, match="no memory"):
            read_file(path, check=lambda size: None)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
