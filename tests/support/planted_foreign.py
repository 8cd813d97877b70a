"""Bugs in the readers of others' checkpoints, each one edit, and the law that must notice it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import foreign
import gguf_file
import torch
from mutants import edit, register

import pyquant
from pyquant.io.compressed_tensors import pack_to_int32
from pyquant.nn.qlinear import QLinear

Pack = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}
AFFINE = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 16}


def _packed(q: torch.Tensor, z: torch.Tensor, scales: torch.Tensor, _: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": pack_to_int32((q.T - 8).to(torch.int8).contiguous(), 4),
        "weight_shape": torch.tensor(q.T.shape),
        "weight_scale": scales.T,
        "weight_zero_point": (z.T - 8).to(torch.int8),
    }


FORMATS: dict[str, tuple[dict[str, object], Pack, bool]] = {
    "gptq": (GPTQ, lambda q, z, s, i: foreign.gptq_layer(q, z, s, 4, 1, i), True),
    "gptq symmetric": ({**GPTQ, "sym": True}, lambda q, z, s, i: foreign.gptq_layer(q, z, s, 4, 2, i), False),
    "awq": (AWQ, lambda q, z, s, i: foreign.awq_layer(q, z, s), False),
    "compressed": (foreign.group_config("pack-quantized", AFFINE), _packed, False),
}


def weights_are_those_of(name: str) -> Callable[[int], None]:
    words, pack, has_order = FORMATS[name]

    def check(seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        tensors, want = foreign.floats(), {}
        for layer, (n, k) in foreign.LAYERS.items():
            q, z, scales = foreign.unsigned(4, k, n, k // 16, g)
            z = torch.full_like(z, 8) if name == "gptq symmetric" else z
            if name in ("awq", "compressed"):
                scales[0, ::3] = -scales[0, ::3]
                scales[1] = 0
            group_of = torch.randperm(k, generator=g) // 16 if has_order else torch.arange(k) // 16
            tensors |= foreign.of_layer(layer, pack(q, z, scales, group_of))
            want[layer] = foreign.dequantised(q, z, scales, group_of)
        with tempfile.TemporaryDirectory() as folder:
            model = pyquant.load_quantized_(foreign.Net(), foreign.write(Path(folder) / "m", words, tensors))
        for layer, real in want.items():
            found = model.get_submodule(layer)
            shown = found.to_float().weight if isinstance(found, QLinear) else found.weight
            assert torch.equal(shown, real), f"{name}: {layer}"

    return check


for area, old, new, name in (
    ("gptq", "torch.where(stored == qmax, qmin, stored + 1)", "stored", "gptq"),
    ("gptq", "torch.where(stored == qmax, qmin, stored + 1)", "(stored + 1).clamp(max=qmax)", "gptq"),
    ("gptq", "{0: _V2, -1: _V1}", "{}", "gptq symmetric"),
    ("awq", "(0, 4, 1, 5, 2, 6, 3, 7)", "(0, 2, 4, 6, 1, 3, 5, 7)", "awq"),
    ("record", "codes = codes[:, order]", "codes = codes[:, order.flip(0)]", "gptq"),
    ("record", "codes = codes[:, order]", "pass", "gptq"),
    ("record", "torch.where(negative, -1 - zero_point, zero_point)", "zero_point", "awq"),
    ("record", "torch.where(turned, -1 - codes, codes)", "codes", "compressed"),
    ("record", "_spread(reals, codes.shape[1]), codes)", "0, codes)", "awq"),
    ("record", "stable=True", "descending=True", "gptq"),
    ("record", "return ForeignLayer(record, order)", "return ForeignLayer(record, None)", "gptq"),
):
    register(
        edit(f"io.foreign.{area}", old, new),
        notice=weights_are_those_of(name),
        name=f"{old[:40].strip()} -> {new[:40].strip()}",
        area=f"io.foreign.{area}",
    )


def gguf_blocks(seed: int) -> None:
    for kind in gguf_file.WIDTHS:
        block = gguf_file.blocks(kind, 4, 512, seed)
        with tempfile.TemporaryDirectory() as folder:
            path = gguf_file.write(Path(folder) / "m.gguf", {"general.architecture": "toy"}, {"0.weight": block})
            model = pyquant.load_quantized_(torch.nn.Sequential(torch.nn.Linear(512, 4, bias=False)), path)
        assert torch.equal(model[0].to_float().weight, gguf_file.numbers(*block)), kind


for old, new in (
    ("torch.cat([packed & 15, packed >> 4], dim=1)", "torch.stack([packed & 15, packed >> 4], 2).reshape(-1, 32)"),
    ("(0, 2, 4, 6)", "(0, 4, 2, 6)"),
    ("low.reshape(-1, 2, 64) >> 4], 2)", "low.reshape(-1, 2, 64) >> 4], 1)"),
    ("_half(data[:, 208:]) * scales.to(torch.float32)", "_half(data[:, 208:]) * scales.to(torch.float32).abs()"),
):
    register(
        edit("io.foreign.gguf", old, new), notice=gguf_blocks, name=f"{old[:40]} -> {new[:40]}", area="io.foreign.gguf"
    )
