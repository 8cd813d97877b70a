"""Checkpoints in the format of compressed-tensors that other tools wrote (llm-compressor, compressed-tensors itself).

The layers that a file holds as codes are those with a `weight_scale`; `config_groups` says how their numbers are meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from pyquant.core.dtypes import FLOATS, KERNEL_BITS, KERNEL_BITS_TEXT
from pyquant.core.names import words
from pyquant.core.patterns import Expression
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io.compressed_tensors import NARROW, unpack_from_int32
from pyquant.io.foreign.record import ForeignLayer, Options, flag, foreign_layer, owned_by, refused, whole
from pyquant.io.foreign.source import Source

_FORMATS: Final = ("int-quantized", "pack-quantized", "naive-quantized")
_WEIGHT: Final = words("weight weight_packed weight_shape weight_scale weight_zero_point weight_g_idx")
_SUFFIXES: Final = (*_WEIGHT, "bias", "input_scale", "input_zero_point")
_KV_CACHE: Final = ("k_scale", "v_scale", "k_zero_point", "v_zero_point", "q_scale", "q_zero_point")
_STRATEGIES: Final = ("tensor", "channel", "group")
_UNSUPPORTED: Final = {
    "transform_config": "rotations of activations, without which its weights are wrong",
    "sparsity_config": "a sparse format",
    "moe_sparsity_config": "a sparse format",
}


@dataclass(frozen=True)
class _Group:
    """One of config_groups: which layers, and how."""

    name: str
    targets: tuple[str, ...]
    patterns: tuple[Expression, ...]
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None


class Reader:
    """The layers of a directory whose quant_method is 'compressed-tensors'."""

    def __init__(self, source: Source, options: Options) -> None:
        self.source, self.options = source, options
        _check_config(source.method, options)
        overall = source.method.get("format")
        groups = source.method.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise refused("config_groups", groups, "an object of groups")
        self._groups = [_group(name, body, overall) for name, body in groups.items()]
        own = source.method.get("pyquant")
        narrow = own.get(NARROW, []) if isinstance(own, dict) else []
        self._narrow = frozenset(str(one) for one in narrow) if isinstance(narrow, list) else frozenset()

    def layers(self) -> dict[str, frozenset[str]]:
        owned = owned_by(self.source, "weight_scale", _SUFFIXES)
        for key in self.source:  # of which nobody else knows what it is
            layer, _, suffix = key.rpartition(".")
            if suffix == "weight_packed" and layer not in owned:
                raise CheckpointError(f"layer '{layer}': packed codes without 'weight_scale'; allowed: with it")
        return owned

    def dropped(self) -> frozenset[str]:
        if not self.options.drop_kv_cache_scheme:
            return frozenset()
        return frozenset(key for key in self.source if key.rpartition(".")[2] in _KV_CACHE)

    def read(self, name: str) -> ForeignLayer:
        group = self._group_of(name)
        bits = whole(group.weights, "num_bits") or 0
        strategy = group.weights.get("strategy")
        codes = self._codes(name, bits)
        rows, columns = codes.shape
        scale = self.source.read(f"{name}.weight_scale", *FLOATS)
        if strategy == "tensor":
            scale = scale.reshape(-1)
        elif scale.dim() == 1:
            scale = scale.reshape(-1, 1)
        self._check_groups(name, group, scale, columns)
        zero_point = self._zero_point(name, bits, scale)
        if flag(group.weights, "symmetric", True) and zero_point is not None:
            if zero_point.any():
                raise CheckpointError(f"layer '{name}': zero points other than 0, and the config says symmetric")
            zero_point = None
        inputs = _inputs(name, group.inputs, name in self._narrow)
        is_static = inputs is not None and not inputs.dynamic
        group_of = self._optional(f"{name}.weight_g_idx", torch.int32, torch.int64)
        if group_of is not None and strategy == "group" and bool((group_of == -1).all()):
            group_of = None  # written before an order was found, and never filled
        return foreign_layer(
            name,
            bits,
            codes,
            scale,
            zero_point,
            options=self.options,
            bias=self._optional(f"{name}.bias", *FLOATS, shape=(rows,)),
            group_of=group_of,
            inputs=inputs,
            input_scale=self._single(f"{name}.input_scale", torch.float32) if is_static else None,
            input_zero_point=self._input_zero_point(name, inputs),
        )

    def _codes(self, name: str, bits: int) -> torch.Tensor:
        if f"{name}.weight_packed" not in self.source:
            return self.source.read(f"{name}.weight", torch.int8, shape=(None, None))
        if bits not in KERNEL_BITS:
            raise CheckpointError(f"layer '{name}': packed codes of {bits} bits; allowed: {KERNEL_BITS_TEXT}")
        shape = self.source.read(f"{name}.weight_shape", torch.int64, torch.int32, shape=(2,)).tolist()
        packed_name = f"{name}.weight_packed"
        packed = self.source.read(packed_name, torch.int32, shape=(None, None))
        rows, width = packed.shape
        if shape[0] != rows or not 0 <= shape[1] <= width * 32 // bits or -(-shape[1] * bits // 32) != width:
            raise CheckpointError(f"layer '{name}': weight_shape {shape} and {rows} x {width} packed words")
        return unpack_from_int32(packed, bits, shape[1], packed_name)

    def _check_groups(self, name: str, group: _Group, scale: torch.Tensor, columns: int) -> None:
        strategy, size = group.weights.get("strategy"), whole(group.weights, "group_size")
        got = scale.shape[-1] if scale.dim() == 2 else 1
        expected = 1 if strategy != "group" or not size or size < 0 else columns // size
        if got != expected:
            raise CheckpointError(
                f"layer '{name}': {got} scales a row; allowed: {expected}, as strategy and group_size say"
            )

    def _zero_point(self, name: str, bits: int, scale: torch.Tensor) -> torch.Tensor | None:
        key = f"{name}.weight_zero_point"
        if key not in self.source:
            return None
        found = self.source.read(key, torch.int8, torch.int32, torch.int64)
        if found.shape != scale.shape and found.dtype == torch.int32 and found.dim() == 2 and scale.dim() == 2:
            rows, groups = scale.shape
            if tuple(found.shape) != (-(-rows * bits // 32), groups):
                raise CheckpointError(f"tensor '{key}': {list(found.shape)}; allowed: zero points of {rows} x {groups}")
            return unpack_from_int32(found.T.contiguous(), bits, rows, key).T
        return found.reshape(scale.shape) if found.numel() == scale.numel() else found

    def _input_zero_point(self, name: str, inputs: TensorScheme | None) -> torch.Tensor | None:
        if inputs is None or inputs.dynamic or f"{name}.input_zero_point" not in self.source:
            return None
        found = self._single(f"{name}.input_zero_point", torch.int32)
        if inputs.symmetric and found.any():
            raise CheckpointError(f"layer '{name}': an input_zero_point other than 0, and the config says symmetric")
        return found

    def _single(self, key: str, dtype: torch.dtype) -> torch.Tensor:
        found = self.source.read(key)
        if found.numel() != 1:
            raise CheckpointError(f"tensor '{key}': {list(found.shape)}; allowed: one number")
        return found.reshape(1).to(dtype)

    def _optional(self, key: str, *dtypes: torch.dtype, shape: tuple[int, ...] | None = None) -> torch.Tensor | None:
        return self.source.read(key, *dtypes, shape=shape) if key in self.source else None

    def _group_of(self, name: str) -> _Group:
        """The group whose targets name the layer, name it by a pattern, or name its class: in this order; of several
        patterns the one that compressed-tensors takes, the first by its text (match_targets)."""
        for group in self._groups:
            if name in group.targets:
                return group
        matching = [(p.text[3:-3], i) for i, g in enumerate(self._groups) for p in g.patterns if p.matches(name)]
        if matching:
            return self._groups[min(matching)[1]]
        found = [g for g in self._groups if "Linear" in g.targets] or [g for g in self._groups if _classes(g)]
        if len(found) == 1:
            return found[0]
        got = f"{len(found)} groups that name classes alone" if found else "no group that names it"
        raise CheckpointError(f"layer '{name}': {got}; allowed: one, under its own name, a pattern or 'Linear'")


def _classes(group: _Group) -> list[str]:
    return [target for target in group.targets if target.isidentifier()]


def _check_config(method: Mapping[str, Any], options: Options) -> None:
    for key, what in _UNSUPPORTED.items():
        value = method.get(key)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise CheckpointError(f"quantization_config: {key}: {what}: not supported")
    if method.get("kv_cache_scheme") is not None and not options.drop_kv_cache_scheme:
        why = "kv_cache_scheme: the file quantises the key-value cache, which pyquant leaves in floating point"
        raise CheckpointError(f"quantization_config: {why}; allowed: drop_kv_cache_scheme=True")
    status = method.get("quantization_status", "compressed")
    if status != "compressed":
        raise refused("quantization_status", status, "'compressed': codes, not float weights")


def _group(name: str, body: object, overall: object) -> _Group:
    where = f"config_groups: {name[:80]}"
    if not isinstance(body, dict):
        raise refused(where, body, "an object, not the name of a preset")
    format_name = body.get("format") or overall
    if format_name not in _FORMATS:
        raise refused(f"{where}: format", format_name, ", ".join(_FORMATS))
    targets, weights, inputs = body.get("targets"), body.get("weights"), body.get("input_activations")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise refused(f"{where}: targets", targets, "a list of texts")
    if not isinstance(weights, dict) or weights.get("type", "int") != "int" or weights.get("dynamic", False):
        raise refused(f"{where}: weights", weights, "codes of type 'int', not dynamic")
    if weights.get("strategy") not in _STRATEGIES:
        raise refused(f"{where}: weights.strategy", weights.get("strategy"), ", ".join(_STRATEGIES))
    if body.get("output_activations") is not None:
        raise refused(f"{where}: output_activations", body["output_activations"], "null: results are real numbers")
    if inputs is not None and not isinstance(inputs, dict):
        raise refused(f"{where}: input_activations", inputs, "null or an object")
    try:
        # their match is of a beginning, ours of the whole
        patterns = tuple(Expression(f"(?:{target[3:]}).*") for target in targets if target.startswith("re:"))
    except ArgumentError as error:
        raise CheckpointError(f"quantization_config: {where}: targets: {error}") from None
    return _Group(name, tuple(targets), patterns, weights, inputs)


def _inputs(name: str, said: Mapping[str, Any] | None, is_narrow: bool) -> TensorScheme | None:
    if said is None:
        return None
    dynamic, strategy = said.get("dynamic", False), said.get("strategy")
    allowed = {True: "token", False: "tensor"}.get(dynamic) if isinstance(dynamic, bool) else None
    if said.get("type", "int") != "int" or allowed is None or strategy != allowed:
        got = f"activations: type {said.get('type')}, dynamic {dynamic}, strategy {strategy}"
        choices = "integers, dynamic by token or static by tensor; activations='float' leaves them in floating point"
        raise CheckpointError(f"layer '{name}': {got}; allowed: {choices}")
    granularity = "per_token" if dynamic else "per_tensor"
    symmetric, bits = flag(said, "symmetric", True), whole(said, "num_bits") or 0
    try:
        return TensorScheme(bits, symmetric, granularity, dynamic=dynamic, narrow_range=dynamic or is_narrow)
    except ArgumentError as error:
        raise CheckpointError(f"layer '{name}': activations: {error}") from None
