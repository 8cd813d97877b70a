"""load_quantized_: a checkpoint of another tool into a model; the one place that builds layers of foreign records."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.core.names import listed
from pyquant.core.presets import W8A16
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io import LayerRecord
from pyquant.io.foreign import ForeignCheckpoint, ForeignLayer, open_foreign
from pyquant.io.foreign.join import joined
from pyquant.io.pretrained.expert_names import ExpertNames, Place
from pyquant.io.pretrained.float_weights import NEVER_USED
from pyquant.io.pretrained.place import assign, check_keys, check_no_meta, layer_of, module_of, refill
from pyquant.io.pretrained.save import is_inside, modules_by_name
from pyquant.nn.forms import expose_reversibly
from pyquant.nn.qlinear import QLinear
from pyquant.nn.reordered import Reordered
from pyquant.nn.state import device_of
from pyquant.nn.swap import swap_modules
from pyquant.nn.undo import undone_on_error


def load_quantized_(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    activations: str = "file",
    drop_kv_cache_scheme: bool = False,
    rename: Callable[[str], str] | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Fill a model, in place, with the weights of a quantised checkpoint that another tool wrote.

    Its layers become QLinears whose weights are those of the file, to the bit; docs/checkpoints.md lists the formats.
    None of those tools need be installed. Tensors are read one at a time.

    model        the float model as its code builds it (AutoModelForCausalLM.from_config(config)); its weights are not
                 used, so it may be on the meta device. On any error it is as before.
    path         the directory, with config.json and safetensors files, or a file that ends in .gguf.
    activations  'file': codes where the file says so, else floating point. 'float': never codes. 'int8': codes with a
                 scale a token, for symmetric weights.
    drop_kv_cache_scheme  whether a key-value cache that the file quantises may stay in floating point.
    rename       name of a tensor in the file -> its name in the model; None: they are the same.
    device       where the whole model is moved at the end; None: every layer stays on the device where the module was
                 (meta: CPU).
    ->           the model. Tensors that are not quantised take the type that they have in the model.
    Raises CheckpointError naming what was found and what is allowed, for what cannot be taken exactly, for damaged
    files, and where file and model differ; ArgumentError for wrong arguments.

    Example:
        >>> import json, pathlib, tempfile
        >>> from safetensors.torch import save_file
        >>> weights = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
        >>> words = {"quant_method": "compressed-tensors", "format": "int-quantized",
        ...     "config_groups": {"all": {"targets": ["Linear"], "weights": weights}}}
        >>> codes = torch.tensor([[1, -2]], dtype=torch.int8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "config.json").write_text(json.dumps({"quantization_config": words}))
        ...     save_file({"0.weight": codes, "0.weight_scale": torch.tensor([[0.5]])}, f"{folder}/model.safetensors")
        ...     model = load_quantized_(nn.Sequential(nn.Linear(2, 1, bias=False)), folder)
        >>> model(torch.ones(1, 2)).tolist()
        [[-0.5]]
    """
    arguments.module("model", model)
    arguments.function("rename", rename, "(name) -> name")
    target = None if device is None else device_of(device)
    checkpoint = open_foreign(path, activations=activations, drop_kv_cache_scheme=drop_kv_cache_scheme)
    return place(model, checkpoint, lambda name: name if rename is None else new_name(rename(name)), target)


def place(
    model: nn.Module, checkpoint: ForeignCheckpoint, renamed: Callable[[str], str], target: torch.device | None
) -> nn.Module:
    """Put a foreign checkpoint's layers and tensors into a model, all of them or none."""
    from pyquant.integrations import transformers  # never at import: it is another library's business

    checkpoint.check_rules()
    experts, ignores = ExpertNames(model), transformers.ignored_names(model)
    homes = {name: experts.place(_layer_name(renamed, name)) for name in checkpoint.layers}
    homes = {name: home for name, home in homes.items() if not ignores(f"{home.module}.weight")}
    if len(set(homes.values())) != len(homes):
        raise ArgumentError("rename", "a function that gives two layers one name", "a name for each")
    wanted = {home.module for home in homes.values()}
    banks = experts.quantised(wanted)
    with undone_on_error() as undo:
        expose_reversibly(model, lambda module, name: name in wanted or name in banks, undo, True)
        names = modules_by_name(model)
        new: list[tuple[list[str], nn.Module]] = []
        tensors: dict[str, Tensor] = {}
        for place, layer in whole_layers(checkpoint, homes, experts):
            old = names.get(place)
            if old is None:
                raise CheckpointError(f"layer '{place}' is in the file; the model has no module of that name")
            if experts.is_router(place) and not isinstance(old, nn.Linear):
                tensors[f"{place}.weight"] = real_weight(layer)  # a parameter of the model, not a layer
                continue
            check_place(place, old)
            new.append(([name for name, module in names.items() if module is old], built(layer, old)))
        others = ((experts.renamed(renamed(name)), tensor) for name, tensor in checkpoint.read_tensors())
        tensors |= experts.floats({name: tensor for name, tensor in others if not ignores(name)}, banks)
        quantised = [name for places_of, _ in new for name in places_of]
        tensors = _for_model(model, tensors, quantised)
        check_keys(model, quantised, tensors)
        assign(model, tensors, undo)
        swap_modules(model, new, undo=undo)
        refill(model, undo)
        check_no_meta(model)
        transformers.forget_quantization(model, undo)
        if target is not None:
            swap_modules(model, [], device=target, undo=undo)
    return model


def whole_layers(
    checkpoint: ForeignCheckpoint, homes: Mapping[str, Place], experts: ExpertNames
) -> Iterator[tuple[str, ForeignLayer]]:
    """(module of the model, its layer), each once it is whole: of two halves the first waits for the second."""
    waiting: dict[str, tuple[int, ForeignLayer]] = {}
    for layer in checkpoint.read_layers(homes):
        home = homes[layer.record.name]
        if home.half is None:
            yield home.module, layer
        elif home.module not in waiting:
            waiting[home.module] = home.half, layer
        else:
            first = waiting.pop(home.module)[1]
            gate, up = (layer, first) if home.half == 0 else (first, layer)
            yield home.module, joined(home.module, gate, up, interleaved=experts.is_interleaved(home.module))
    for module, (_, layer) in waiting.items():
        raise CheckpointError(f"layer '{layer.record.name}': half of '{module}'; allowed: both, gate and up, as codes")


def real_weight(layer: ForeignLayer) -> Tensor:
    """The weight of a layer as real numbers, float32. Raises CheckpointError for one with a bias."""
    if layer.record.bias is not None:
        raise CheckpointError(f"layer '{layer.record.name}': a router with a bias; allowed: none")
    found = layer_of(layer.record).to_float().weight.detach()
    return found if layer.order is None else found[:, torch.argsort(layer.order)]


def check_place(name: str, old: nn.Module) -> None:
    """Raise CheckpointError where a layer of a file cannot take the place of what the model has."""
    if not isinstance(old, nn.Embedding) and (
        not isinstance(old, nn.Linear) or type(old).forward is not nn.Linear.forward
    ):
        allowed = "Linear, or Embedding"
        raise CheckpointError(f"layer '{name}': the model has a {type(old).__name__} there; allowed: {allowed}")


def built(layer: ForeignLayer, old: nn.Module) -> nn.Module:
    """The layer that takes the place of a Linear or Embedding. Raises CheckpointError for what no table can hold."""
    if isinstance(old, nn.Embedding):
        return module_of(_table(layer.record), old, old.weight.dtype)
    new = module_of(layer.record, old, cast(nn.Linear, old).weight.dtype)
    if layer.order is None or not isinstance(new, QLinear):
        return new
    return Reordered(new, layer.order.to(new.storage.device)).train(old.training)


def _table(record: LayerRecord) -> LayerRecord:
    """A weight-only layer as an embedding's table: int8 in [-127, 127], one scale a row."""
    scheme = QScheme.from_dict(record.scheme)
    rows = replace(scheme, weights=replace(scheme.weights, narrow_range=True, calibrator="max"))
    if rows != W8A16() or record.bias is not None or bool((record.codes == -128).any()):
        got = (
            f"an embedding of {scheme.weights.bits} bits {scheme.weights.granularity}, codes from {record.codes.min()}"
        )
        allowed = "int8 codes from -127 to 127 with one scale a row, and nothing else"
        raise CheckpointError(f"layer '{record.name}': {got}; allowed: {allowed}")
    return replace(record, scheme=W8A16().to_dict(), kind="embedding")


def new_name(name: object) -> str:
    """What a caller's `rename` returned. Raises ArgumentError for what is no text."""
    if not isinstance(name, str):
        raise ArgumentError("rename", f"a function that returns {arguments.shown(name)}", "one that returns a name")
    return name


def _layer_name(renamed: Callable[[str], str], layer: str) -> str:
    """The model's name of a layer: what it calls the layer's weight, without that word."""
    return renamed(f"{layer}.weight").removesuffix(".weight")


def _for_model(model: nn.Module, tensors: Mapping[str, Tensor], quantised: list[str]) -> dict[str, Tensor]:
    """The file's tensors in the model's own types; tied ones, which a file names once, under each of their names."""
    state = {
        key: value for key, value in model.state_dict(keep_vars=True).items() if not is_inside(key, set(quantised))
    }
    kept = {key: value for key, value in tensors.items() if key in state or not key.endswith(NEVER_USED)}
    by_tensor = {id(state[key]): value for key, value in kept.items() if key in state}
    kept |= {key: by_tensor[id(own)] for key, own in state.items() if key not in kept and id(own) in by_tensor}
    wrong = [key for key, value in kept.items() if key in state and not _same_kind(state[key], value)]
    if wrong:
        raise CheckpointError(
            f"tensors {listed(wrong)}: codes in the file where the model has real numbers, or the reverse"
        )
    return {key: value.to(state[key].dtype) if key in state else value for key, value in kept.items()}


def _same_kind(own: object, value: Tensor) -> bool:
    return not isinstance(own, Tensor) or own.is_floating_point() == value.is_floating_point()
