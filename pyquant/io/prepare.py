"""What may be saved, checked before anything is written, and in which portions it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pyquant.errors import ArgumentError
from pyquant.io.compressed_tensors import quantization_config, tensor_specs, to_tensors
from pyquant.io.manifest import DTYPE_NAMES
from pyquant.io.record import NAMES, LayerEntry, LayerRecord, check_layer, is_safe_name
from pyquant.io.strict_json import MAX_DEPTH

Layers = Mapping[str, Callable[[], LayerRecord]]  # each is made when it is needed, so that one at a time is in memory


def by_name(layers: Sequence[LayerRecord] | Layers) -> Layers:
    """{name: what gives the layer}. Raises ArgumentError for two layers of one name."""
    if isinstance(layers, Mapping):
        return layers
    found: dict[str, Callable[[], LayerRecord]] = {}
    for layer in layers:
        if layer.name in found:
            raise ArgumentError("layers", f"two layers named {layer.name!r}", "unique names")
        found[layer.name] = partial(_itself, layer)
    return found


def check_layers(layers: Layers) -> dict[str, LayerEntry]:
    """The entries of the layers by name, after check_layer() on each. Raises ArgumentError."""
    return {name: check_layer(give()) for name, give in layers.items()}


def check_tensors(other: Mapping[str, torch.Tensor], entries: Mapping[str, LayerEntry]) -> None:
    """Refuses tensors whose name, type or layout a file cannot hold or a layer needs. Raises ArgumentError."""
    taken = {name for entry in entries.values() for name in tensor_specs(entry)}
    if sum(len(tensor_specs(entry)) for entry in entries.values()) != len(taken):
        raise ArgumentError("layers", "two layers with a tensor of the same name", "unique names")
    for name in taken:
        if not is_safe_name(name):
            raise ArgumentError("layers", f"tensor name {name[:80]!r}", "at most 256 characters")
    for name, tensor in other.items():
        if not is_safe_name(name) or name in taken:
            allowed = f"{NAMES}, not the name of a layer's tensor"
            raise ArgumentError("other_tensors", f"name {str(name)[:80]!r}", allowed)
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"other_tensors[{name!r}]", type(tensor).__name__, "a tensor")
        if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided or tensor.device.type == "meta":
            got = f"{tensor.dtype} {tensor.layout} on {tensor.device}".replace("torch.", "")
            allowed = f"a strided tensor with data of type {' '.join(DTYPE_NAMES.values())}"
            raise ArgumentError(f"other_tensors[{name!r}]", got, allowed)


def check_json(argument: str, value: Mapping[str, Any], *, whole_keys: bool = False) -> dict[str, Any]:
    """A plain copy of what JSON can hold without change, tuples as lists. Raises ArgumentError.

    whole_keys  whole numbers may be keys, as in the id2label of a transformers configuration; they become text.
    """
    items = _items(argument, value, whole_keys)
    return {key: _json_ready(f"{argument}[{key[:40]!r}]", v, MAX_DEPTH - 2, whole_keys) for key, v in items}


def config_of(
    entries: Sequence[LayerEntry],
    other: Mapping[str, torch.Tensor],
    extra: Mapping[str, Any],
    model_config: Mapping[str, Any],
    head_prefix: str,
    refusal: str,
    patterns: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """The contents of config.json: the caller's keys, and quantization_config() where some layer has codes."""
    if "quantization_config" in model_config:
        allowed = "the other keys; this one is written by pyquant"
        raise ArgumentError("model_config", "a key 'quantization_config'", allowed)
    if not refusal and all(e.scheme.is_float or e.kind == "conv2d" for e in entries):
        return dict(model_config)
    ignore = [name.removesuffix(".weight") for name, t in other.items() if name.endswith(".weight") and t.ndim == 2]
    ignore += [e.name for e in entries if e.scheme.is_float or e.kind == "conv2d"]
    described = quantization_config(entries, ignore, extra.get("recipe"), head_prefix, refusal, patterns)
    return {**model_config, "quantization_config": described}


def parts_of(
    layers: Layers,
    entries: Mapping[str, LayerEntry],
    other: Mapping[str, torch.Tensor],
    max_shard_bytes: int,
) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of one shard after the other; a portion is packed only when it is consumed."""
    part: dict[str, torch.Tensor] = {}
    size = 0
    for unit in _units(layers, entries, other):
        unit_size = sum(t.numel() * t.itemsize for t in unit.values())
        if part and size + unit_size > max_shard_bytes:
            yield part
            part, size = {}, 0
        part |= unit
        size += unit_size
    if part:
        yield part


def _units(
    layers: Layers, entries: Mapping[str, LayerEntry], other: Mapping[str, torch.Tensor]
) -> Iterator[dict[str, torch.Tensor]]:
    for name in sorted(layers):
        yield to_tensors(layers[name](), entries[name])
    for name in sorted(other):
        yield {name: other[name].detach().to("cpu").contiguous()}


def _itself(layer: LayerRecord) -> LayerRecord:
    return layer


def _items(argument: str, value: Mapping[Any, Any], whole_keys: bool) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        raise ArgumentError(argument, type(value).__name__, "a mapping")
    items: dict[str, Any] = {}
    for key, item in value.items():
        is_whole = whole_keys and isinstance(key, int) and not isinstance(key, bool)
        if not isinstance(key, str) and not is_whole:
            raise ArgumentError(argument, f"key {key!r}"[:80], "text as keys, as in JSON")
        if str(key) in items:
            raise ArgumentError(argument, f"key {key!r} as a number and as text"[:80], "each key once")
        items[str(key)] = item
    return list(items.items())


def _json_ready(argument: str, value: object, levels: int, whole_keys: bool) -> object:
    if isinstance(value, (Mapping, list, tuple)) and levels == 0:
        raise ArgumentError(argument, "objects nested too deeply", f"{MAX_DEPTH - 1} levels")
    if isinstance(value, Mapping):
        items = _items(argument, value, whole_keys)
        return {key: _json_ready(f"{argument}[{key[:40]!r}]", v, levels - 1, whole_keys) for key, v in items}
    if isinstance(value, (list, tuple)):
        return [_json_ready(argument, v, levels - 1, whole_keys) for v in value]
    is_number = isinstance(value, (int, float)) and -(2.0**63) < value < 2.0**63
    if value is None or isinstance(value, (str, bool)) or is_number:
        return value
    got = f"{type(value).__name__} {value!r}"[:120]
    raise ArgumentError(argument, got, "null, text, booleans, finite numbers below 2^63, lists and objects of them")
