"""Directories as other tools write them, for tests: a small net, its float tensors, and layers in a given format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

LAYERS = {"body.fc1": (48, 64), "body.fc2": (64, 48)}  # N, K


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.ModuleDict({"fc1": nn.Linear(64, 48), "fc2": nn.Linear(48, 64, bias=False)})
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body["fc2"](torch.relu(self.body["fc1"](x)))))


def floats(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Every tensor of the net that is no weight of LAYERS, as a file of this type has it."""
    state = Net().state_dict()
    return {name: t.to(dtype) for name, t in state.items() if name.removesuffix(".weight") not in LAYERS}


def write(
    folder: Path,
    quantization: Mapping[str, Any] | None,
    tensors: Mapping[str, Tensor],
    *,
    shards: int = 1,
    metadata: Mapping[str, str] | None = None,
    **config: Any,
) -> Path:
    """config.json, and the tensors in one file or several with an index."""
    folder.mkdir(exist_ok=True)
    words = dict(config) if quantization is None else {**config, "quantization_config": dict(quantization)}
    (folder / "config.json").write_text(json.dumps(words))
    names = sorted(tensors)
    kept = {name: tensors[name].clone().contiguous() for name in names}
    if shards == 1:
        save_file(kept, folder / "model.safetensors", {"format": "pt", **(metadata or {})})
        return folder
    home = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(home.values())):
        save_file({n: kept[n] for n in names if home[n] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))
    return folder


def of_layer(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a layer under their full names."""
    return {f"{name}.{suffix}": tensor for suffix, tensor in tensors.items()}


def group_config(
    format_name: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None, **others: Any
) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "quantization_status": "compressed",
        "ignore": ["head"],
        "config_groups": {"group_0": group},
        **others,
    }


def spread(numbers: Tensor, columns: int) -> Tensor:
    """One number a column of those of groups."""
    return numbers.repeat_interleave(columns // numbers.shape[1], dim=1)


def codes(bits: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Every code there is, the smallest included."""
    half = 1 << (bits - 1)
    found = torch.randint(-half, half, shape, generator=generator).to(torch.int8)
    found.view(-1)[0], found.view(-1)[-1] = -half, half - 1
    return found


def words_of(numbers: Tensor, bits: int) -> Tensor:
    """Unsigned numbers [R, C], several a word along C, the first lowest, one Python integer at a time."""
    per_word, rows = 32 // bits, []
    for row in numbers.tolist():
        words = [
            sum(value << bits * i for i, value in enumerate(row[at : at + per_word]))
            for at in range(0, len(row), per_word)
        ]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def gptq_layer(
    q: Tensor, z: Tensor, scales: Tensor, bits: int, version: int, group_of: Tensor | None = None
) -> dict[str, Tensor]:
    """A layer as GPTQ tools write it, of unsigned q [K, N] and z [G, N]."""
    k, groups = q.shape[0], z.shape[0]
    stored = (z - 1) % (1 << bits) if version == 1 else z
    neighbours = torch.arange(k) // (k // groups)
    return {
        "qweight": words_of(q.T, bits).T,
        "qzeros": words_of(stored, bits),
        "scales": scales,
        "g_idx": (neighbours if group_of is None else group_of).to(torch.int32),
    }


def awq_layer(q: Tensor, z: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """A layer as AutoAWQ's GEMM version writes it: column order[i] of eight lies at bits 4 * i of their word."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def packed(numbers: Tensor) -> Tensor:
        return words_of(numbers.reshape(numbers.shape[0], -1, 8)[:, :, order].reshape(numbers.shape), 4)

    return {"qweight": packed(q), "qzeros": packed(z), "scales": scales}


def dequantised(q: Tensor, z: Tensor, scales: Tensor, group_of: Tensor | None = None) -> Tensor:
    """scales * (q - z) of [K, N], by groups along K, rounded once to float32; as a weight [N, K]."""
    group_of = torch.arange(q.shape[0]) // (q.shape[0] // z.shape[0]) if group_of is None else group_of
    return ((q.double() - z.double()[group_of]) * scales.double()[group_of]).float().T.contiguous()


def unsigned(bits: int, k: int, n: int, groups: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random q [K, N], z [G, N] and fp16 scales [G, N]; every number that the bits hold occurs."""
    top = 1 << bits
    q = torch.randint(0, top, (k, n), generator=generator)
    z = torch.randint(0, top, (groups, n), generator=generator)
    q.view(-1)[:2], z.view(-1)[:2] = torch.tensor([0, top - 1]), torch.tensor([0, top - 1])
    return q, z, (torch.rand((groups, n), generator=generator) / 50 + 2.0**-9).half()
