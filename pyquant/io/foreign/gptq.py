"""GPTQ checkpoints (AutoGPTQ, GPTQModel): codes packed along K, zero points along N, groups by `g_idx`.

weight[n, k] = scales[g_idx[k], n] * (q[k, n] - z[g_idx[k], n]), with q and z from 0 to 2^bits - 1. A file of version 1
stores z - 1 (modulo 2^bits), one of version 2 stores z.
"""

from __future__ import annotations

from typing import Final

import torch

from pyquant.core.dtypes import FLOATS, KERNEL_BITS, code_type
from pyquant.errors import CheckpointError
from pyquant.io.compressed_tensors import unpack_from_int32
from pyquant.io.foreign.record import ForeignLayer, Options, flag, foreign_layer, owned_by, refused, whole
from pyquant.io.foreign.source import Source

_V1, _V2 = "gptq", "gptq_v2"
_SUFFIXES: Final = ("qweight", "qzeros", "scales", "g_idx", "bias")


class Reader:
    """The layers of a directory whose quant_method is 'gptq'."""

    def __init__(self, source: Source, options: Options) -> None:
        self.source, self.options = source, options
        method = source.method
        self._format = method.get("checkpoint_format") or method.get("format") or _V1  # files before it are all of v1
        if self._format not in (_V1, _V2):
            raise refused("checkpoint_format", self._format, f"'{_V1}' or '{_V2}'")
        self._bits, self._symmetric = whole(method, "bits"), flag(method, "sym", True)
        if self._bits not in KERNEL_BITS:
            raise refused("bits", self._bits, " or ".join(map(str, KERNEL_BITS)))
        if method.get("dynamic"):
            raise refused("dynamic", method["dynamic"], "null: the same bits in every layer")
        if method.get("is_marlin_format") or method.get("lm_head_format"):
            raise refused("is_marlin_format", True, "false: codes in the order of their rows")

    def layers(self) -> dict[str, frozenset[str]]:
        return owned_by(self.source, "qweight", _SUFFIXES)

    def dropped(self) -> frozenset[str]:
        return frozenset()

    def read(self, name: str) -> ForeignLayer:
        bits, source = self._bits or 0, self.source
        qweight = source.read(f"{name}.qweight", torch.int32, shape=(None, None))
        rows = qweight.shape[1]
        columns = qweight.shape[0] * 32 // bits
        scales = source.read(f"{name}.scales", *FLOATS, shape=(None, rows))
        groups = scales.shape[0]
        key = f"{name}.qzeros"
        qzeros = source.read(key, torch.int32, shape=(groups, -(-rows * bits // 32)))
        zeros = zero_points(unpack_from_int32(qzeros, bits, rows, key), bits, self._format, self._symmetric)
        group_of = self._group_of(name, columns, groups)
        return foreign_layer(
            name,
            bits,
            unpack_from_int32(qweight.T.contiguous(), bits, columns, f"{name}.qweight"),
            scales.T,
            zeros.T,
            options=self.options,
            bias=source.read(f"{name}.bias", *FLOATS, shape=(rows,)) if f"{name}.bias" in source else None,
            group_of=group_of,
        )

    def _group_of(self, name: str, columns: int, groups: int) -> torch.Tensor | None:
        if f"{name}.g_idx" in self.source:
            return self.source.read(f"{name}.g_idx", torch.int32, torch.int64, shape=(columns,))
        if flag(self.source.method, "desc_act", False):
            raise CheckpointError(f"layer '{name}': desc_act without g_idx; allowed: the group of each column")
        return None


def zero_points(stored: torch.Tensor, bits: int, version: str, symmetric: bool) -> torch.Tensor:
    """Zero points of codes that begin at -2^(bits-1), of what is stored, unpacked like codes.

    The zero point of symmetric codes is known, and shows what the file holds whatever it says: tools have written
    the numbers of version 2 under the name of version 1.

    Example:
        >>> zero_points(torch.tensor([[-1, 7]]), 4, "gptq", False).tolist()
        [[0, -8]]
    """
    first = int(stored.reshape(-1)[0]) if stored.numel() else 0
    if symmetric and bool((stored == first).all()):
        version = {0: _V2, -1: _V1}.get(first, version)
    if version == _V2:
        return stored
    qmin, qmax = code_type(bits).range
    return torch.where(stored == qmax, qmin, stored + 1)
