"""Layers of an installed vLLM, filled from pyquant's files by vLLM's own loaders. Imports vllm."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from qlayers import calibration
from safetensors.torch import load_file
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,  # noqa: F401  (for test_layers.py)
)
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding  # noqa: F401  (for ranks.py)

import pyquant

K, HEAD, HEADS, KV_HEADS = 64, 16, 4, 2
JOINED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
# class of vLLM's layer -> (its name, {name of a matrix: (shard id, rows)}); K columns each
KINDS: dict[str, tuple[str, dict[str, tuple[Any, int]]]] = {
    "merged": ("gate_up_proj", {"gate_proj": (0, 96), "up_proj": (1, 96)}),
    "qkv": (
        "qkv_proj",
        {"q_proj": ("q", HEADS * HEAD), "k_proj": ("k", KV_HEADS * HEAD), "v_proj": ("v", KV_HEADS * HEAD)},
    ),
    "row": ("down_proj", {"down_proj": (None, 48)}),
    "column": ("fc1", {"fc1": (None, 48)}),
    "replicated": ("gate", {"gate": (None, 40)}),
}


@contextmanager
def world(rank: int = 0, size: int = 1, meeting: str = "") -> Iterator[None]:
    """vLLM's process groups on gloo; the ranks of one world name the same `meeting`, a file that is not there yet."""
    os.environ["VLLM_DIST_IDENT"] = Path(meeting).parent.name  # as vLLM's executor does: names shared memory
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(size, rank, f"file://{meeting or folder + '/meeting'}", rank, "gloo")
        initialize_model_parallel(size)
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()


class Directory:
    """What save_pretrained makes of a model, as vLLM reads it."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        pyquant.save_pretrained(model, folder)
        self.folder = folder
        self.config = json.loads((folder / "config.json").read_text())["quantization_config"]
        self.tensors: dict[str, Tensor] = {}
        for file in folder.glob("*.safetensors"):
            self.tensors |= load_file(file)

    def quantization(self, method: str) -> Any:
        """A quantisation method of vLLM's with the words of this directory."""
        config = get_quantization_config(method).from_config(json.loads(json.dumps(self.config)))
        config.maybe_update_config(str(self.folder))
        config.packed_modules_mapping = JOINED
        return config


class Saved(Directory):
    """QLinears under their names, and the directory that save_pretrained makes of them.

    spread  static inputs of the matrices have different scales.
    """

    def __init__(
        self,
        kind: str,
        scheme: pyquant.QScheme,
        folder: Path,
        bias: bool = True,
        dtype: torch.dtype = torch.float32,
        spread: bool = False,
    ) -> None:
        self.kind, (self.name, self.shards) = kind, KINDS[kind]
        torch.manual_seed(7)
        self.layers: dict[str, pyquant.QLinear] = {}
        for i, (name, (_, rows)) in enumerate(self.shards.items()):
            linear = nn.Linear(K, rows, bias=bias)
            if bias:  # vLLM holds a bias in the model's type
                linear.bias = nn.Parameter(torch.randn(rows).to(torch.bfloat16).to(torch.float32))
            numbers = calibration(scheme)
            if spread and "input_scale" in numbers:
                numbers["input_scale"] *= 1 + i / 8
            self.layers[name] = pyquant.QLinear.from_float(linear, scheme, **numbers).to(dtype)
        model = nn.Module()
        for name, layer in self.layers.items():
            model.add_module(name, layer)
        super().__init__(model, folder)

    def side_by_side(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers.values()], -1)


def layer_of(saved: Saved, method: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The layer as vLLM makes it, loads it and finishes it, by a quantisation method."""
    config = saved.quantization(method)
    bias = any(name.endswith(".bias") for name in saved.tensors)
    words = {"bias": bias, "quant_config": config, "prefix": saved.name, "params_dtype": dtype, **options}
    rows = [rows for _, rows in saved.shards.values()]
    if saved.kind == "merged":
        layer = MergedColumnParallelLinear(K, rows, **words)
    elif saved.kind == "qkv":
        layer = QKVParallelLinear(K, HEAD, HEADS, KV_HEADS, **words)
    else:
        kinds = {"row": RowParallelLinear, "column": ColumnParallelLinear, "replicated": ReplicatedLinear}
        layer = kinds[saved.kind](K, rows[0], **words)
    fill(layer, saved.tensors, {name: shard for name, (shard, _) in saved.shards.items()})
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def fill(layer: Any, tensors: Mapping[str, Tensor], shards: Mapping[str, Any]) -> None:
    """Every tensor of the file into the parameter of its name, by the parameter's own loader, as models do it."""
    parameters = dict(layer.named_parameters())
    for key, tensor in tensors.items():
        name, _, suffix = key.rpartition(".")
        if name in shards:
            loader, shard = parameters[suffix].weight_loader, shards[name]
            loader(parameters[suffix], tensor, *([] if shard is None else [shard]))


def part(layer: pyquant.QLinear, rows: slice, columns: slice, bias: bool = True) -> pyquant.QLinear:
    """The QLinear of some rows and columns of another, of whole groups."""
    scheme, n, k = layer.scheme, layer.out_features, layer.in_features
    size = scheme.weights.group_size
    groups = slice(None) if size is None else slice((columns.start or 0) // size, (columns.stop or k) // size)

    def numbers(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or scheme.weights.granularity == "per_tensor":
            return tensor
        return (tensor[rows] if tensor.dim() == 1 else tensor[rows, groups]).contiguous()

    assert n >= (rows.stop or n)
    return pyquant.QLinear.from_codes(
        layer.codes[rows, columns].contiguous(),
        numbers(layer.weight_scale),
        scheme=scheme,
        bias=layer.bias_[rows].contiguous() if bias and layer.bias_ is not None else None,
        weight_zero_point=numbers(layer.weight_zero_point),
        input_scale=layer.input_scale,
        input_zero_point=layer.input_zero_point,
        dtype=layer.dtype,
    )
