"""torchao checkpoints in safetensors: Int8Tensor and IntxUnpackedToInt8Tensor, described by the files' metadata.

weight[n, k] = scale[n, k // g] * (qdata[n, k] - zero_point[n, k // g]).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from pyquant.core.dtypes import FLOATS
from pyquant.core.scheme import TensorScheme
from pyquant.errors import CheckpointError
from pyquant.io.foreign.record import DYNAMIC_INT8, ForeignLayer, Options, foreign_layer, owned_by
from pyquant.io.foreign.source import Source
from pyquant.io.foreign.tensors import words_of

_SUFFIXES: Final = ("_weight_qdata", "_weight_scale", "_weight_zero_point", "bias")
_KINDS: Final = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
_BITS: Final = {"int4": 4, "int8": 8}
_AFFINE_TOKENS: Final = TensorScheme(symmetric=False, granularity="per_token", dynamic=True)


class Reader:
    """The layers of a directory whose quant_method is 'torchao'."""

    def __init__(self, source: Source, options: Options) -> None:
        self.source, self.options = source, options

    def layers(self) -> dict[str, frozenset[str]]:
        return owned_by(self.source, "_weight_qdata", _SUFFIXES)

    def dropped(self) -> frozenset[str]:
        return frozenset()

    def read(self, name: str) -> ForeignLayer:
        source, said = self.source, self._words(name)
        kind, data = said.get("_type"), said.get("_data")
        if kind not in _KINDS or not isinstance(data, Mapping):
            allowed = f"{' or '.join(_KINDS)}: the others are layouts of one kernel, or have real zero points"
            raise CheckpointError(f"layer '{name}': a {str(kind)[:80]}; allowed: {allowed}")
        bits = 8 if kind == "Int8Tensor" else _BITS.get(str(_inner(data.get("target_dtype"))), 0)
        codes = source.read(f"{name}._weight_qdata", torch.int8, shape=(None, None))
        rows = codes.shape[0]
        scale = source.read(f"{name}._weight_scale", *FLOATS)
        zero_point = self._zero_point(name, scale)
        if data.get("block_size") == list(codes.shape) and scale.numel() == 1 and rows != 1:
            scale = scale.reshape(1)
            zero_point = None if zero_point is None else zero_point.reshape(1)
        return foreign_layer(
            name,
            bits,
            codes,
            scale,
            zero_point,
            options=self.options,
            bias=source.read(f"{name}.bias", *FLOATS, shape=(rows,)) if f"{name}.bias" in source else None,
            inputs=None if self.options.activations == "float" else _inputs(name, data),
        )

    def _words(self, name: str) -> dict[str, Any]:
        where = f"metadata of '{name}.weight'"
        if f"{name}.weight" not in self.source.metadata:
            raise CheckpointError(f"{where}: not there; allowed: what flatten_tensor_state_dict of torchao writes")
        return words_of(self.source.metadata[f"{name}.weight"].encode("utf-8", "replace"), where)

    def _zero_point(self, name: str, scale: torch.Tensor) -> torch.Tensor | None:
        key = f"{name}._weight_zero_point"
        if key not in self.source:
            return None
        found = self.source.read(key, torch.int8, torch.int32, *FLOATS, shape=tuple(scale.shape))
        if found.is_floating_point():
            if not bool((found == found.round()).all()):
                raise CheckpointError(f"tensor '{key}': real zero points; allowed: whole numbers")
            found = found.clamp(-(2**15), 2**15).to(torch.int32)
        return found


def _inputs(name: str, data: Mapping[str, Any]) -> TensorScheme | None:
    """How activations are quantised: both kinds of tensors have words of their own for it."""
    rows, tokens = data.get("act_quant_kwargs"), data.get("activation_quantization")
    if rows is None and tokens is None:
        return None
    if tokens == "int8_asym_per_token":
        return _AFFINE_TOKENS
    kwargs = _inner(rows)
    if isinstance(kwargs, Mapping) and _inner(kwargs.get("mapping_type")) == "SYMMETRIC":
        granularity = kwargs.get("granularity")
        if isinstance(granularity, Mapping) and granularity.get("_type") == "PerRow":
            return DYNAMIC_INT8
    got = f"activations {str(tokens or rows)[:120]}"
    raise CheckpointError(f"layer '{name}': {got}; allowed: symmetric by row; activations='float' leaves them alone")


def _inner(value: object) -> Any:
    """What torchao wraps into {'_type': ..., '_data': ...}."""
    return value.get("_data") if isinstance(value, Mapping) else value
