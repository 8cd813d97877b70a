"""Rows of our own kernel table, launched by name through pyquant._native: the row that dispatch chooses, rows picked by
a pattern, and the tile that vLLM's published rule for int8 on Hopper would pick.

The last one is our kernel with their numbers, not their code: it isolates what the choice of tile, cluster and schedule
is worth.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyquant.bench.kernels.adapter import Adapter, Built, Run, device_index, rows_of
from pyquant.bench.peers import PeerUnavailable
from pyquant.bench.problem import Inputs, Weights
from pyquant.numerics.gemm import gemm

CHOSEN = "row chosen by the plan, W8A8 codes in"
VLLM = "row of vLLM's rule, W8A8 codes in"
FAMILY, OUT = "sm90_s8s8", "bf16"


class Tiling(NamedTuple):
    """Tile M x N x K, cluster M x N, schedule, as kernel_table() names them."""

    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    schedule: str

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.tile))} c{self.cluster[0]}x{self.cluster[1]} {self.schedule}"


def vllm_rule(m: int, n: int) -> Tiling:
    """The tile, cluster and schedule of vLLM's int8 dispatch for sm_90."""
    if m <= 32:
        wide = n >= 8192
        return Tiling((64, 128 if wide else 64, 256), (1, 4 if wide else 8), "plain")
    if m <= 64:
        return Tiling((64, 64, 256), (1, 1), "plain")
    if m <= 128:
        return Tiling((64, 128, 128), (2, 1), "pingpong")
    return Tiling((128, 128, 128), (2, 1), "pingpong")


def row_of(table: Sequence[Mapping[str, Any]], tiling: Tiling, out: str = OUT) -> str:
    """The name of the compiled row of FAMILY with this tiling.

    Raises PeerUnavailable when the table has no such row, or has it without machine code.
    """
    fits = [
        row
        for row in table
        if row["family"] == FAMILY
        and out in row["out"]
        and Tiling(tuple(row["tile"]), tuple(row["cluster"]), row["schedule"]) == tiling
    ]
    if not fits:
        raise PeerUnavailable(f"the kernel table has no {FAMILY} row for {out} of {tiling}")
    compiled = [str(row["name"]) for row in fits if row["compiled"]]
    if not compiled:
        raise PeerUnavailable(f"{fits[0]['name']} is not compiled in this build")
    return compiled[0]


def native() -> ModuleType:
    try:
        return importlib.import_module("pyquant._native")
    except ImportError as error:
        raise PeerUnavailable(f"pyquant._native cannot be imported: {error}") from None


def problem_of(weights: Weights, m: int, out: str = OUT) -> dict[str, Any]:
    """W8A8 with a scale a token, a scale a channel and a bias, in the words of pyquant._native."""
    return {"m": m, "n": weights.n, "k": weights.k, "x": "s8", "w": "s8", "out": out, "per_token_scale": True}


def _chosen(weights: Weights, m: int) -> str:
    module = native()
    info = module.device_info(device_index(weights.device))
    name, _, refusals = module.select(problem_of(weights, m), info)
    if name is None:
        first = "; ".join(f"{row}: {why}" for row, why in list(refusals.items())[:3])
        raise PeerUnavailable(f"no row takes the problem: {first}")
    return str(name)


def _by_vllm(weights: Weights, m: int) -> str:
    return row_of(native().kernel_table(), vllm_rule(m, weights.n))


def _rows(choose: Callable[[Weights, int], str], weights: Weights) -> Built:
    module = native()
    codes, scale = weights.codes

    def bind(inputs: Inputs) -> Run:
        row, problem = choose(weights, inputs.m), problem_of(weights, inputs.m)
        (x_q, x_scale), index = inputs.codes, device_index(weights.device)
        needed = module.workspace_bytes(row, problem, index)
        workspace = torch.empty(max(1, needed), dtype=torch.uint8, device=weights.device)
        y = torch.full((inputs.m, weights.n), torch.nan, dtype=torch.bfloat16, device=weights.device)

        def run(state: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            w, w_scale, bias = state
            tensors = {"x": x_q, "w": w, "x_scale": x_scale, "w_scale": w_scale, "bias": bias, "out": y}
            tensors |= {"workspace": workspace} if needed else {}
            operands = {name: tensor.data_ptr() for name, tensor in tensors.items()}
            stream = torch.cuda.current_stream(weights.device).cuda_stream
            module.gemm(row, problem, operands, {}, index, stream)
            return y

        return run

    def reference(inputs: Inputs, rows: Tensor) -> Tensor:
        x_q, x_scale = inputs.codes
        return gemm(
            rows_of(x_q, rows), codes, scale, rows_of(x_scale, rows), bias=weights.bias, out_dtype=torch.bfloat16
        )

    state = (codes.clone(), scale.clone(), weights.bias.clone())
    return Built(state, bind, reference, lambda m: choose(weights, m))


def _adapter(name: str, choose: Callable[[Weights, int], str]) -> Adapter:
    return Adapter(name, partial(_rows, choose), 8, 8, "int8", ours=name != VLLM, min_sqnr=30)


ROWS = (_adapter(CHOSEN, _chosen), _adapter(VLLM, _by_vllm))


def rows_matching(pattern: str, table: Sequence[Mapping[str, Any]]) -> list[Adapter]:
    """A candidate for every compiled row s8 x s8 -> bf16, of one matrix, whose name matches the regular expression."""
    fits = [
        str(row["name"])
        for row in table
        if row["compiled"]
        and not row["experts_only"]
        and not row["channel_multiple"]
        and re.search(pattern, str(row["name"]))
        and "s8" in row["x"]
        and "s8" in row["w"]
        and OUT in row["out"]
    ]
    return [_adapter(f"row {name}", lambda weights, m, name=name: name) for name in fits]  # type: ignore[misc]
