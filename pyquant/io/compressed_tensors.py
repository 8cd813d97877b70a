"""Our layers as compressed-tensors names, packs and describes them, so that other tools read the same files.

The rule for the format of a layer is the one compressed-tensors applies itself: 8-bit weights of a layer whose inputs
are quantised are stored plainly ('int-quantized'), other codes are packed into int32 ('pack-quantized'). 8-bit
embeddings are the exception: transformers fails on an embedding without a `weight`, so they are stored plainly too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final

import torch

from pyquant.core.dtypes import INT8, code_type
from pyquant.core.scheme import TensorScheme
from pyquant.errors import CheckpointError
from pyquant.io.record import LayerEntry, LayerRecord
from pyquant.io.strict_json import lines

SCHEMA: Final = 1
REFUSAL: Final = "for_pyquant_alone"
NARROW: Final = "narrow_inputs"  # names of layers whose static inputs are codes from -127 or -7
_TARGET_LENGTH: Final = 900  # of a pattern of several names: readers, our own too, limit an expression's length
TensorSpec = tuple[torch.dtype, tuple[int, ...]]

_STRATEGIES: Final = {"per_tensor": "tensor", "per_channel": "channel", "per_group": "group", "per_token": "token"}


def format_of(entry: LayerEntry) -> str | None:
    """'int-quantized', 'pack-quantized', or None for a 16-bit layer, which has no codes."""
    if entry.scheme.is_float:
        return None
    is_plain = entry.scheme.weights.code_type is INT8 and (entry.scheme.inputs is not None or entry.kind == "embedding")
    return "int-quantized" if is_plain else "pack-quantized"


def tensor_specs(entry: LayerEntry) -> dict[str, TensorSpec]:
    """Name, type and shape of every tensor that a layer has in a file, and no others (docs/file_format.md 3)."""
    specs = _weight_specs(entry)
    for prefix, one in (("input", entry.scheme.inputs), ("output", entry.scheme.outputs)):
        if one is not None and not one.dynamic:
            specs[f"{prefix}_scale"] = (torch.float32, (1,))
            if not one.symmetric:
                specs[f"{prefix}_zero_point"] = (torch.int8, (1,))
    if entry.bias is not None:
        specs["bias"] = (entry.bias, (entry.out_features,))
    return {_join(entry.name, suffix): spec for suffix, spec in specs.items()}


def to_tensors(layer: LayerRecord, entry: LayerEntry) -> dict[str, torch.Tensor]:
    """The tensors of a checked layer, on the CPU, by their names in the file; the keys are those of tensor_specs."""
    codes, bits = _cpu(layer.codes), entry.scheme.weights.bits
    by_suffix: dict[str, torch.Tensor] = {}
    if format_of(entry) == "pack-quantized":
        by_suffix["weight_packed"] = pack_to_int32(codes, bits)
        by_suffix["weight_shape"] = torch.tensor(codes.shape, dtype=torch.int64, device="cpu")
    else:
        by_suffix["weight"] = codes
    if layer.weight_scale is not None:
        by_suffix["weight_scale"] = _as_column(_cpu(layer.weight_scale), entry.scheme.weights)
    if layer.weight_zero_point is not None:
        zero_point = _as_column(_cpu(layer.weight_zero_point).to(torch.int8), entry.scheme.weights)
        by_suffix["weight_zero_point"] = zero_point if zero_point.ndim == 1 else pack_to_int32(zero_point.T, bits).T
    for field in ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "bias"):
        tensor = getattr(layer, field)
        if tensor is not None:
            by_suffix[field] = _cpu(tensor.to(torch.int8) if field.endswith("zero_point") else tensor)
    return {_join(layer.name, suffix): tensor.contiguous() for suffix, tensor in by_suffix.items()}


def from_tensors(entry: LayerEntry, tensors: MutableMapping[str, torch.Tensor]) -> LayerRecord:
    """The layer again; takes its tensors out of `tensors`, so that memory is freed layer by layer.

    tensors   types and shapes as tensor_specs says (the caller has checked).
    Raises CheckpointError where weight_shape or the padding of packed codes is not what the packing gives.
    """
    scheme, n, k = entry.scheme, entry.out_features, entry.in_features
    start = len(_join(entry.name, ""))
    by_suffix = {name[start:]: tensors.pop(name) for name in tensor_specs(entry)}
    scale, zero_point = by_suffix.get("weight_scale"), by_suffix.get("weight_zero_point")
    if "weight_packed" in by_suffix:
        if (got := by_suffix["weight_shape"].tolist()) != [n, k]:
            raise CheckpointError(f"tensor '{_join(entry.name, 'weight_shape')}': {got}; allowed: [{n}, {k}]")
        packed_name = _join(entry.name, "weight_packed")
        by_suffix["weight"] = unpack_from_int32(by_suffix.pop("weight_packed"), scheme.weights.bits, k, packed_name)
    if zero_point is not None:
        if zero_point.ndim == 2:
            name = _join(entry.name, "weight_zero_point")
            zero_point = unpack_from_int32(zero_point.T.contiguous(), scheme.weights.bits, n, name).T
        zero_point = zero_point.reshape(scheme.weights.scale_shape((n, k))).to(torch.int32)
        zero_point = zero_point.clone(memory_format=torch.contiguous_format)
    scale = None if scale is None else scale.reshape(scheme.weights.scale_shape((n, k)))
    others: dict[str, Any] = {name: getattr(entry, name) for name in ("activation", "clamp", "kind", "geometry")}
    others |= {name: by_suffix.get(name) for name in ("bias", "input_scale", "output_scale")}
    others |= {name: _int32(by_suffix.get(name)) for name in ("input_zero_point", "output_zero_point")}
    return LayerRecord(entry.name, scheme.to_dict(), k, n, by_suffix["weight"], scale, zero_point, **others)


def quantization_config(
    entries: Sequence[LayerEntry],
    ignore: Sequence[str],
    recipe: object,
    head_prefix: str = "",
    refusal: str = "",
    patterns: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """The `quantization_config` object of config.json.

    ignore       names of floating-point modules, which readers of the format must leave alone.
    recipe       what the model was made with, JSON-able, or None; only its SHA-256 is recorded.
    head_prefix  module under which a model with a head holds its body ('bert', 'model'), or ''. Where there is one,
                 targets are patterns that name a layer with and without it: transformers builds either from one file.
    refusal      why readers other than pyquant must not read the layers, or ''. They ignore what they do not know, but
                 for a key in a group, which is an error that shows the name of the group (compressed-tensors), and
                 weights of a target that are no object (vLLM, which takes no notice of such keys): these words both.
    patterns     {name of a layer: expressions that stand for it}: of experts, one for many; of layers that have another
                 name in the model than in its files, one for each.
    ->       accepted by compressed_tensors.quantization.QuantizationConfig; our own words are under "pyquant" alone,
             as that class refuses unknown keys inside a group.
    """
    groups: list[dict[str, Any]] = []
    for entry in sorted(entries, key=lambda e: e.name):
        format_name = format_of(entry)
        if format_name is None or entry.kind == "conv2d":  # the format knows no matrix for a convolution
            continue
        body = _group(entry, format_name)
        group = next((g for g in groups if {**g, "targets": []} == body), None)
        if group is None:
            groups.append(group := {**body, "targets": []})
        group["targets"].append(entry.name)
    for group in groups:
        group["targets"] = _targets(group["targets"], head_prefix, patterns or {})
    formats = sorted({g["format"] for g in groups})
    named = {f"group_{i}": g for i, g in enumerate(groups)}
    if refusal:
        named[refusal] = {"targets": ["-"], "weights": refusal, REFUSAL: True}
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": sorted(ignore),
        "config_groups": named,
        "pyquant": {
            "schema": SCHEMA,
            "epilogues": {e.name: e.activation for e in entries if e.activation != "none"},
            "chains": [],
            "recipe_sha256": "" if recipe is None else hashlib.sha256(lines({"recipe": recipe})).hexdigest(),
        },
    }


def pack_to_int32(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs codes along the last dimension, element 0 in the lowest bits, each stored as code + 2^(bits-1).

    codes   int8 [R, C] in [-2^(bits-1), 2^(bits-1) - 1].
    bits    4 or 8.
    ->      int32 [R, ceil(C * bits / 32)]; unused high bits are 0.
    Source: compressed-tensors, `pack_to_int32`.

    Example:
        >>> hex(pack_to_int32(torch.tensor([[-8, -7, 7]], dtype=torch.int8), 4).item())
        '0xf10'
    """
    rows, columns = codes.shape
    per_word = 32 // bits
    values = torch.zeros(rows, -(-columns // per_word) * per_word, dtype=torch.uint8, device=codes.device)
    values[:, :columns] = (codes - code_type(bits).qmin).view(torch.uint8)  # of 8 bits: modulo 256
    packed = values[:, 0 :: 8 // bits]
    for i in range(1, 8 // bits):
        packed = packed | values[:, i :: 8 // bits] << bits * i
    # through one dimension: a view of other width refuses some strides that is_contiguous() accepts
    return packed.reshape(-1).view(torch.int32).reshape(rows, _words(columns, bits))


def unpack_from_int32(packed: torch.Tensor, bits: int, columns: int, name: str) -> torch.Tensor:
    """The inverse of pack_to_int32: int8 [R, columns]. CheckpointError naming the tensor where further bits are set."""
    rows, words = packed.shape
    values = packed.reshape(-1).view(torch.uint8).reshape(rows, words * 4)
    if bits < 8:
        wide = torch.empty(rows, words * (32 // bits), dtype=torch.uint8, device=packed.device)
        for i in range(8 // bits):
            wide[:, i :: 8 // bits] = values >> bits * i & (1 << bits) - 1
        values = wide
    if values[:, columns:].any():
        raise CheckpointError(f"tensor '{name}': bits are set beyond column {columns}; allowed: 0 there")
    codes = values[:, :columns].contiguous().view(torch.int8)
    return codes.add_(code_type(bits).qmin)


def _weight_specs(entry: LayerEntry) -> dict[str, TensorSpec]:
    weights, n, k = entry.scheme.weights, entry.out_features, entry.in_features
    if entry.scheme.is_float:
        return {"weight": (getattr(torch, str(entry.scheme.float_dtype)), (n, k))}
    scale = weights.scale_shape((n, k))
    column = (n, 1) if weights.granularity == "per_channel" else scale
    specs: dict[str, TensorSpec] = {"weight_scale": (torch.float32, column)}
    if format_of(entry) == "pack-quantized":
        specs["weight_packed"] = (torch.int32, (n, _words(k, weights.bits)))
        specs["weight_shape"] = (torch.int64, (2,))
    else:
        specs["weight"] = (torch.int8, (n, k))
    if not weights.symmetric:
        # compressed-tensors packs the zero points of channels and groups along the channels, and leaves a single one
        is_single = weights.granularity == "per_tensor"
        packed = (1,) if is_single else (_words(n, weights.bits), column[1])
        specs["weight_zero_point"] = (torch.int8 if is_single else torch.int32, packed)
    return specs


def _group(entry: LayerEntry, format_name: str) -> dict[str, Any]:
    scheme = entry.scheme
    named = {"weights": scheme.weights, "input_activations": scheme.inputs, "output_activations": scheme.outputs}
    described = {name: _arguments(one) for name, one in named.items() if one is not None}
    return {"targets": [], "format": format_name, **described}


def narrow_inputs(entries: Iterable[LayerEntry]) -> list[str]:
    """Names of the layers whose static inputs leave the lowest code out, for which the format has no word."""
    all_inputs = ((entry.name, entry.scheme.inputs) for entry in entries)
    return sorted(n for n, x in all_inputs if x is not None and x.symmetric and x.narrow_range and not x.dynamic)


def _targets(names: Sequence[str], head_prefix: str, patterns: Mapping[str, Sequence[str]]) -> list[str]:
    if head_prefix or patterns:  # few patterns, as a reader tries every target on every module
        start = re.escape(f"{head_prefix}.") if head_prefix else ""
        bodies = sorted({one.removeprefix(start) for name in names for one in patterns.get(name, [re.escape(name)])})
        prefix = rf"(?:{start})?" if start else "^"
        return [f"re:{prefix}(?:{'|'.join(some)})$" for some in _in_lengths(bodies, _TARGET_LENGTH - len(prefix))]
    return [f"re:^{re.escape(name)}$" if name == "" or name.startswith("re:") else name for name in names]


def _in_lengths(texts: Sequence[str], most: int) -> Iterator[list[str]]:
    """The texts in order, as many at a time as are so long together, with a character between two."""
    some: list[str] = []
    for text in texts:
        if some and sum(map(len, some)) + len(some) + len(text) > most:
            yield some
            some = []
        some.append(text)
    if some:
        yield some


def _arguments(scheme: TensorScheme) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": _STRATEGIES[scheme.granularity],
        "dynamic": scheme.dynamic,
    }
    return arguments if scheme.group_size is None else {**arguments, "group_size": scheme.group_size}


def _as_column(tensor: torch.Tensor, weights: TensorScheme) -> torch.Tensor:
    return tensor.reshape(-1, 1) if weights.granularity == "per_channel" else tensor


def _join(name: str, suffix: str) -> str:
    return f"{name}.{suffix}" if name else suffix


def _words(columns: int, bits: int) -> int:
    return -(-columns * bits // 32)


def _cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu").contiguous()


def _int32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(torch.int32)
