"""load_pretrained: a checkpoint directory into a model of the same architecture, with the bits that were saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.core.dtypes import FLOATS_BY_NAME
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io import load_checkpoint
from pyquant.io.checkpoint import Checkpoint
from pyquant.io.pretrained.before import bad_extra, put_before
from pyquant.io.pretrained.gates import put_gates, saved_gates
from pyquant.io.pretrained.place import assign, check_keys, check_no_meta, module_of, refill
from pyquant.io.pretrained.save import OWN_EXTRA, modules_by_name
from pyquant.nn.chain import QResidual, Residual
from pyquant.nn.forms import expose_reversibly, exposed
from pyquant.nn.fuse import fused_activations, held, put_identity
from pyquant.nn.fuse_rules import activation_of
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qlinear import QLinear
from pyquant.nn.state import device_of
from pyquant.nn.swap import swap_modules
from pyquant.nn.undo import Undo, undone_on_error

_OWN_KEYS: Final = {"aliases", "dtypes", "fused", "residuals", "exposed", "notes", "reordered", "hadamard", "gated"}
_LONGEST_NOTE: Final = 500


def load_pretrained(
    directory: str | os.PathLike[str],
    model: nn.Module | Callable[[], nn.Module],
    *,
    device: torch.device | str | None = None,
    manifest_sha256: str | None = None,
) -> nn.Module:
    """Read a model that save_pretrained wrote: every byte is checked, and the result gives equal bits (in eval mode).

    directory  of the checkpoint.
    model      the float model as its code builds it, or the function (or class) that builds it; weights are not used,
               so it may be on the meta device. A module is changed in place; on any error it is as before. Buffers
               that no file holds (the tables of rotary positions) are made anew in models of transformers; in others
               they must not be on the meta device.
    device     where the whole model is moved at the end; None: every layer stays on the device where the module was
               (meta: CPU).
    manifest_sha256  SHA-256 that the manifest must have, as save_pretrained returned it; None: any.
    ->         the model, in training mode where the given or built one is: its Linears and Conv2ds replaced by the
               saved layers, the activations that fuse_ had moved into them by nn.Identity, every other tensor as
               saved (dtype included). Of a checkpoint that is one layer and nothing else, that layer: a given module is
               left as it is.
    Raises CheckpointError for a damaged, unsafe or newer checkpoint, and where file and model differ: missing or
    unexpected tensors, other shapes, another activation than the fused one. Source: docs/file_format.md.
    """
    if not isinstance(model, nn.Module) and not callable(model):
        raise ArgumentError("model", type(model).__name__, "a torch.nn.Module, or a function that returns one")
    target = None if device is None else device_of(device)
    checkpoint = load_checkpoint(directory, manifest_sha256=manifest_sha256)
    aliases, dtypes, fused = own_extra(checkpoint.extra, {layer.name for layer in checkpoint.layers})
    notes, gates = _notes(checkpoint.extra), saved_gates(checkpoint.extra)
    residuals, tensors = _residuals(checkpoint.extra, dict(checkpoint.tensors))
    skeleton = model if isinstance(model, nn.Module) else model()
    if not isinstance(skeleton, nn.Module):
        raise ArgumentError(
            "model", f"a function that returns {type(skeleton).__name__}", "one that returns a torch.nn.Module"
        )
    with undone_on_error() as undo:
        _expose(skeleton, checkpoint, undo)
        put_before(skeleton, checkpoint, undo)
        names = modules_by_name(skeleton)
        new: list[tuple[list[str], nn.Module]] = []
        for layer in checkpoint.layers:
            if layer.name in aliases:
                continue
            old = names.get(layer.name)
            if old is None:
                message = f"layer '{layer.name}' is in the checkpoint; the model has no module of that name"
                raise CheckpointError(message)
            places = [name for name, module in names.items() if module is old or aliases.get(name) == layer.name]
            for name in places:  # a name beside the layer's own is another name of such a layer, and of nothing else
                if type(names[name]) is not type(old):
                    difference = f"{type(names[name]).__name__}; allowed: {type(old).__name__}, as '{layer.name}' is"
                    raise bad_extra(f"alias '{name}' is a {difference}")
            replacement = module_of(layer, old, dtypes.get(layer.name, torch.float32))
            if layer.name in notes and isinstance(replacement, (QLinear, QConv2d)):
                replacement.note = notes[layer.name]
            new.append((places, replacement))
        if any("" in places for places, _ in new):
            return new[0][1] if target is None else new[0][1].to(target)
        new += _residual_places(skeleton, names, residuals)
        check_keys(skeleton, [name for places, _ in new for name in places], tensors)
        modules = {name: module for places, module in new for name in places}
        places_fused = fused_places(skeleton, names, fused, modules)
        assign(skeleton, tensors, undo)
        swap_modules(skeleton, new, undo=undo)
        for parent, name in places_fused:
            put_identity(parent, name, undo)
        put_gates(skeleton, gates, undo)
        refill(skeleton, undo)
        check_no_meta(skeleton)
        if target is not None:
            swap_modules(skeleton, [], device=target, undo=undo)
    return skeleton


def _expose(skeleton: nn.Module, checkpoint: Checkpoint, undo: list[Undo]) -> None:
    """Rewrite the classes that multiply by matrices of their own, where the saved model had them rewritten."""
    rewritten = checkpoint.extra.get(OWN_EXTRA, {}).get("exposed", {})
    if not isinstance(rewritten, Mapping):
        raise bad_extra("exposed is not {name: class}")
    layers = {layer.name for layer in checkpoint.layers if layer.kind == "linear"}
    expose_reversibly(skeleton, lambda module, name: name in rewritten or name in layers, undo, True)
    lost = [name for name in rewritten if name not in exposed(skeleton)]
    if lost:
        has = type(modules_by_name(skeleton).get(lost[0])).__name__
        message = f"'{lost[0]}' was saved as a {rewritten[lost[0]]} made of layers; the model has a {has} there"
        raise CheckpointError(message)


def own_extra(
    extra: Mapping[str, Any], layers: set[str]
) -> tuple[dict[str, str], dict[str, torch.dtype], dict[str, str]]:
    own = extra.get(OWN_EXTRA, {})
    if not isinstance(own, Mapping) or not own.keys() <= _OWN_KEYS:
        raise bad_extra(f"not a mapping with the keys {', '.join(sorted(_OWN_KEYS))}")
    aliases, dtypes, fused = (own.get(key, {}) for key in ("aliases", "dtypes", "fused"))
    if not _is_text(aliases) or any(target not in layers for target in aliases.values()):
        raise bad_extra("aliases are not names of saved layers")
    if not _is_text(dtypes) or any(k not in layers or v not in FLOATS_BY_NAME for k, v in dtypes.items()):
        raise bad_extra(f"dtypes are not {{layer: {' or '.join(FLOATS_BY_NAME)}}}")
    known = layers | aliases.keys()
    if not _is_text(fused) or any(k not in known or not _are_siblings(k, v) for k, v in fused.items()):
        raise bad_extra("fused is not {layer: activation in the same module}")
    return dict(aliases), {name: FLOATS_BY_NAME[dtype] for name, dtype in dtypes.items()}, dict(fused)


def _notes(extra: Mapping[str, Any]) -> Mapping[str, str]:
    """{layer: why it has another scheme than it was given}; absent in older files."""
    notes = extra.get(OWN_EXTRA, {}).get("notes", {})
    if not _is_text(notes) or any(len(note) > _LONGEST_NOTE or not note.isprintable() for note in notes.values()):
        raise bad_extra("notes are not {layer: one line of text}")
    return notes  # type: ignore[no-any-return]


def _is_text(value: object) -> bool:
    """{text: text}; JSON may hold anything in the place of either."""
    return isinstance(value, Mapping) and all(isinstance(word, str) for pair in value.items() for word in pair)


def _residuals(extra: Mapping[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, QResidual], dict[str, Tensor]]:
    """{name: QResidual}, and the tensors without those that belong to them."""
    residuals: dict[str, QResidual] = {}
    saved = extra.get(OWN_EXTRA, {}).get("residuals", {})
    if not isinstance(saved, Mapping):
        raise bad_extra("residuals is not {name: scheme}")
    for name, words in saved.items():
        own = {key: tensors.pop(f"{name}.{key}", None) for key in ("scale", "zero_point")}
        try:
            residuals[name] = QResidual(own["scale"], own["zero_point"], TensorScheme.from_dict(words))  # type: ignore[arg-type]
        except ArgumentError as error:
            raise bad_extra(f"residual '{name}': {error}") from None
    return residuals, tensors


def _residual_places(
    skeleton: nn.Module, names: Mapping[str, nn.Module], residuals: Mapping[str, QResidual]
) -> list[tuple[list[str], nn.Module]]:
    """Where the model marks a skip branch that was saved quantised. One that it quantises and the file does not, or the
    other way round, is an error."""
    new: list[tuple[list[str], nn.Module]] = []
    for name, module in residuals.items():
        old = names.get(name)
        if not isinstance(old, (Residual, QResidual)):
            got = "no module" if old is None else f"a {type(old).__name__}"
            raise CheckpointError(f"residual '{name}' was saved quantised; the model has {got} there, not a Residual")
        home = next((t.device for t in (*old.buffers(), *skeleton.parameters())), torch.device("cpu"))
        new.append(([name], module.to("cpu" if home.type == "meta" else home).train(old.training)))
    return new


def _are_siblings(layer: str, activation: object) -> bool:
    if not isinstance(activation, str) or not layer or activation == layer:
        return False
    parent, _, name = activation.rpartition(".")
    return bool(name) and parent == layer.rpartition(".")[0]


def fused_places(
    skeleton: nn.Module, names: Mapping[str, nn.Module], fused: Mapping[str, str], new: Mapping[str, nn.Module]
) -> list[tuple[nn.Module, str]]:
    """Where the model computes an activation that its saved QLinear computes too; the layers learn its name."""
    lost = [path for layer, path in fused_activations(skeleton).items() if layer in new and layer not in fused]
    if lost:
        raise CheckpointError(
            f"activation '{lost[0]}' was fused away in the model and not in the checkpoint; build the float model anew"
        )
    places = []
    for layer, path in fused.items():
        parent_name, _, name = path.rpartition(".")
        module, activation = new.get(layer), held(names[parent_name], name) if parent_name in names else None
        if activation is None or not isinstance(module, (QLinear, QConv2d)):
            raise CheckpointError(f"layer '{layer}' was saved with activation '{path}' in it; the model has none there")
        expected = (module.activation, module.clamp if module.activation == "clamp" else None)
        if type(activation) is not nn.Identity and activation_of(activation) != expected:
            got = repr(activation)[:80]
            raise CheckpointError(f"activation '{path}' was saved as {module.activation}; the model has {got} there")
        module.fused_activation = name
        places.append((names[parent_name], name))
    return places
