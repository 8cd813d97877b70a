"""One of two ranks that share vLLM's layers: python ranks.py RANK MEETING FOLDER. Exits with 1 where bits differ.

Every rank reads the whole file and keeps its share, as vLLM does. Expected is what QLinears of that share give, summed
in the order of the ranks where they share a sum.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import accept
import pytest
import torch
import vllm_layers
from vllm_layers import KINDS, K, Saved, layer_of, part

from pyquant import W4A16, W8A8, QEmbedding, QLinear, QScheme, W4A8Dynamic, W8A8Dynamic
from pyquant.integrations import vllm as plugin

SIZE = 2
SCHEMES = [
    W8A8Dynamic(),
    W8A8(symmetric_inputs=False),
    W4A8Dynamic(16),
    W4A8Dynamic(None),
    W4A16(32, symmetric=False),
    W4A16(None, symmetric=False),
]


def share(layer: QLinear, rank: int, *, of_inputs: bool) -> QLinear:
    n, k = layer.out_features // SIZE, layer.in_features // SIZE
    if of_inputs:
        return part(layer, slice(None), slice(rank * k, (rank + 1) * k), bias=rank == 0)
    return part(layer, slice(rank * n, (rank + 1) * n), slice(None))


def check(kind: str, scheme: QScheme, method: str, rank: int, folder: Path) -> None:
    saved = Saved(kind, scheme, folder, spread=method == "pyquant")
    layer = layer_of(saved, method)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(3))
    layers = list(saved.layers.values())
    if kind == "row":
        per_rank = K // SIZE
        sums = [share(layers[0], r, of_inputs=True)(x[:, r * per_rank : (r + 1) * per_rank]) for r in range(SIZE)]
        got, want = layer(x[:, rank * per_rank : (rank + 1) * per_rank].contiguous())[0], sums[0] + sums[1]
    else:
        got = layer(x)[0]
        whole = kind == "replicated"
        want = torch.cat([one(x) if whole else share(one, rank, of_inputs=False)(x) for one in layers], -1)
    accept.t1(got, want, what=f"rank {rank}: {kind} {scheme} {method}")


def check_embedding(folder: Path) -> None:
    """150 rows of which each rank holds a share, filled up to 192."""
    torch.manual_seed(4)
    model = torch.nn.Module()
    model.add_module("embed", QEmbedding.from_float(torch.nn.Embedding(150, K)))
    saved = vllm_layers.Directory(model, folder)
    layer = vllm_layers.VocabParallelEmbedding(150, K, quant_config=saved.quantization("pyquant"), prefix="embed")
    vllm_layers.fill(layer, saved.tensors, {"embed": None})
    layer.quant_method.process_weights_after_loading(layer)
    ids = torch.arange(150).reshape(3, 50)
    accept.t1(layer(ids), model.embed(ids), what="embedding")


def main(rank: int, meeting: str, folder: Path) -> None:
    os.environ[plugin.VARIABLE] = "prefer"
    plugin.register()
    torch.set_num_threads(1)
    count = 0
    with vllm_layers.world(rank, SIZE, meeting):
        for kind in KINDS:
            for scheme in SCHEMES:
                for method in ("pyquant", "compressed-tensors"):
                    check(kind, scheme, method, rank, folder / str(count))
                    count += 1
        check_embedding(folder / "embedding")
        with pytest.raises(ValueError, match="not divisible"):
            layer_of(Saved("row", W4A8Dynamic(64), folder / "whole"), "pyquant")
    print(f"{count} layers")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
