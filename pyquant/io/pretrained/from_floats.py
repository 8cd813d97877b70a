"""quantize_checkpoint_: a model from the files of its float checkpoint, each layer quantised as soon as it is read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.core.names import listed
from pyquant.core.paths import file_path
from pyquant.errors import ArgumentError, QuantizationWarning
from pyquant.io.foreign.source import Source
from pyquant.io.pretrained.float_weights import FloatWeights
from pyquant.io.pretrained.place import assign, check_no_meta, refill
from pyquant.io.pretrained.quantized import new_name
from pyquant.io.pretrained.save import state_without_codes
from pyquant.nn.convert import integer_twin, quantize_layers_
from pyquant.nn.fates import Fate, errors_name
from pyquant.nn.forms import form_of, linears_of
from pyquant.nn.qlinear import QLinear
from pyquant.nn.sites import Config, Filter, Owner
from pyquant.nn.state import device_of
from pyquant.nn.swap import as_it_is, swap_modules
from pyquant.nn.undo import Undo, undone_on_error

ProgressCall = Callable[[int, int, str], None]


def quantize_checkpoint_(
    model: nn.Module,
    path: str | os.PathLike[str],
    config: Config,
    filter_fn: Filter | None = None,
    *,
    embeddings: bool = False,
    heads: bool | None = None,
    on_indivisible: str = "per_channel",
    rename: Callable[[str], str] | None = None,
    device: torch.device | str | None = None,
    progress: ProgressCall | None = None,
) -> nn.Module:
    """Quantise a model whose float weights are in files and need never be in memory together, in place.

    The same codes, to the bit, as loading the checkpoint, then quantize_. Layers are read, quantised and let go one
    after the other, so that memory holds the quantised model and the floats of one layer (of experts: of their bank).

    model        the float model as its code builds it (AutoModelForCausalLM.from_config(config)); its weights are not
                 used, so it belongs on the meta device. On any error it is as before.
    path         directory with config.json and safetensors files (one, or several with an index) of a model in floating
                 point. Names and shapes are checked before anything is read; a model of transformers takes its files
                 as its own loading does (older names, experts one by one).
    config       as in quantize_: scheme, its name, FqnConfig or its mapping; weight-only and dynamic schemes.
    filter_fn, embeddings, heads, on_indivisible   as in quantize_.
    rename       name of a tensor in the files -> its name in the model; None: they are the same.
    device       where layers are quantised, one at a time, and where the model is at the end; None: the CPU.
    progress     called after every layer with (done, total, name).
    ->           the model. Tensors that stay in floating point take the type that they have in the model.
    Raises ArgumentError or SchemeError as quantize_, and for static schemes, whose ranges need data; CheckpointError
    for damaged files, and for tensors that are missing or of another shape. A QuantizationWarning names tensors of the
    files that the model has no place for.

    Example:
        >>> import json, pathlib, tempfile
        >>> from safetensors.torch import save_file
        >>> build = lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> whole = build()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "config.json").write_text("{}")
        ...     save_file(whole.state_dict(), f"{folder}/model.safetensors")
        ...     with torch.device("meta"):
        ...         model = build()
        ...     model = quantize_checkpoint_(model, folder, "W8A8Dynamic")
        >>> import pyquant
        >>> torch.equal(model(torch.ones(1, 8)), pyquant.quantize_(whole, "W8A8Dynamic")(torch.ones(1, 8)))
        True
    """
    arguments.module("model", model)
    arguments.function("rename", rename, "(name) -> name")
    arguments.function("progress", progress, "(done, total, name)")
    target = None if device is None else device_of(device)
    source = Source(file_path("path", path), is_float=True)
    weights = FloatWeights(model, source, lambda name: name if rename is None else new_name(rename(name)))
    reading = Reading(weights, lambda _: target, progress)
    options: dict[str, Any] = {"embeddings": embeddings, "heads": heads, "on_indivisible": on_indivisible}
    with undone_on_error(as_it_is(model)):
        read_and_quantise(model, reading, config, filter_fn, options, target)
        if weights.unused:  # a warning that the caller made an error is one, too
            what = f"{source.directory}: {type(model).__name__} has no place for the tensors {listed(weights.unused)}"
            warnings.warn(f"quantize_checkpoint_: {what}", QuantizationWarning, stacklevel=2)
    return model


def read_and_quantise(
    model: nn.Module,
    reading: Reading,
    config: Config,
    filter_fn: Filter | None,
    options: Mapping[str, Any],
    target: torch.device | None = None,
) -> None:
    """Quantise an empty model with the numbers that `reading` gives, in place; on an error it is as before.

    target  where the model is at the end; None: the CPU.
    """
    undo: list[Undo] = []
    for module in model.modules():
        undo += [partial(held.update, dict(held)) for held in (module._parameters, module._buffers, module._modules)]
    with undone_on_error(undo):
        quantize_layers_(model, config, filter_fn, check_speed=False, prepare=reading.twins, **options)
        _fill(model, reading, undo)
        refill(model, undo)
        check_no_meta(model)
        if target is not None:
            swap_modules(model, [], device=target, undo=undo)


@dataclass
class Reading:
    """Makes layers of the tensors of a checkpoint. filled: names of the floats that it has put into linear forms.

    device     name of a layer -> where it is quantised and stays; None: where its floats are.
    cut        (name, layer) -> what this process holds of the layer.
    is_elsewhere   (name of a layer, its form) -> another process has all of it: it is made without numbers.
    """

    weights: FloatWeights
    device: Callable[[str], torch.device | None]
    progress: ProgressCall | None = None
    cut: Callable[[str, nn.Module], nn.Module] = lambda _, layer: layer
    is_elsewhere: Callable[[str, nn.Module], bool] = lambda _, form: False
    filled: set[str] = field(default_factory=set)

    @torch.no_grad()
    def twins(self, model: nn.Module, fates: Sequence[Fate]) -> dict[int, nn.Module]:
        """{id of an empty layer: its quantised twin}, one after the other; quantize_layers_ puts them in."""
        chosen = [fate for fate in fates if fate.layer is not None]
        static = [fate.site.names[0] for fate in chosen if fate.layer is not None and fate.layer.scheme.is_static]
        if static:
            got = f"static input ranges for {listed(static)}, which are found with data that the model sees"
            allowed = "weight-only and dynamic schemes; static ones: quantize_(model, config, data=batches)"
            raise ArgumentError("config", got, allowed)
        owned: dict[int, list[Fate]] = {}
        for fate in chosen:
            owned.setdefault(id(fate.site.owner or fate.site), []).append(fate)
        made: dict[int, nn.Module] = {}
        for group in owned.values():
            real = self._of_form(group[0].site.owner, group) if group[0].site.owner else self._alone(group[0])
            for fate in group:
                name, old = fate.site.names[0], fate.site.module
                made[id(old)] = self._twin(name, fate, real.pop(id(old)))
                if self.progress is not None:
                    self.progress(len(made), len(chosen), name)
        return made

    def _twin(self, name: str, fate: Fate, real: Fate) -> nn.Module:
        owner, old = fate.site.owner, fate.site.module
        if owner is not None and fate.layer is not None and self.is_elsewhere(name, owner.form):
            linear, has_bias = cast(nn.Linear, old), old.bias is not None
            sizes = (linear.in_features, linear.out_features, has_bias, fate.layer.scheme)
            return QLinear(*sizes, device="meta", dtype=linear.weight.dtype)
        with errors_name(name):
            return self.cut(name, integer_twin(real, device=self.device(name)))

    def _alone(self, fate: Fate) -> dict[int, Fate]:
        site = fate.site
        return {
            id(site.module): replace(fate, site=replace(site, module=self.weights.filled(site.module, site.names[0])))
        }

    def _of_form(self, owner: Owner, group: Sequence[Fate]) -> dict[int, Fate]:
        """The layers of a linear form with their numbers; what of the form stays in floating point is filled."""
        name = owner.names[0]
        form = form_of(self.weights.filled(owner.module, name))
        linears = dict(linears_of(name, form))
        real = {
            id(fate.site.module): replace(fate, site=replace(fate.site, module=linears[fate.site.names[0]]))
            for fate in group
        }
        taken = {fate.site.names[0] for fate in group}
        for kind in ("_parameters", "_buffers"):
            for place, module in form.named_modules(remove_duplicate=False):
                if ".".join(part for part in (name, place) if part) in taken:
                    continue
                held = getattr(owner.form.get_submodule(place), kind)
                for key, tensor in getattr(module, kind).items():
                    if tensor is not None and not tensor.is_meta:
                        held[key] = _own(tensor, self.device(name))
                        ends = [".".join(part for part in (one, place, key) if part) for one in owner.names]
                        self.filled.update(ends)
        return real


def _own(tensor: Tensor, device: torch.device | None) -> Tensor:
    """The tensor in memory of its own, on the device: a view would keep the whole of what was read."""
    kept = tensor.detach().to(tensor.device if device is None else device)
    if kept.untyped_storage().nbytes() != kept.nbytes:
        kept = kept.clone()
    return nn.Parameter(kept, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else kept


def _fill(model: nn.Module, reading: Reading, undo: list[Undo]) -> None:
    """The tensors that are in no quantised layer, each read once."""
    read: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for key in state_without_codes(model, keep_vars=True):
        if key in reading.filled:
            continue
        home = reading.weights.home(key)
        if home not in read:
            read[home] = reading.weights.read(key)
        tensors[key] = read[home]
    assign(model, tensors, undo)
