"""The mapping to compressed-tensors: our packing against a bit-by-bit reference, our files against that library."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import accept
import checkpoints
import problems
import pytest
import torch

from pyquant.core.presets import W4A16, W8A8, W8A16, W4A8Dynamic, W8A8Dynamic
from pyquant.errors import CheckpointError
from pyquant.io import check_layer, save_checkpoint
from pyquant.io import compressed_tensors as ours
from pyquant.io.manifest import DTYPES

needs_transformers = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("compressed_tensors", "transformers")),
    reason="transformers or compressed-tensors is not installed (pip install transformers compressed-tensors==0.20.0)",
)
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="compressed-tensors is not installed (pip install compressed-tensors==0.20.0)",
)


def _packed_by_hand(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """One Python integer a row: element i at bit i * bits, stored as code + 2^(bits-1)."""
    rows, columns = codes.shape
    words = -(-columns * bits // 32)
    found = torch.zeros(rows, words, dtype=torch.int32)
    for row in range(rows):
        value = sum((int(c) + 2 ** (bits - 1)) << (i * bits) for i, c in enumerate(codes[row]))
        for word in range(words):
            unsigned = (value >> (32 * word)) & 0xFFFFFFFF
            found[row, word] = unsigned - 2**32 if unsigned >= 2**31 else unsigned
    return found


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 67])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_packing_is_the_layout_and_comes_back(bits: int, columns: int, rows: int) -> None:
    g = torch.Generator().manual_seed(problems.BASE_SEED + columns)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns), generator=g).to(torch.int8)
    packed = ours.pack_to_int32(codes, bits)
    accept.t0(packed, _packed_by_hand(codes, bits))
    accept.t0(ours.unpack_from_int32(packed, bits, columns, "w"), codes)


def test_packing_does_not_change_its_input() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).reshape(2, 8)
    packed = ours.pack_to_int32(codes, 4)
    ours.unpack_from_int32(packed, 4, 8, "w")
    accept.t0(codes, torch.arange(-8, 8, dtype=torch.int8).reshape(2, 8))
    accept.t0(packed, _packed_by_hand(codes, 4))


@pytest.mark.parametrize("bits", [4, 8])
def test_bits_beyond_the_last_column_are_refused(bits: int) -> None:
    packed = ours.pack_to_int32(torch.ones(2, 3, dtype=torch.int8), bits)
    packed[1, 0] |= 1 << 30
    with pytest.raises(CheckpointError, match="'w': bits are set beyond column 3"):
        ours.unpack_from_int32(packed, bits, 3, "w")


@pytest.mark.parametrize("name", checkpoints.SCHEMES)
@pytest.mark.parametrize("bias", [None, torch.float16])
def test_tensors_are_exactly_those_the_specs_promise(name: str, bias: torch.dtype | None) -> None:
    tensor = None if bias is None else torch.ones(11, dtype=bias)
    layer = checkpoints.layer("a.fc", checkpoints.SCHEMES[name], 11, 24, 3, bias=tensor)
    entry = check_layer(layer)
    tensors = ours.to_tensors(layer, entry)
    accept.t0({k: (t.dtype, tuple(t.shape)) for k, t in tensors.items()}, ours.tensor_specs(entry))
    assert all(t.is_contiguous() and t.dtype in DTYPES.values() for t in tensors.values())


def test_groups_collect_layers_of_one_scheme_and_keep_our_words_at_the_top() -> None:
    layers, _, extra = checkpoints.sample(1)
    config = ours.quantization_config([check_layer(one) for one in layers], ["norm"], extra["recipe"])
    accept.t0(config["format"], "mixed-precision")
    accept.t0(
        [g["targets"] for g in config["config_groups"].values()],
        [["blocks.0.fc1"], ["blocks.0.fc2"], ["blocks.1.fc1"], ["embed"]],
    )
    accept.t0(config["pyquant"]["epilogues"], {"blocks.0.fc1": "gelu", "blocks.1.fc1": "clamp"})
    allowed = {"targets", "format", "weights", "input_activations", "output_activations"}
    assert all(set(g) <= allowed for g in config["config_groups"].values())
    twice = [checkpoints.layer(n, W4A16(8), 4, 8, 1) for n in ("b", "a")]
    config = ours.quantization_config([check_layer(one) for one in twice], [], None)
    accept.t0([g["targets"] for g in config["config_groups"].values()], [["a", "b"]])
    accept.t0(config["format"], "pack-quantized")


@needs_library
@pytest.mark.parametrize("bits", [4, 8])
def test_the_library_packs_the_same_words(bits: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    for columns in (1, 7, 8, 9, 31, 64, 67):
        codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, columns)).to(torch.int8)
        accept.t0(ours.pack_to_int32(codes, bits), pack_to_int32(codes, bits))
        accept.t0(unpack_from_int32(ours.pack_to_int32(codes, bits), bits, codes.shape), codes)


@needs_library
@pytest.mark.parametrize("name", [n for n, s in checkpoints.SCHEMES.items() if not s.is_float])
# n > 8: version 0.20.0 of the library cannot unpack its own zero points where they fill a single word
@pytest.mark.parametrize(("n", "k"), [(9, 16), (11, 24), (16, 40)])
def test_the_library_validates_our_config_and_decompresses_to_the_same_weights(
    name: str, n: int, k: int, tmp_path: Path
) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_name
    from safetensors.torch import load_file

    layer = checkpoints.layer("blocks.0.fc", checkpoints.SCHEMES[name], n, k, n)
    save_checkpoint(tmp_path, [layer], {"norm.weight": torch.ones(3)}, extra={})
    raw = json.loads((tmp_path / "config.json").read_bytes())["quantization_config"]
    config = QuantizationConfig.model_validate(raw)
    accept.t0(config.quantization_status.value, "compressed")
    (scheme,) = config.config_groups.values()
    assert any(match_name("blocks.0.fc", target) for target in scheme.targets)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())
    stored: dict[str, Any] = {}
    for file in set(index["weight_map"].values()):
        stored |= load_file(tmp_path / file)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    local = {key.removeprefix("blocks.0.fc."): t for key, t in stored.items() if key.startswith("blocks.0.fc.")}
    assert set(compressor.compression_param_names(scheme)) <= set(local)
    got = compressor.decompress(local, scheme)["weight"]
    accept.t1(got, _real_weights(layer, k))


def _real_weights(layer: Any, k: int) -> torch.Tensor:
    """scale * (code - zero_point): the difference is exact, the product is rounded once, from float64 to float32."""
    scale, zero_point = layer.weight_scale.double(), layer.weight_zero_point
    columns = scale.shape[-1] if scale.ndim == 2 else 1
    wide = scale.reshape(-1, columns).repeat_interleave(k // columns, dim=1)
    codes = layer.codes.double()
    if zero_point is not None:
        codes = codes - zero_point.double().reshape(-1, columns).repeat_interleave(k // columns, dim=1)
    return (codes * wide).float()


@needs_library
def test_the_library_accepts_a_whole_model_of_mixed_schemes(tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    layers = [checkpoints.layer(f"m.{i}", s, 8, 16, i) for i, s in enumerate(checkpoints.SCHEMES.values())]
    save_checkpoint(tmp_path, layers, {}, extra={}, model_config={"model_type": "bert", "hidden_size": 16})
    raw = json.loads((tmp_path / "config.json").read_bytes())
    config = QuantizationConfig.model_validate(raw["quantization_config"])
    accept.t0(sum(len(g.targets) for g in config.config_groups.values()), len(layers) - 2)
    accept.t0(config.ignore, ["m.15", "m.16"])
    accept.t0((raw["model_type"], config.format), ("bert", "mixed-precision"))


@needs_transformers
def test_transformers_reads_the_directory_and_gets_the_same_weights(tmp_path: Path) -> None:
    """Without affine packed weights: transformers 5.23 expects their zero points in another shape than it saves."""
    from transformers import AutoModel, BertConfig, BertModel

    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=50,
        max_position_embeddings=16,
    )
    model = BertModel(config)
    schemes = [W8A8Dynamic(), W4A16(8), W4A8Dynamic(16), W8A16(), W8A8(), W8A8(symmetric_inputs=False)]
    layers, mine = [], set()
    for number, (name, module) in enumerate(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "pooler.dense":
            scheme, bias, size = schemes[number % len(schemes)], module.bias.detach(), module.weight.shape
            layers.append(checkpoints.layer(name, scheme, *size, number, bias=bias))
            mine |= {f"{name}.weight", f"{name}.bias"}
        elif name == "embeddings.word_embeddings":
            layers.append(checkpoints.layer(name, W8A16(), 50, 32, number, kind="embedding"))
            mine.add(f"{name}.weight")
    others = {name: tensor for name, tensor in model.state_dict().items() if name not in mine}
    told = {**json.loads(config.to_json_string()), "architectures": ["BertModel"]}
    save_checkpoint(tmp_path, layers, others, extra={}, model_config=told)
    loaded = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    loaded(torch.arange(8)[None])  # the first call decompresses
    for layer in layers:
        accept.t1(loaded.get_submodule(layer.name).weight.detach(), _real_weights(layer, layer.in_features))
    state = loaded.state_dict()
    for name, tensor in others.items():
        accept.t1(state[name].float(), tensor.float(), waiver="biases of a fresh model are zero")
    assert len(layers) == 13
