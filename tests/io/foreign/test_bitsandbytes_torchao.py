"""bitsandbytes in 8 bits and torchao: weights of the formulas, of torchao where it is installed, and refusals."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import accept
import foreign
import pytest
import torch
from torch import nn

import pyquant
from pyquant.errors import CheckpointError

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
BNB = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": 6.0}
AO = {"quant_method": "torchao"}
ROWS = {
    "_type": "QuantizeTensorToInt8Kwargs",
    "_data": {
        "granularity": {"_type": "PerRow", "_data": {"dim": -1}},
        "mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"},
        "reduce_range": False,
    },
}


def bnb_layer(name: str) -> dict[str, torch.Tensor]:
    weight = foreign.Net().get_submodule(name).weight.detach()
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    return {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}


def bnb_folder(tmp_path: Path, changes: dict[str, Any] | None = None, **config: Any) -> Path:
    tensors = foreign.floats(torch.float16)
    for name in foreign.LAYERS:
        tensors |= foreign.of_layer(name, {**bnb_layer(name), **(changes or {})})
    return foreign.write(tmp_path / "m", {**BNB, **config}, tensors)


@pytest.mark.parametrize(("threshold", "is_integer"), [(6.0, False), (0.0, True), (0, True)])
def test_bitsandbytes(threshold: float, is_integer: bool, tmp_path: Path) -> None:
    """Without a threshold the library multiplies codes; with one, columns beyond it in 16 bits."""
    model = pyquant.load_quantized_(foreign.Net(), bnb_folder(tmp_path, llm_int8_threshold=threshold))
    for name in foreign.LAYERS:
        layer, theirs = model.get_submodule(name), bnb_layer(name)
        scale = theirs["SCB"] / torch.tensor(127.0)
        want = (theirs["weight"].double() * scale.double()[:, None]).float()
        accept.t1(layer.to_float().weight.detach(), want)
        assert layer.scheme.is_integer is is_integer
        own = theirs["weight"] * theirs["SCB"].reshape(-1, 1) * 7.874015718698502e-3  # as the library rounds it
        assert ((want - own).abs() <= own.abs() * 2.0**-22).all()
    assert pyquant.load_quantized_(foreign.Net(), tmp_path / "m", activations="int8").body["fc1"].scheme.is_integer


@pytest.mark.parametrize(
    ("changes", "config", "told"),
    [
        ({}, {"load_in_4bit": True}, "codes of a table"),
        ({}, {"load_in_8bit": False}, "codes of a table"),
        ({}, {"llm_int8_threshold": "6"}, "llm_int8_threshold"),
        ({"weight_format": torch.tensor(2, dtype=torch.uint8)}, {}, "weight_format \\[2\\]; allowed: 0"),
        ({"weight_format": torch.tensor([0, 0], dtype=torch.uint8)}, {}, "weight_format"),
        ({"SCB": torch.ones(3)}, {}, "SCB': got float32 \\[3\\]"),
        ({"SCB": torch.full((48,), torch.nan)}, {}, "NaN or infinity"),
        ({"quant_map": torch.ones(16)}, {}, "tensor 'quant_map'"),
    ],
)
def test_bitsandbytes_refusals(changes: dict[str, Any], config: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=told):
        pyquant.load_quantized_(foreign.Net(), bnb_folder(tmp_path, changes, **config))


def ao_words(kind: str, **data: Any) -> dict[str, Any]:
    return {"_type": kind, "_data": data, "_tensor_data_names": ["qdata", "scale", "zero_point"]}


def ao_folder(
    tmp_path: Path, words: dict[str, Any], bits: int, groups: int = 1, symmetric: bool = True, **changes: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(bits)
    tensors, want, said = foreign.floats(torch.bfloat16), {}, {}
    for name, (n, k) in foreign.LAYERS.items():
        codes = foreign.codes(bits, (n, k), g)
        scale = torch.rand((n, groups), generator=g) / 50 + 0.01
        zero = torch.zeros(n, groups, dtype=torch.int8) if symmetric else foreign.codes(bits, (n, groups), g)
        layer = {"_weight_qdata": codes, "_weight_scale": scale, "_weight_zero_point": zero, **changes}
        tensors |= foreign.of_layer(name, {key: t for key, t in layer.items() if t is not None})
        real = codes.double() - foreign.spread(zero.double(), k)
        want[name] = (real * foreign.spread(scale.double(), k)).float()
        said[f"{name}.weight"] = json.dumps(words)
    return foreign.write(tmp_path / "m", AO, tensors, metadata=said), want


INT8 = ao_words("Int8Tensor", act_quant_kwargs=None, reduce_range=False, block_size=[1, 64])
INT4 = ao_words(
    "IntxUnpackedToInt8Tensor",
    target_dtype={"_type": "torch.dtype", "_data": "int4"},
    block_size=[1, 16],
    activation_quantization=None,
)


@pytest.mark.parametrize(
    ("words", "bits", "groups", "symmetric", "inputs"),
    [
        (INT8, 8, 1, True, None),
        (INT8, 8, 1, False, None),
        ({**INT8, "_data": {**INT8["_data"], "act_quant_kwargs": ROWS}}, 8, 1, True, "int8 per_token dynamic"),
        (INT4, 4, 4, True, None),
        (INT4, 4, 4, False, None),
        (
            {**INT4, "_data": {**INT4["_data"], "activation_quantization": "int8_asym_per_token"}},
            4,
            4,
            True,
            "int8 per_token affine dynamic",
        ),
    ],
)
def test_torchao(
    words: dict[str, Any], bits: int, groups: int, symmetric: bool, inputs: str | None, tmp_path: Path
) -> None:
    folder, want = ao_folder(tmp_path, words, bits, groups, symmetric)
    model = pyquant.load_quantized_(foreign.Net(), folder)
    for name, real in want.items():
        layer = model.get_submodule(name)
        accept.t1(layer.to_float(torch.float32).weight.detach(), real)
        assert (None if layer.scheme.inputs is None else str(layer.scheme.inputs)) == inputs
    assert model(torch.randn(3, 64)).isfinite().all()


@needs_torchao
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int8", "int8 dynamic", "int4 affine", "int4 dynamic"])
def test_files_of_torchao(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from torchao import quantization as ao
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    groups = ao.PerGroup(16)
    config = {
        "int8": lambda: ao.Int8WeightOnlyConfig(version=2),
        "int8 dynamic": lambda: ao.Int8DynamicActivationInt8WeightConfig(version=2),
        "int4 affine": lambda: ao.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=groups, mapping_type=ao.MappingType.ASYMMETRIC
        ),
        "int4 dynamic": lambda: ao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=groups
        ),
    }[kind]()
    theirs = foreign.Net().to(dtype)
    ao.quantize_(theirs, config, lambda module, name: isinstance(module, nn.Linear) and name != "head")
    flat, said = flatten_tensor_state_dict(theirs.state_dict())
    folder = foreign.write(tmp_path / "m", AO, flat, metadata=said)
    model = pyquant.load_quantized_(foreign.Net().to(dtype), folder)
    for name in foreign.LAYERS:
        want = theirs.get_submodule(name).weight.dequantize()
        accept.t1(model.get_submodule(name).to_float().weight.detach(), want)
        assert model.get_submodule(name).scheme.is_integer is ("dynamic" in kind)


@pytest.mark.parametrize(
    ("words", "changes", "told"),
    [
        ({**INT8, "_type": "Int4TilePackedTo4dTensor"}, {}, "a Int4TilePackedTo4dTensor; allowed: Int8Tensor"),
        ({"_type": "Int8Tensor"}, {}, "a Int8Tensor; allowed"),
        ({**INT4, "_data": {**INT4["_data"], "target_dtype": {"_data": "int3"}}}, {}, "bits.*got 0"),
        ({**INT8, "_data": {**INT8["_data"], "act_quant_kwargs": {"_data": {}}}}, {}, "activations='float'"),
        ({**INT8, "_data": {**INT8["_data"], "act_quant_kwargs": 3}}, {}, "activations='float'"),
        (INT8, {"_weight_zero_point": torch.full((48, 1), 0.5)}, "allowed: .*int8|real zero points"),
        (INT8, {"_weight_act_pre_scale": torch.ones(1)}, "tensor '_weight_act_pre_scale'"),
        (INT8, {"_weight_scale": None}, "no tensor"),
        (INT8, {"_weight_scale": torch.ones(2, 1)}, "weight_zero_point|_weight_scale"),
    ],
)
def test_torchao_refusals(words: dict[str, Any], changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    folder, _ = ao_folder(tmp_path, words, 8, **changes)
    with pytest.raises(CheckpointError, match=told):
        pyquant.load_quantized_(foreign.Net(), folder)


def test_torchao_words_that_are_damaged(tmp_path: Path) -> None:
    folder, _ = ao_folder(tmp_path, INT8, 8)
    tensors = foreign.floats()
    for name, (n, k) in foreign.LAYERS.items():
        layer = {"_weight_qdata": torch.ones(n, k, dtype=torch.int8), "_weight_scale": torch.ones(n, 1)}
        tensors |= foreign.of_layer(name, layer)
    for text, told in (("{", "not the JSON"), ("[]", "a list"), (None, "not there")):
        said = {} if text is None else dict.fromkeys([f"{name}.weight" for name in foreign.LAYERS], text)
        with pytest.raises(CheckpointError, match=told):
            pyquant.load_quantized_(foreign.Net(), foreign.write(folder, AO, tensors, metadata=said))
