"""load_pretrained: a checkpoint directory into a model of the same architecture, with the bits that were saved."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.core.dtypes import FLOATS_BY_NAME
from pyquant.core.names import listed
from pyquant.core.presets import W8A16
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io import LayerRecord, load_checkpoint
from pyquant.io.checkpoint import Checkpoint
from pyquant.io.pretrained.save import OWN_EXTRA, is_inside, modules_by_name
from pyquant.nn import origin
from pyquant.nn.chain import QResidual, Residual
from pyquant.nn.forms import expose_reversibly, exposed
from pyquant.nn.fuse import fused_activations, held, put_identity
from pyquant.nn.fuse_rules import activation_of
from pyquant.nn.own_embedding import like
from pyquant.nn.patches import Patches, unsupported
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear
from pyquant.nn.state import device_of
from pyquant.nn.swap import Undo, swap_modules, undone_on_error

_KINDS: Final[dict[str, tuple[type[nn.Module], ...]]] = {
    "linear": (nn.Linear, QLinear),
    "embedding": (nn.Embedding, QEmbedding),
    "conv2d": (nn.Conv2d, QConv2d),
}
_OWN_KEYS: Final = {"aliases", "dtypes", "fused", "residuals", "exposed", "notes"}
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
               saved (dtype included).
    Raises CheckpointError for a damaged, unsafe or newer checkpoint, and where file and model differ: missing or
    unexpected tensors, other shapes, another activation than the fused one. Source: docs/file_format.md.
    """
    if not isinstance(model, nn.Module) and not callable(model):
        raise ArgumentError("model", type(model).__name__, "a torch.nn.Module, or a function that returns one")
    target = None if device is None else device_of(device)
    checkpoint = load_checkpoint(directory, manifest_sha256=manifest_sha256)
    aliases, dtypes, fused = _own_extra(checkpoint.extra, {layer.name for layer in checkpoint.layers})
    notes = _notes(checkpoint.extra)
    residuals, tensors = _residuals(checkpoint.extra, dict(checkpoint.tensors))
    skeleton = model if isinstance(model, nn.Module) else model()
    if not isinstance(skeleton, nn.Module):
        raise ArgumentError(
            "model", f"a function that returns {type(skeleton).__name__}", "one that returns a torch.nn.Module"
        )
    with undone_on_error() as undo:
        _expose(skeleton, checkpoint, undo)
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
                    raise _bad(f"alias '{name}' is a {difference}")
            replacement = _module(layer, old, dtypes.get(layer.name, torch.float32))
            if layer.name in notes and isinstance(replacement, (QLinear, QConv2d)):
                replacement.note = notes[layer.name]
            new.append((places, replacement))
        if any("" in places for places, _ in new):
            return new[0][1] if target is None else new[0][1].to(target)
        new += _residual_places(skeleton, names, residuals)
        _check_keys(skeleton, [name for places, _ in new for name in places], tensors)
        modules = {name: module for places, module in new for name in places}
        fused_places = _fused_places(skeleton, names, fused, modules)
        _assign(skeleton, tensors, undo)
        swap_modules(skeleton, new, undo=undo)
        for parent, name in fused_places:
            put_identity(parent, name, undo)
        _refill(skeleton, undo)
        _check_no_meta(skeleton)
        if target is not None:
            swap_modules(skeleton, [], device=target, undo=undo)
    return skeleton


def _expose(skeleton: nn.Module, checkpoint: Checkpoint, undo: list[Undo]) -> None:
    """Rewrite the classes that multiply by matrices of their own, where the saved model had them rewritten."""
    rewritten = checkpoint.extra.get(OWN_EXTRA, {}).get("exposed", {})
    if not isinstance(rewritten, Mapping):
        raise _bad("exposed is not {name: class}")
    layers = {layer.name for layer in checkpoint.layers if layer.kind == "linear"}
    expose_reversibly(skeleton, lambda module, name: name in rewritten or name in layers, undo, True)
    lost = [name for name in rewritten if name not in exposed(skeleton)]
    if lost:
        has = type(modules_by_name(skeleton).get(lost[0])).__name__
        message = f"'{lost[0]}' was saved as a {rewritten[lost[0]]} made of layers; the model has a {has} there"
        raise CheckpointError(message)


def _bad(what: str) -> CheckpointError:
    return CheckpointError(f"extra['{OWN_EXTRA}']: {what}")


def _own_extra(
    extra: Mapping[str, Any], layers: set[str]
) -> tuple[dict[str, str], dict[str, torch.dtype], dict[str, str]]:
    own = extra.get(OWN_EXTRA, {})
    if not isinstance(own, Mapping) or not own.keys() <= _OWN_KEYS:
        raise _bad(f"not a mapping with the keys {', '.join(sorted(_OWN_KEYS))}")
    aliases, dtypes, fused = (own.get(key, {}) for key in ("aliases", "dtypes", "fused"))
    if not _is_text(aliases) or any(target not in layers for target in aliases.values()):
        raise _bad("aliases are not names of saved layers")
    if not _is_text(dtypes) or any(k not in layers or v not in FLOATS_BY_NAME for k, v in dtypes.items()):
        raise _bad(f"dtypes are not {{layer: {' or '.join(FLOATS_BY_NAME)}}}")
    known = layers | aliases.keys()
    if not _is_text(fused) or any(k not in known or not _are_siblings(k, v) for k, v in fused.items()):
        raise _bad("fused is not {layer: activation in the same module}")
    return dict(aliases), {name: FLOATS_BY_NAME[dtype] for name, dtype in dtypes.items()}, dict(fused)


def _notes(extra: Mapping[str, Any]) -> Mapping[str, str]:
    """{layer: why it has another scheme than it was given}; absent in older files."""
    notes = extra.get(OWN_EXTRA, {}).get("notes", {})
    if not _is_text(notes) or any(len(note) > _LONGEST_NOTE or not note.isprintable() for note in notes.values()):
        raise _bad("notes are not {layer: one line of text}")
    return notes  # type: ignore[no-any-return]


def _is_text(value: object) -> bool:
    """{text: text}; JSON may hold anything in the place of either."""
    return isinstance(value, Mapping) and all(isinstance(word, str) for pair in value.items() for word in pair)


def _residuals(extra: Mapping[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, QResidual], dict[str, Tensor]]:
    """{name: QResidual}, and the tensors without those that belong to them."""
    residuals: dict[str, QResidual] = {}
    saved = extra.get(OWN_EXTRA, {}).get("residuals", {})
    if not isinstance(saved, Mapping):
        raise _bad("residuals is not {name: scheme}")
    for name, words in saved.items():
        own = {key: tensors.pop(f"{name}.{key}", None) for key in ("scale", "zero_point")}
        try:
            residuals[name] = QResidual(own["scale"], own["zero_point"], TensorScheme.from_dict(words))  # type: ignore[arg-type]
        except ArgumentError as error:
            raise _bad(f"residual '{name}': {error}") from None
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


def _fused_places(
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


def _module(layer: LayerRecord, old: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The saved layer as a module that fits where `old` is."""
    is_embedding = layer.kind == "embedding"
    if not isinstance(old, _KINDS[layer.kind]):
        raise CheckpointError(
            f"layer '{layer.name}' is a saved {layer.kind}; the model has a {type(old).__name__} there"
        )
    saved, has = _geometry(layer), _geometry(old)
    if saved != has:
        raise CheckpointError(f"layer '{layer.name}': saved {saved}, the model has {has}")
    if not is_embedding and (old.bias is None) != (layer.bias is None):
        sides = "the model has a bias, the checkpoint has none"
        if layer.bias is not None:
            sides = "the checkpoint has a bias, the model has none; a BatchNorm folded into it? then build the model "
            sides += "with fold_batch_norm_, too"
        raise CheckpointError(f"layer '{layer.name}': {sides}")
    new = _embedding(layer, old, dtype) if is_embedding else layer_of(layer, dtype)
    origin.remember(new, old)
    home = next((t.device for t in (*old.parameters(), *old.buffers())), torch.device("cpu"))
    return new.to("cpu" if home.type == "meta" else home).train(old.training)


def _geometry(layer: Any) -> str:
    """Sizes of a record or of a module, in words that can be compared."""
    if isinstance(layer, LayerRecord):
        sizes, patches = [layer.out_features, layer.in_features], layer.geometry and Patches(**layer.geometry)
    elif isinstance(layer, (nn.Embedding, QEmbedding)):
        sizes, patches = [layer.num_embeddings, layer.embedding_dim], None
    elif isinstance(layer, nn.Conv2d):
        patches = Patches.of(layer)
        sizes = [layer.out_channels, layer.in_channels * patches.pixels]
        if unsupported(layer) is not None:
            return f"{sizes} with {unsupported(layer)}"
    else:
        sizes, patches = [layer.out_features, layer.in_features], getattr(layer, "patches", None)
    return str(sizes) if patches is None else f"{sizes} {patches}"


def layer_of(layer: LayerRecord, dtype: torch.dtype = torch.float32) -> QLinear | QConv2d:
    """The layer that a record of kind 'linear' or 'conv2d' describes, on the CPU; `dtype` as in QLinear."""
    scheme, scale, zero_point = QScheme.from_dict(layer.scheme), layer.weight_scale, layer.weight_zero_point
    if scheme.weights.granularity == "per_tensor":
        scale = None if scale is None else scale.repeat(layer.out_features)
        zero_point = None if zero_point is None else zero_point.repeat(layer.out_features)
    make: Any = QLinear.from_codes
    if layer.geometry is not None:
        make = partial(QConv2d.from_codes, patches=Patches(**layer.geometry))
    new: QLinear | QConv2d = make(
        layer.codes,
        scale,
        scheme=scheme,
        bias=None if layer.bias is None else layer.bias.to(torch.float32),
        weight_zero_point=zero_point,
        input_scale=layer.input_scale,
        input_zero_point=layer.input_zero_point,
        output_scale=layer.output_scale,
        output_zero_point=layer.output_zero_point,
        activation=layer.activation,
        clamp=layer.clamp,
        dtype=dtype,
    )
    return new


def _embedding(layer: LayerRecord, old: nn.Module, dtype: torch.dtype) -> QEmbedding:
    if layer.weight_scale is None or QScheme.from_dict(layer.scheme) != W8A16():
        raise CheckpointError(f"layer '{layer.name}': embeddings are saved as W8A16, one int8 row with one scale")
    padding_idx = getattr(old, "padding_idx", None)
    new = QEmbedding.from_codes(layer.codes, layer.weight_scale, padding_idx=padding_idx, dtype=dtype)
    return like(old, new) if isinstance(old, nn.Embedding) else new


def _check_keys(skeleton: nn.Module, quantised: list[str], tensors: Mapping[str, Tensor]) -> None:
    expected = {key: value for key, value in skeleton.state_dict().items() if not is_inside(key, set(quantised))}
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unexpected:
        raise CheckpointError(
            f"checkpoint and model differ: missing in the checkpoint {listed(missing) or 'nothing'}; "
            f"unexpected {listed(unexpected) or 'nothing'}"
        )
    for key, value in expected.items():
        if not isinstance(value, Tensor) or value.shape != tensors[key].shape:
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(f"tensor '{key}': saved {list(tensors[key].shape)}, the model has {shape}")


def _assign(skeleton: nn.Module, tensors: Mapping[str, Tensor], undo: list[Undo]) -> None:
    """Every tensor of the checkpoint becomes the parameter or buffer of its name; tied ones stay tied."""
    placed: dict[int, Tensor] = {}
    for key, saved in tensors.items():
        owner_name, _, name = key.rpartition(".")
        owner = skeleton.get_submodule(owner_name)
        held: dict[str, Any] = owner._buffers
        if name in owner._parameters:
            held = owner.__dict__["_parameters"]
        old = held[name]
        if old is None:
            raise CheckpointError(f"tensor '{key}' is in the checkpoint; the model has none there")
        if id(old) not in placed:
            value = saved.to("cpu" if old.is_meta else old.device)
            placed[id(old)] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
        elif not torch.equal(placed[id(old)].detach().cpu(), saved):
            raise CheckpointError(
                f"tensor '{key}' is tied to another in the model; the checkpoint has two different ones"
            )
        undo.append(partial(held.__setitem__, name, old))
        held[name] = placed[id(old)]


def _refill(skeleton: nn.Module, undo: list[Undo]) -> None:
    """Buffers of a transformers model that are on the meta device after loading, with the numbers it gives them."""
    from pyquant.integrations import transformers

    if any(t.is_meta for t in skeleton.buffers()):
        for module in skeleton.modules():
            if transformers.is_model(module):
                transformers.refill_buffers(module, undo)


def _check_no_meta(model: nn.Module) -> None:
    left = sorted(name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta)
    if left:
        raise CheckpointError(
            f"the checkpoint has no numbers for {listed(left)} (buffers that state_dict leaves out), which are on the "
            "meta device; build the model on the CPU"
        )
