"""The layers of a checkpoint directory, for a model whose other tensors transformers loads itself.

transformers loads one tensor at a time into parameters that it finds by name, then replaces every non-persistent buffer
by an empty one: a QLinear, which keeps its codes in such a buffer, must not be there yet. Until then a Held stands in
its place, without a parameter that anything could be loaded into.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pyquant.integrations.transformers.held import Held, keep_hook
from pyquant.integrations.transformers.model import head_prefix, ignored_names
from pyquant.io.checkpoint import load_checkpoint, read_manifest
from pyquant.io.foreign import open_foreign
from pyquant.io.manifest import FILE
from pyquant.io.pretrained.expert_names import ExpertNames, Place
from pyquant.io.pretrained.gates import put_gates, saved_gates
from pyquant.io.pretrained.load import fused_places, own_extra
from pyquant.io.pretrained.place import module_of
from pyquant.io.pretrained.quantized import built, check_place, whole_layers
from pyquant.io.pretrained.save import modules_by_name
from pyquant.nn.forms import expose_reversibly
from pyquant.nn.fuse import put_identity
from pyquant.nn.swap import swap_modules
from pyquant.nn.undo import undone_on_error

# What a layer or a quantised key-value cache has in files beside a weight, of which no module is to get anything.
_EXTRAS = r"(?:weight|bias|(?:weight|input|output)_(?:scale|zero_point|packed|shape|g_idx)|[kvq]_(?:scale|zero_point))"
_CACHE = r"\.[kvq]_(?:scale|zero_point)$"
Layers = Iterator[tuple[list[str], nn.Module]]


class Takeover:
    """The quantised layers of a directory and their places in a model, which holds a Held in each until finish().

    model      of transformers, on the meta device. On an error it is of no use any more.
    files      that transformers is about to load, all in one directory.
    rename     (name of a tensor in a file) -> what transformers calls it in this model.
    tells_sizes   whether a device map is still to be made, by sizes.
    not_here   names of layers in the files that the model has no place for, such as the head of which it is the body.
    Raises CheckpointError for what cannot be read exactly.
    """

    def __init__(
        self, model: Any, files: Sequence[Path], rename: Callable[[str], str], tells_sizes: bool = False
    ) -> None:
        directory, self._files = files[0].parent, [file.name for file in files]
        self._rename, self._prefix = rename, head_prefix(model)
        self._ignores = ignored_names(model)
        self._experts = ExpertNames(model)
        self._names = modules_by_name(model)
        self._old: dict[str, nn.Module] = {}
        self._fused: dict[str, str] = {}
        self._gates: list[str] = []
        self._banks: set[str] = set()
        self.not_here: list[str] = []
        self._layers = (self._own if (directory / FILE).exists() else self._foreign)(model, directory)
        held = {id(old): Held(old, _bytes(old) if tells_sizes else 0) for old in self._old.values()}
        places = [([name], held[id(old)]) for name, old in self._old.items()]
        self._held = {name: module for (name,), module in places}
        swap_modules(model, places)
        _untie(model, set(self._old))
        ignored = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        model._keys_to_ignore_on_load_unexpected = ignored | self._patterns()

    def finish(
        self,
        model: Any,
        home: Callable[[str], torch.device],
        cut: Callable[[str, nn.Module], nn.Module] = lambda _, layer: layer,
    ) -> int:
        """Put the layers in, each on its device, in training mode where the model is. -> how many.

        cut  (name, layer) -> what this process holds of the layer.
        """
        del model._keys_to_ignore_on_load_unexpected
        new = []
        for places, layer in self._layers:
            _compute_unsaved(model, self._old[places[0]], layer)
            new.append((places, cut(places[0], layer.to(home(places[0])).train(model.training))))
        modules = {name: layer for places, layer in new for name in places}
        with undone_on_error() as undo:
            identities = fused_places(model, modules_by_name(model), self._fused, modules)
            swap_modules(model, new, undo=undo)
            for parent, name in identities:
                put_identity(parent, name, undo)
            put_gates(model, self._gates, undo)
        for name, layer in modules.items():
            keep_hook(self._held[name], layer)
        for name in sorted(self._banks):
            cut(name, model.get_submodule(name))
        return len(new)

    def _own(self, model: nn.Module, directory: Path) -> Layers:
        """Of pyquant's directory: layers by their own names, with the activations that were fused into them."""
        manifest = read_manifest(directory)
        aliases, _, fused = own_extra(manifest.extra, set(manifest.layers))
        places: dict[str, list[str]] = {}
        for layer in manifest.layers.keys() - aliases.keys():
            old = self._names.get(self._place(layer).module)
            if old is None:
                self.not_here.append(layer)
                continue
            others = {self._place(alias).module for alias, target in aliases.items() if target == layer}
            places[layer] = [name for name, module in self._names.items() if module is old or name in others]
            self._old |= {name: self._names[name] for name in places[layer]}
        known = places.keys() | {alias for alias, target in aliases.items() if target in places}
        self._fused = {self._place(n).module: self._sibling(n, path) for n, path in fused.items() if n in known}
        inside = {layer.rpartition(".")[0]: layer for layer in places}
        gates = [inside[name] for name in saved_gates(manifest.extra) if name in inside]
        self._gates = [self._place(layer).module.rpartition(".")[0] for layer in gates]
        return self._read_own(directory, places)

    def _read_own(self, directory: Path, places: Mapping[str, list[str]]) -> Layers:
        for record in load_checkpoint(directory).layers:
            if record.name in places:
                old = self._old[places[record.name][0]]
                yield places[record.name], module_of(record, old, _dtype(old))

    def _foreign(self, model: nn.Module, directory: Path) -> Layers:
        """Of another tool's directory: layers by the names of its files, experts one by one."""
        checkpoint = open_foreign(directory, drop_kv_cache_scheme=True, files=self._files)
        homes = {name: self._place(name) for name in checkpoint.layers}
        homes = {name: home for name, home in homes.items() if not self._ignores(f"{home.module}.weight")}
        wanted = {home.module for home in homes.values()}
        self._banks = self._experts.quantised(wanted)
        expose_reversibly(model, lambda _, name: name in wanted or name in self._banks, [], True)
        self._names = modules_by_name(model)
        self.not_here = sorted(name for name, home in homes.items() if home.module not in self._names)
        homes = {name: home for name, home in homes.items() if home.module in self._names}
        for home in homes.values():
            old = self._names[home.module]
            check_place(home.module, old)
            self._old |= {name: module for name, module in self._names.items() if module is old}
        return self._read(checkpoint, homes)

    def _read(self, checkpoint: Any, homes: Mapping[str, Place]) -> Layers:
        for module, layer in whole_layers(checkpoint, homes, self._experts):
            old = self._old[module]
            yield [name for name, other in self._old.items() if other is old], built(layer, old)

    def _place(self, name: str) -> Place:
        """Where a layer of the files is in the model: under its name, with or without the prefix of a model's body, or
        where transformers moves its weight."""
        bare, longer = name.removeprefix(f"{self._prefix}."), f"{self._prefix}.{name}"
        for candidate in (name, bare, longer, self._rename(f"{name}.weight").removesuffix(".weight")):
            place = self._experts.place(candidate)
            if place.module in self._names or self._experts.quantised([place.module]):
                return place
        return self._experts.place(name)

    def _sibling(self, layer: str, path: str) -> str:
        parent = self._place(layer).module.rpartition(".")[0]
        return f"{parent}.{path.rpartition('.')[2]}" if parent else path.rpartition(".")[2]

    def _patterns(self) -> set[str]:
        """Of the tensors that transformers finds no parameter for, and need say nothing of."""
        alone = [name for name in self._old if name.rpartition(".")[0].rpartition(".")[0] not in self._banks]
        found = {rf"(?:^|\.)(?:{'|'.join(map(re.escape, alone))})\.{_EXTRAS}$"} if alone else set()
        return found | {rf"(?:^|\.){re.escape(bank)}\." for bank in self._banks} | {_CACHE}


def _bytes(module: nn.Module) -> int:
    """Of the codes of a layer, at most."""
    return sum(p.numel() for p in module.parameters() if p.dim() > 1)


def _dtype(module: nn.Module) -> torch.dtype:
    weight = getattr(module, "weight", None)
    return weight.dtype if isinstance(weight, torch.Tensor) else torch.float32


def _compute_unsaved(model: Any, old: nn.Module, new: nn.Module) -> None:
    """Buffers that a class computes with and no file holds (Gemma's scale of embeddings), still on the meta device: as
    the model's own initialisation fills them."""
    empty = {name: tensor for name, tensor in new._buffers.items() if tensor is not None and tensor.is_meta}
    if empty:
        old._buffers.update({name: torch.empty_like(tensor, device="cpu") for name, tensor in empty.items()})
        model._init_weights(old)
        new._buffers.update({name: old._buffers[name] for name in empty})


def _untie(model: Any, held: set[str]) -> None:
    """Take weights of layers that hold codes out of the ties that transformers makes after loading."""
    for one in model.modules():
        ties = getattr(one, "all_tied_weights_keys", None)
        if ties:
            prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is one)
            ends = {key: {f"{prefix}{end}".rpartition(".")[0] for end in (key, source)} for key, source in ties.items()}
            one.all_tied_weights_keys = {key: source for key, source in ties.items() if not ends[key] & held}
