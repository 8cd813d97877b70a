"""A model in floating point, quantised from its files layer by layer, while transformers loads what stays as it is."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from pyquant.errors import ArgumentError
from pyquant.integrations.on_the_fly import fates_by_recipe, quantise_by_recipe, recipe_in
from pyquant.integrations.transformers.conversions import keep_types
from pyquant.integrations.transformers.held import Held, keep_hook
from pyquant.io.foreign.source import Tensors
from pyquant.io.pretrained.float_weights import FloatWeights
from pyquant.io.pretrained.from_floats import Reading
from pyquant.io.pretrained.place import check_no_meta
from pyquant.nn import obstacles
from pyquant.nn.convert import fates_in, quantize_layers_
from pyquant.nn.experts import QExperts
from pyquant.nn.fates import Fate
from pyquant.nn.sites import Owner, Site
from pyquant.nn.swap import swap_modules

_OF_FATES: Final = ("filter_fn", "embeddings", "heads", "on_indivisible")


class FloatFiles:
    """The layers of a model that are read and quantised one after the other; a Held is in the place of each meanwhile.

    model    of transformers, on the meta device, in which the Helds are put.
    files    safetensors, as transformers found them.
    mapping  how transformers makes the tensors of the model of those in the files.
    config, options   as in quantize_, without data; beside a recipe no option but check_speed.
    tells_sizes   whether a device map is still to be made, by sizes.
    is_whole   whether every layer that is to be quantised is held. Those that are not are loaded by transformers: tied
             weights, and what the files do not have.
    Raises what quantize_ raises.
    """

    def __init__(
        self,
        model: Any,
        files: Sequence[str],
        mapping: Sequence[Any],
        config: Any,
        options: Mapping[str, Any],
        tells_sizes: bool = False,
    ) -> None:
        self._config, self._options = config, dict(options)
        self._recipe = recipe_in(config)
        chosen = [f for f in self._fates(model) if f.layer is not None and isinstance(f.site.module, obstacles.KINDS)]
        keep_types(model, model.dtype)
        self._weights = FloatWeights(model, Tensors(map(Path, files)), mapping=mapping, is_partial=True)
        places = {id(place.module): place for place in (fate.site.owner or fate.site for fate in chosen)}
        is_static = any(fate.layer is not None and fate.layer.scheme.is_static for fate in chosen)
        tied = _tied(model)
        read = {} if is_static else {key: place for key, place in places.items() if self._has(place, tied)}
        self.is_whole = len(read) == len(places)
        sizes = _sizes(chosen) if tells_sizes else {}
        self._held = {key: Held(place.module, sizes.get(key, 0)) for key, place in read.items()}
        self._old = [(place.names, place.module) for place in read.values()]

    def hold(self, model: Any) -> None:
        """Put the Helds in. transformers need say nothing of the tensors of the files that it finds no place for."""
        swap_modules(model, [(names, self._held[id(old)]) for names, old in self._old])
        if self._old:
            places = "|".join(re.escape(name) for names, _ in self._old for name in names)
            ignored = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
            model._keys_to_ignore_on_load_unexpected = ignored | {rf"(?:^|\.)(?:{places})\."}

    def finish(
        self,
        model: Any,
        home: Callable[[str], torch.device],
        cut: Callable[[str, nn.Module], nn.Module],
        is_elsewhere: Callable[[str, nn.Module], bool],
    ) -> None:
        """Quantise the model in place. home, cut, is_elsewhere: as device, cut and is_elsewhere of Reading."""
        if self._old:
            del model._keys_to_ignore_on_load_unexpected
        for _, old in self._old:
            old.train(self._held[id(old)].training)  # from_pretrained has put what stands in the model into eval mode
        swap_modules(model, self._old)

        def twins(_: nn.Module, fates: Sequence[Fate]) -> dict[int, nn.Module]:
            mine = [fate for fate in fates if id((fate.site.owner or fate.site).module) in self._held]
            return Reading(self._weights, home, cut=cut, is_elsewhere=is_elsewhere).twins(model, mine)

        if self._recipe is None:
            quantize_layers_(model, self._config, prepare=twins, **self._options)
        else:
            quantise_by_recipe(model, self._recipe, prepare=twins, **self._options)
        for names, old in self._old:
            for name in names:
                new = model.get_submodule(name)
                keep_hook(self._held[id(old)], new)
                if isinstance(new, QExperts):
                    cut(name, new)
        check_no_meta(model)

    def _fates(self, model: nn.Module) -> list[Fate]:
        of_fates = {name: value for name, value in self._options.items() if name in _OF_FATES}
        if self._recipe is None:
            return fates_in(model, self._config, **of_fates)[1]
        if of_fates:
            raise ArgumentError(
                "options", ", ".join(of_fates), "check_speed alone beside a recipe, which says the rest"
            )
        return fates_by_recipe(model, self._recipe)

    def _has(self, place: Site | Owner, tied: Callable[[str, torch.Tensor], bool]) -> bool:
        """Whether the files have all numbers of a module, of which no other module has some (tied weights)."""
        if any(module._non_persistent_buffers_set for module in place.module.modules()):
            return False  # transformers makes these, as it initialises the module
        named = {f"{place.names[0]}.{key}": t for key, t in place.module.state_dict(keep_vars=True).items()}
        return all(key in self._weights and not tied(key, tensor) for key, tensor in named.items())


def _tied(model: Any) -> Callable[[str, torch.Tensor], bool]:
    """(name, tensor) -> whether another module has the tensor too, or will once transformers has tied the weights."""
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    names = {*ties.keys(), *ties.values()}
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    return lambda name, tensor: name in names or uses[id(tensor)] > 1


def _sizes(fates: Sequence[Fate]) -> dict[int, int]:
    """{id of a module: bytes of the codes of its layers}."""
    sizes: Counter[int] = Counter()
    for fate in fates:
        scheme, weight = fate.layer.scheme if fate.layer else None, fate.site.module.weight
        bits = 16 if scheme is None or scheme.is_float else scheme.weights.bits
        sizes[id((fate.site.owner or fate.site).module)] += weight.numel() * bits // 8  # type: ignore[operator]
    return dict(sizes)
