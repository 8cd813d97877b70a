"""bitsandbytes in 8 bits: int8 rows with their largest value, SCB.

weight[n, k] = codes[n, k] * (SCB[n] / 127). The library itself multiplies by SCB first and by 1 / 127 then, which is
rounded otherwise; here the scale is rounded once, and the product once.
"""

from __future__ import annotations

from typing import Final

import torch

from pyquant.core.arguments import number
from pyquant.core.dtypes import FLOATS
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io.foreign.record import DYNAMIC_INT8, ForeignLayer, Options, flag, foreign_layer, owned_by, refused
from pyquant.io.foreign.source import Source

_SUFFIXES: Final = ("weight", "SCB", "weight_format", "bias")
_ROWS: Final = 0  # of weight_format: the others are layouts of older GPU kernels


class Reader:
    """The layers of a directory whose quant_method is 'bitsandbytes'."""

    def __init__(self, source: Source, options: Options) -> None:
        self.source, self.options = source, options
        if flag(source.method, "load_in_4bit", False) or not flag(source.method, "load_in_8bit", False):
            raise refused("load_in_8bit", False, "true: nf4 and fp4 are codes of a table, not of a scale")
        threshold = source.method.get("llm_int8_threshold", 6.0)
        try:
            # above it the library multiplies columns of activations in 16 bits: so floating point is nearer to it
            self._inputs = DYNAMIC_INT8 if number("llm_int8_threshold", threshold) == 0 else None
        except ArgumentError as error:
            raise CheckpointError(f"quantization_config: {error}") from None

    def layers(self) -> dict[str, frozenset[str]]:
        return owned_by(self.source, "SCB", _SUFFIXES)

    def dropped(self) -> frozenset[str]:
        return frozenset()

    def read(self, name: str) -> ForeignLayer:
        source = self.source
        codes = source.read(f"{name}.weight", torch.int8, shape=(None, None))
        rows = codes.shape[0]
        if f"{name}.weight_format" in source:
            form = source.read(f"{name}.weight_format", torch.uint8)
            if form.numel() != 1 or int(form) != _ROWS:
                raise CheckpointError(
                    f"layer '{name}': weight_format {form.flatten()[:4].tolist()}; allowed: {_ROWS}, rows"
                )
        largest = source.read(f"{name}.SCB", *FLOATS, shape=(rows,)).to(torch.float32)
        return foreign_layer(
            name,
            8,
            codes,
            (largest / 127.0).reshape(-1, 1),
            None,
            options=self.options,
            bias=source.read(f"{name}.bias", *FLOATS, shape=(rows,)) if f"{name}.bias" in source else None,
            inputs=self._inputs,
        )
