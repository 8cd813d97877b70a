"""save_pretrained: a whole model to a checkpoint directory."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.core.dtypes import dtype_name
from pyquant.core.names import GIVEN_CALIBRATOR
from pyquant.core.presets import W8A16
from pyquant.core.registry import CALIBRATORS
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError, QuantizationWarning, UnsupportedError
from pyquant.io import LayerRecord, save_checkpoint
from pyquant.io.atomic import put_beside
from pyquant.io.compressed_tensors import NARROW, narrow_inputs
from pyquant.io.prepare import check_layers, check_tensors, config_of, parts_of
from pyquant.io.pretrained.expert_files import Matrix, matrices_of
from pyquant.nn import foreign_saves, refusals
from pyquant.nn.chain import QResidual
from pyquant.nn.experts import QExperts
from pyquant.nn.forms import exposed
from pyquant.nn.fuse import fused_activations
from pyquant.nn.gated_feed import gated_feeds
from pyquant.nn.hadamard_linear import HadamardLinear
from pyquant.nn.offloaded import refuse_offloaded
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear
from pyquant.nn.reordered import Reordered
from pyquant.nn.undo import Undo, put

OWN_EXTRA: Final = "pyquant_modules"


class Source(Protocol):
    """Where the numbers of a model are that it does not hold itself."""

    def record(self, name: str, layer: QLinear | QConv2d | QEmbedding) -> LayerRecord:
        """What a directory holds of a quantised layer, which may be empty."""

    def tensor(self, name: str) -> Tensor:
        """A tensor of the model's state_dict that is on the meta device."""


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    recipe: object = None,
) -> str:
    """Write a model to a directory: safetensors, config.json, a manifest with SHA-256 of everything; atomically.

    model         any nn.Module (of what torch.compile, DataParallel or DistributedDataParallel made of one, that one;
                  of parts of it that torch.compile was given, those); QLinear, QConv2d and QEmbedding as codes and
                  scales, all else as its state_dict says.
    directory     made if missing; a pyquant checkpoint in it is replaced.
    extra         JSON-able words to keep beside the tensors.
    model_config  further keys of config.json, for instance a transformers configuration (`config.to_dict()`). A model
                  of transformers brings its own, which these keys add to, and its generation_config.json; with
                  compressed-tensors installed AutoModel.from_pretrained reads the directory, in floating point;
                  where it holds layers that only pyquant can read (GPT-2's Conv1D, convolutions) a QuantizationWarning
                  says so, and from_pretrained stops at config.json with the same words.
    recipe        what the model was quantised by, a pyquant.Recipe or its plain data: kept as extra['recipe'], its
                  SHA-256 as recipe_sha256 in config.json.
    ->            SHA-256 of the manifest; load_pretrained(..., manifest_sha256=...) pins it.
    Raises ArgumentError for what cannot be saved (an uncalibrated layer, one that simulates still and is for convert_,
    meta tensors, a state that is no tensor), before anything is written; CheckpointError when writing fails. Source:
    docs/file_format.md.

    Example:
        >>> import tempfile, pyquant
        >>> build = lambda: nn.Sequential(nn.Linear(8, 4))
        >>> model = pyquant.quantize_(build(), pyquant.W8A8Dynamic())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save_pretrained(model, folder)
        ...     again = pyquant.load_pretrained(folder, build)
        >>> torch.equal(model(torch.ones(1, 8)), again(torch.ones(1, 8)))
        True
    """
    arguments.module("model", model)
    with inner_uncompiled(unwrapped(model)) as inner:
        return write(inner, directory, extra=extra, model_config=model_config, recipe=recipe)


@contextmanager
def inner_uncompiled(model: nn.Module) -> Iterator[nn.Module]:
    """The model, where the parts that torch.compile made something of (`model.blocks[0] = torch.compile(...)`) are
    themselves, and so are their names."""
    undo: list[Undo] = []
    try:
        for module in list(model.modules()):
            for key, child in list(module._modules.items()):
                if isinstance(original := getattr(child, "_orig_mod", None), nn.Module):
                    put(cast(dict[str, Any], module._modules), key, original, undo)
        yield model
    finally:
        for step in reversed(undo):
            step()


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of wrappers that give its tensors other names than load_pretrained's builder does."""
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        inner = model.module if isinstance(model, parallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def write(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    recipe: object = None,
    source: Source | None = None,
) -> str:
    """save_pretrained, of a model whose numbers may lie elsewhere: `source` has them then."""
    from pyquant.integrations import transformers  # never at import: it is another library's business

    arguments.module("model", model)
    if model_config is not None and not isinstance(model_config, Mapping):
        raise ArgumentError("model_config", type(model_config).__name__, "a mapping, such as config.to_dict()")
    if extra is not None and (not isinstance(extra, Mapping) or OWN_EXTRA in extra):
        raise ArgumentError(
            "extra", f"{type(extra).__name__} {extra!r}"[:120], f"a mapping without the key '{OWN_EXTRA}'"
        )
    refusals.check_not_simulating(model)
    aliases: dict[str, str] = {}
    layers: dict[str, Callable[[], LayerRecord]] = {}
    kinds: dict[str, str] = {}
    first_names: dict[int, str] = {}
    dtypes: dict[str, str] = {}
    notes: dict[str, str] = {}
    if recipe is not None:
        extra = {**(extra or {}), "recipe": _recipe_data(recipe, extra)}
    theirs = transformers.is_model(model)
    config = transformers.config_of(model, model_config) if theirs else model_config
    for name, module in _quantised(model):
        if id(module) in first_names:
            aliases[name] = first_names[id(module)]
            if not theirs:  # transformers knows no aliases: it finds a layer under each of its names
                continue
        first_names.setdefault(id(module), name)
        layers[name] = partial(record_of if source is None else source.record, name, module)
        kinds[name] = _kind(module)
        if module.dtype != torch.float32:
            dtypes[name] = dtype_name(module.dtype)
        if getattr(module, "note", ""):
            notes[name] = str(module.note)
    others = _other_tensors(model, [*layers, *aliases], source)
    residuals = {n: _in_files(m.scheme) for n, m in modules_by_name(model).items() if isinstance(m, QResidual)}
    own = {"aliases": aliases, "dtypes": dtypes, "fused": fused_activations(model)}
    reordered, blocks = _transforming(model)
    optional = {"residuals": residuals, "exposed": exposed(model), "notes": notes}
    optional |= {"reordered": reordered, "hadamard": blocks, "gated": sorted(gated_feeds(model))}
    refusal = _refusal(_strange(model, kinds, theirs))
    own_extra = {OWN_EXTRA: own | {key: value for key, value in optional.items() if value}}
    digest = save_checkpoint(
        directory,
        layers,
        others,
        extra={**(extra or {}), **own_extra},
        model_config=config,
        head_prefix=transformers.head_prefix(model) if theirs else "",
        refusal=refusal,
    )
    if refusal:
        warnings.warn(f"save_pretrained: {refusal}", QuantizationWarning, stacklevel=2)
    if theirs:
        put_beside(directory, transformers.generation_files(model))
    return digest


def has_codes(model: nn.Module) -> bool:
    """Whether some layer of a model holds codes, so that its state_dict is none of floats."""
    layers = (module for _, module in _quantised(model))
    return any(isinstance(layer, QEmbedding) or not layer.scheme.is_float for layer in layers)


def as_compressed_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """A quantised model of transformers as a compressed-tensors file names, packs and describes it.

    model  of transformers, with quantised layers.
    ->     {name: tensor} on the CPU; the words of `quantization_config`; the other keys of config.json.
    Activations that were fused into layers are not told: a reader's model computes them itself.
    Raises UnsupportedError where a layer is none that such files can hold, ArgumentError where one lacks its scales.
    """
    from pyquant.integrations import transformers

    refusals.check_not_simulating(model)
    layers = dict(_quantised(model))
    strange = _strange(model, {name: _kind(layer) for name, layer in layers.items()}, True)
    experts = matrices_of(model)
    refusal = _refusal({name: kind for name, kind in strange.items() if name not in experts})
    if refusal:
        raise UnsupportedError(f"{refusal}; pyquant.save_pretrained(model, directory) writes it")
    given: dict[str, Callable[[], LayerRecord]] = {}
    for name, layer in layers.items():
        give = partial(record_of, name, layer)
        parts = experts.get(name)
        given |= {name: give} if parts is None else {one.name: partial(_part, one, give) for one in parts}
    entries = check_layers(given)
    others = _other_tensors(model, list(layers))
    check_tensors(others, entries)
    keys = transformers.config_of(model)
    keys.pop("quantization_config", None)
    patterns = {one.name: [one.pattern] for parts in experts.values() for one in parts}
    renamed = transformers.layer_names_in_files(model, layers.keys() - experts.keys())
    patterns |= {name: [re.escape(name), re.escape(other)] for name, other in renamed.items()}
    described = config_of(list(entries.values()), others, {}, keys, transformers.head_prefix(model), "", patterns)
    quantization = described.pop("quantization_config")
    narrow = narrow_inputs(entries.values())
    if narrow:  # where save_pretrained writes, its manifest says so
        quantization["pyquant"][NARROW] = sorted({renamed.get(name, name) for name in narrow})
    tensors = {name: t for part in parts_of(given, entries, others, sys.maxsize) for name, t in part.items()}
    if transformers.has_untied(model):
        _part_from_each_other(tensors)
    return tensors, quantization, described


def _part_from_each_other(tensors: dict[str, Tensor]) -> None:
    """Copies of tensors that share memory: transformers stores such as one of them."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.untyped_storage().data_ptr() in seen:
            tensors[name] = tensor.clone()
        seen.add(tensors[name].untyped_storage().data_ptr())


def _part(matrix: Matrix, give: Callable[[], LayerRecord]) -> LayerRecord:
    return matrix.of(give())


def _transforming(model: nn.Module) -> tuple[list[str], dict[str, Any]]:
    """Layers that do something to their inputs first: those that reorder them, and {name: block} or {name: [block,
    scale]} of HadamardLinears."""
    modules = modules_by_name(model)
    reordered = [name for name, module in modules.items() if isinstance(module, Reordered)]
    turned = {name: m for name, m in modules.items() if isinstance(m, HadamardLinear)}
    return reordered, {name: m.block if m.scale is None else [m.block, m.scale] for name, m in turned.items()}


def _strange(model: nn.Module, kinds: Mapping[str, str], theirs: bool) -> dict[str, str]:
    """{name: what it is} of the layers that a reader other than pyquant would take for plain Linears."""
    from pyquant.integrations import transformers

    reordered, blocks = _transforming(model)
    strange = transformers.unreadable_layers(model, kinds) if theirs else {}
    strange |= dict.fromkeys(reordered, "Linear that takes its inputs in another order")
    return strange | dict.fromkeys(blocks, "Linear that transforms its inputs (HadamardLinear)")


def _refusal(strange: Mapping[str, str]) -> str:
    """What a reader other than pyquant is told of layers that it would take for others, or ''."""
    if not strange:
        return ""
    name, kind = next(iter(strange.items()))
    more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
    return (
        f"transformers cannot read this folder, as compressed-tensors knows Linear layers alone and {name}{more} is a "
        f"{kind} there: read it with pyquant.load_pretrained, or leave such layers out of the config of quantize_"
    )


def _recipe_data(recipe: object, extra: Mapping[str, Any] | None) -> object:
    if extra is not None and "recipe" in extra:
        raise ArgumentError("recipe", "given, and extra['recipe'] too", "one of the two")
    data = recipe.to_dict() if hasattr(recipe, "to_dict") else recipe
    if not isinstance(data, Mapping):
        raise ArgumentError("recipe", type(recipe).__name__, "a Recipe, or its plain data")
    return data


def _quantised(model: nn.Module) -> Iterator[tuple[str, QLinear | QConv2d | QEmbedding]]:
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (QLinear, QConv2d, QEmbedding, QExperts)) and module.share:
            raise UnsupportedError(
                f"layer '{name}' is {module.share}, and a directory holds whole layers: call gather_quantized_ of "
                "pyquant.integrations.distributed on every rank first, and save on one"
            )
        if isinstance(module, (QLinear, QConv2d, QEmbedding)):
            yield name, module


def record_of(name: str, layer: QLinear | QConv2d | QEmbedding) -> LayerRecord:
    """What a directory holds of a layer. Raises ArgumentError where it lacks its scales, UnsupportedError where it is
    offloaded."""
    refuse_offloaded(name, layer)
    return _embedding_record(name, layer) if isinstance(layer, QEmbedding) else _layer_record(name, layer)


def _layer_record(name: str, layer: QLinear | QConv2d) -> LayerRecord:
    if layer.missing is not None:
        raise ArgumentError("model", f"layer '{name}' without {layer.missing}", "layers with all their scales")
    scale, zero_point = layer.weight_scale_, layer.weight_zero_point_
    if layer.scheme.weights.granularity == "per_tensor":  # layers hold it for each row
        scale = None if scale is None else torch.cat([scale, scale.new_ones(1)])[:1]
        zero_point = None if zero_point is None else torch.cat([zero_point, zero_point.new_zeros(1)])[:1]
    return LayerRecord(
        name=name,
        scheme=_in_files(layer.scheme),
        in_features=layer.in_features,
        out_features=layer.out_features,
        codes=layer.codes,
        weight_scale=scale,
        weight_zero_point=zero_point,
        bias=layer.bias_,
        input_scale=layer.input_scale_,
        input_zero_point=layer.input_zero_point_,
        output_scale=layer.output_scale_,
        output_zero_point=layer.output_zero_point_,
        activation=layer.activation,
        clamp=layer.clamp if layer.activation == "clamp" else None,
        kind=_kind(layer),
        geometry=asdict(layer.patches) if isinstance(layer, QConv2d) else None,
    )


def _kind(layer: nn.Module) -> str:
    return "embedding" if isinstance(layer, QEmbedding) else "conv2d" if isinstance(layer, QConv2d) else "linear"


def _in_files(scheme: QScheme | TensorScheme) -> dict[str, Any]:
    """Its plain data; a calibrator of the user's own becomes 'fixed', whose range is in the file."""
    data = scheme.to_dict()
    for tensor in (data, *data.values()):
        name = tensor.get("calibrator") if isinstance(tensor, dict) else None
        if name is not None and not CALIBRATORS.find(name).function.__module__.startswith("pyquant."):
            tensor["calibrator"] = GIVEN_CALIBRATOR
    return data


def _embedding_record(name: str, layer: QEmbedding) -> LayerRecord:
    return LayerRecord(
        name=name,
        scheme=W8A16().to_dict(),
        in_features=layer.embedding_dim,
        out_features=layer.num_embeddings,
        codes=layer.codes,
        weight_scale=layer.weight_scale_,
        kind=_kind(layer),
    )


class _Others(Mapping[str, Tensor]):
    """Tensors by name; those on the meta device are read when they are asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], source: Source) -> None:
        self._tensors, self._source = tensors, source

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return self._source.tensor(name) if tensor.is_meta else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _other_tensors(model: nn.Module, quantised: list[str], source: Source | None = None) -> Mapping[str, Tensor]:
    others: dict[str, Tensor] = {}
    twice = _stored_before(model, quantised)
    for key, value in state_without_codes(model).items():
        if is_inside(key, quantised) or key in twice:
            continue
        if not isinstance(value, Tensor):
            raise ArgumentError("model", f"state '{key}', a {type(value).__name__}", "a state_dict of tensors")
        if value.is_meta and source is None:
            raise ArgumentError("model", f"tensor '{key}' on the meta device", "tensors that hold numbers")
        if any(kind.__name__ == "DTensor" for kind in type(value).__mro__):
            raise UnsupportedError(
                f"tensor '{key}' is a DTensor, of which every process holds a part, and a directory holds whole ones: "
                "save the model before parallelize_module or fully_shard, or as it is by torch.distributed.checkpoint; "
                "to save what from_pretrained loads in parts, load it in one process (quantize_checkpoint_, 'pyquant "
                "convert')"
            )
        others[key] = value
    return others if source is None else _Others(others, source)


def _stored_before(model: nn.Module, quantised: list[str]) -> set[str]:
    """Names of a transformers model's tensors that are tied to one of another name, under which they are stored: some
    readers have no place for both. None where readers are told that nothing is tied."""
    from pyquant.integrations import transformers

    seen: set[int] = set()
    found: set[str] = set()
    if not transformers.is_model(model) or transformers.has_untied(model):
        return found
    for key, value in state_without_codes(model, keep_vars=True).items():
        if isinstance(value, nn.Parameter) and not is_inside(key, quantised):
            found |= {key} if id(value) in seen else set()
            seen.add(id(value))
    return found


def state_without_codes(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """The state_dict of a model but for its quantised layers, which would unpack the codes of all of them for it."""
    with foreign_saves.without_codes():
        return model.state_dict(keep_vars=keep_vars)


def is_inside(key: str, modules: list[str] | set[str]) -> bool:
    """Whether a state_dict key belongs to one of the modules."""
    return key.rpartition(".")[0] in modules


def modules_by_name(skeleton: nn.Module) -> dict[str, nn.Module]:
    return dict(skeleton.named_modules(remove_duplicate=False))
