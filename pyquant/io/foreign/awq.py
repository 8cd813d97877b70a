"""AWQ checkpoints of AutoAWQ's GEMM version: codes and zero points packed along N, eight a word, interleaved.

weight[n, k] = scales[k // g, n] * (q[k, n] - z[k // g, n]), with q and z from 0 to 15.
"""

from __future__ import annotations

from typing import Final

import torch

from pyquant.core.dtypes import FLOATS
from pyquant.errors import CheckpointError
from pyquant.io.compressed_tensors import unpack_from_int32
from pyquant.io.foreign.record import ForeignLayer, Options, flag, foreign_layer, owned_by, refused, whole
from pyquant.io.foreign.source import Source

_BITS: Final = 4
_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word the code of each of eight columns lies
_SUFFIXES: Final = ("qweight", "qzeros", "scales", "bias")


class Reader:
    """The layers of a directory whose quant_method is 'awq'."""

    def __init__(self, source: Source, options: Options) -> None:
        self.source, self.options = source, options
        method = source.method
        bits = whole(method, "bits", whole(method, "w_bit", _BITS))
        if bits != _BITS:
            raise refused("bits", bits, str(_BITS))
        version = method.get("version", "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise refused("version", version, "'gemm': the others lay codes out for one kernel")
        flag(method, "zero_point", True)

    def layers(self) -> dict[str, frozenset[str]]:
        return owned_by(self.source, "qweight", _SUFFIXES)

    def dropped(self) -> frozenset[str]:
        return frozenset()

    def read(self, name: str) -> ForeignLayer:
        source = self.source
        scales = source.read(f"{name}.scales", *FLOATS, shape=(None, None))
        groups, rows = scales.shape
        if rows % len(_PLACES):
            raise CheckpointError(f"layer '{name}': {rows} outputs; allowed: a multiple of {len(_PLACES)}")
        zeros = self._unpacked(f"{name}.qzeros", groups, rows) if f"{name}.qzeros" in source else None
        if zeros is None and flag(source.method, "zero_point", True):
            raise CheckpointError(f"layer '{name}': no qzeros, and the config says zero_point")
        return foreign_layer(
            name,
            _BITS,
            self._unpacked(f"{name}.qweight", None, rows).T,
            scales.T,
            None if zeros is None else zeros.T,
            options=self.options,
            bias=source.read(f"{name}.bias", *FLOATS, shape=(rows,)) if f"{name}.bias" in source else None,
        )

    def _unpacked(self, key: str, height: int | None, rows: int) -> torch.Tensor:
        words = self.source.read(key, torch.int32, shape=(height, rows // len(_PLACES)))
        return unpacked(words, rows, key)


def unpacked(words: torch.Tensor, rows: int, key: str) -> torch.Tensor:
    """Codes int8 [K or groups, N] that begin at -8, of words [K or groups, N / 8].

    Example:
        >>> unpacked(torch.tensor([[0x75316420]], dtype=torch.int32), 8, "w").tolist()
        [[-8, -7, -6, -5, -4, -3, -2, -1]]
    """
    mixed = unpack_from_int32(words, _BITS, rows, key)
    return mixed.reshape(words.shape[0], -1, len(_PLACES))[:, :, list(_PLACES)].reshape(words.shape[0], rows)
