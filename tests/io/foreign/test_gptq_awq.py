"""GPTQ and AWQ files: the weights of the formats' formulas, to the bit, of words packed number by number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accept
import foreign
import pytest
import torch

import pyquant
from pyquant.errors import CheckpointError
from pyquant.nn.qlinear import QLinear
from pyquant.nn.reordered import Reordered

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}


def gptq_folder(
    tmp_path: Path,
    bits: int = 4,
    version: int = 1,
    groups: int = 4,
    order: bool = False,
    sym: bool = False,
    **config: Any,
) -> tuple[Path, dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(bits + version)
    tensors, want = foreign.floats(torch.float16), {}
    for name, (n, k) in foreign.LAYERS.items():
        q, z, scales = foreign.unsigned(bits, k, n, groups, g)
        z = torch.full_like(z, 1 << bits - 1) if sym else z
        group_of = torch.randperm(k, generator=g) // (k // groups) if order else None
        tensors |= foreign.of_layer(name, foreign.gptq_layer(q, z, scales, bits, version, group_of))
        want[name] = foreign.dequantised(q, z, scales, group_of)
    form = "gptq" if version == 1 else "gptq_v2"
    words = {**GPTQ, "bits": bits, "sym": sym, "desc_act": order, "checkpoint_format": form, **config}
    return foreign.write(tmp_path / "m", {k: v for k, v in words.items() if v is not None}, tensors), want


def awq_folder(tmp_path: Path, groups: int = 4, **config: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(groups)
    tensors, want = foreign.floats(torch.float16), {}
    for name, (n, k) in foreign.LAYERS.items():
        q, z, scales = foreign.unsigned(4, k, n, groups, g)
        tensors |= foreign.of_layer(name, foreign.awq_layer(q, z, scales))
        want[name] = foreign.dequantised(q, z, scales)
    return foreign.write(tmp_path / "m", {**AWQ, **config}, tensors), want


def same_weights(folder: Path, want: dict[str, torch.Tensor], **options: Any) -> torch.nn.Module:
    model = pyquant.load_quantized_(foreign.Net(), folder, **options)
    for name, real in want.items():
        layer = model.get_submodule(name)
        shown = layer.weight if isinstance(layer, Reordered) else layer.to_float(torch.float32).weight.detach()
        accept.t1(shown, real)
    assert model(torch.randn(3, 64)).isfinite().all()
    return model


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq(bits: int, version: int, groups: int, tmp_path: Path) -> None:
    folder, want = gptq_folder(tmp_path, bits, version, groups)
    layer = same_weights(folder, want).body["fc1"]
    assert isinstance(layer, QLinear)
    assert layer.scheme.is_weight_only
    assert not layer.scheme.weights.symmetric


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_symmetric(bits: int, version: int, tmp_path: Path) -> None:
    """Also with activations as codes; a config without a format is of version 1."""
    folder, want = gptq_folder(tmp_path, bits, version, sym=True, checkpoint_format=None if version == 1 else "gptq_v2")
    assert same_weights(folder, want).body["fc1"].scheme.weights.symmetric
    assert same_weights(folder, want, activations="int8").body["fc2"].scheme.is_integer


@pytest.mark.parametrize("said", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq_files_whose_name_of_the_format_lies(said: str, version: int, tmp_path: Path) -> None:
    """Symmetric zero points are 8: stored as 7 or 8, whatever the config says."""
    folder, want = gptq_folder(tmp_path, 4, version, sym=True, checkpoint_format=said)
    same_weights(folder, want)


def test_gptq_zero_points_wrap(tmp_path: Path) -> None:
    """A zero point of 0 is stored as 15 by version 1."""
    q, z = torch.arange(64).reshape(64, 1).repeat(1, 48) % 16, torch.zeros(4, 48, dtype=torch.int64)
    z[0, 1:] = 15
    layer = foreign.gptq_layer(q, z, torch.ones(4, 48).half(), 4, 1)
    folder, _ = gptq_folder(tmp_path)
    tensors = {**foreign.floats(torch.float16), **foreign.of_layer("body.fc1", layer)}
    other = foreign.gptq_layer(*foreign.unsigned(4, 48, 64, 4, torch.Generator().manual_seed(1)), 4, 1)
    foreign.write(folder, {**GPTQ, "checkpoint_format": "gptq"}, {**tensors, **foreign.of_layer("body.fc2", other)})
    model = pyquant.load_quantized_(foreign.Net(), folder)
    accept.t1(model.body["fc1"].to_float().weight.detach(), foreign.dequantised(q, z, torch.ones(4, 48)))


@pytest.mark.parametrize("sym", [True, False])
def test_gptq_desc_act(sym: bool, tmp_path: Path) -> None:
    folder, want = gptq_folder(tmp_path, order=True, sym=sym)
    assert isinstance(same_weights(folder, want).body["fc1"], Reordered)


def test_gptq_desc_act_with_static_groups_needs_no_order(tmp_path: Path) -> None:
    folder, want = gptq_folder(tmp_path, desc_act=True, static_groups=True)
    assert isinstance(same_weights(folder, want).body["fc1"], QLinear)


def test_gptq_in_the_older_file(tmp_path: Path) -> None:
    """quantize_config.json beside a config.json without quantization_config, and another name of the tensors' file."""
    folder, want = gptq_folder(tmp_path)
    (folder / "config.json").write_text("{}")
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 16, "sym": false, "desc_act": false}')
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-16g.safetensors")
    same_weights(folder, want)


@pytest.mark.parametrize("groups", [1, 4])
def test_awq(groups: int, tmp_path: Path) -> None:
    folder, want = awq_folder(tmp_path, groups)
    layer = same_weights(folder, want).body["fc2"]
    assert not layer.scheme.weights.symmetric


def test_scales_of_zero_are_weights_of_zero(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(5)
    tensors, want = foreign.floats(torch.float16), {}
    for name, (n, k) in foreign.LAYERS.items():
        q, z, scales = foreign.unsigned(4, k, n, 4, g)
        scales[1] = 0
        scales[2, ::2] = -scales[2, ::2]
        tensors |= foreign.of_layer(name, foreign.awq_layer(q, z, scales))
        want[name] = foreign.dequantised(q, z, scales) + 0.0  # no zero with a sign
    folder = foreign.write(tmp_path / "m", AWQ, tensors)
    model = pyquant.load_quantized_(foreign.Net(), folder)
    for name, real in want.items():
        accept.t1(model.get_submodule(name).to_float().weight.detach() + 0.0, real)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "three bits": ({**GPTQ, "bits": 3}, "bits: got 3; allowed: 4 or 8"),
    "bits are text": ({**GPTQ, "bits": "4"}, "bits is '4'; allowed: a whole number"),
    "bits are missing": ({"quant_method": "gptq"}, "bits: got None"),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format: got 'marlin'"),
    "bits by layer": ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
    "sym is text": ({**GPTQ, "sym": "yes"}, "sym is 'yes'; allowed: true or false"),
    "gemv": ({**AWQ, "version": "gemv"}, "version: got 'gemv'"),
    "awq of 8 bits": ({**AWQ, "bits": 8}, "bits: got 8; allowed: 4"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_without_a_counterpart(name: str, tmp_path: Path) -> None:
    config, told = CONFIGS[name]
    folder, _ = gptq_folder(tmp_path) if config["quant_method"] == "gptq" else awq_folder(tmp_path)
    with pytest.raises(CheckpointError, match=told):
        pyquant.load_quantized_(foreign.Net(), foreign.write(folder, config, {}))


def broken(layer: dict[str, torch.Tensor], key: str, tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {k: v for k, v in {**layer, key: tensor}.items() if v is not None}


TENSORS: dict[str, tuple[str, str, torch.Tensor | None, str]] = {
    "no scales": ("gptq", "scales", None, "no tensor 'body.fc1.scales'"),
    "no zero points": ("gptq", "qzeros", None, "no tensor 'body.fc1.qzeros'"),
    "scales of another width": ("gptq", "scales", torch.ones(4, 8).half(), r"allowed: .*\['any', 48\]"),
    "zero points of another height": (
        "gptq",
        "qzeros",
        torch.ones(3, 6, dtype=torch.int32),
        r"allowed: int32 \[4, 6\]",
    ),
    "a short order": ("gptq", "g_idx", torch.zeros(63, dtype=torch.int32), r"allowed: int32 or int64 \[64\]"),
    "an order beyond": ("gptq", "g_idx", torch.arange(64, dtype=torch.int32), "groups from 0 to 63"),
    "infinite scales": ("gptq", "scales", torch.full((4, 48), torch.inf).half(), "NaN or infinity"),
    "another tensor": ("gptq", "perm", torch.arange(4), "tensor 'perm'"),
    "awq without zero points": ("awq", "qzeros", None, "no qzeros"),
    "awq codes of another height": ("awq", "qweight", torch.ones(7, 6, dtype=torch.int32), "4 groups"),
    "awq codes of another width": (
        "awq",
        "qweight",
        torch.ones(64, 5, dtype=torch.int32),
        r"allowed: int32 \['any', 6\]",
    ),
    "awq with an order": ("awq", "g_idx", torch.arange(64), "tensor 'g_idx'"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit(name: str, tmp_path: Path) -> None:
    method, key, tensor, told = TENSORS[name]
    numbers = foreign.unsigned(4, 64, 48, 4, torch.Generator().manual_seed(1))
    layer = foreign.gptq_layer(*numbers, 4, 1) if method == "gptq" else foreign.awq_layer(*numbers)
    tensors = {**foreign.floats(), **foreign.of_layer("body.fc1", broken(layer, key, tensor))}
    folder = foreign.write(tmp_path / "m", GPTQ if method == "gptq" else AWQ, tensors)
    with pytest.raises(CheckpointError, match=told):
        pyquant.load_quantized_(foreign.Net(), folder)
