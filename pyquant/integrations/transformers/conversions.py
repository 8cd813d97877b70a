"""How transformers makes a model's tensors of those in its files: renamed, joined, split, as its own loading does."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

_OF_FLOATS = "_pyquant_conversions_of_floats"
Maker = Callable[[Callable[[str], Tensor]], dict[str, Tensor]]


@dataclass
class Conversion:
    """Tensors of the model that are made together. target: the first of them; sources: (the converter's word for it,
    name in the file); converter: None where a tensor is only renamed."""

    target: str
    converter: WeightConverter | None = None
    sources: list[tuple[str, str]] = field(default_factory=list)


def makers_of(
    model: Any, names: Mapping[str, str], mapping: Sequence[Any] | None = None
) -> list[tuple[Maker, list[str]]]:
    """What makes tensors of a model of transformers of those in its files, and the names in the files that it takes.

    names    {name that transformers knows: name in the file}.
    mapping  transformers' own list of conversions; None: that of the model's class.
    """
    return [
        (partial(converted, model, one, names), [names[name] for _, name in one.sources])
        for one in conversions_of(model, names, mapping)
    ]


def conversions_of(model: Any, names: Iterable[str], mapping: Sequence[Any] | None = None) -> list[Conversion]:
    """What tensors of these names become in a model of transformers."""
    mapping = get_model_conversion_mapping(model) if mapping is None else copy.deepcopy(list(mapping))
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, Conversion] = {}
    for name in sorted(names, key=dot_natural_key):  # experts in the order of their numbers
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        converter = None if pattern is None else by_pattern[pattern]
        found.setdefault(target, Conversion(target, converter)).sources.append((pattern or name, name))
    return list(found.values())


def converted(
    model: Any, conversion: Conversion, names: Mapping[str, str], read: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """The tensors of the model, by name, of those in the file. What an operation of transformers raises goes on."""
    if conversion.converter is None:
        return {conversion.target: read(names[conversion.sources[-1][1]])}
    own = copy.deepcopy(conversion.converter)
    for pattern, name in conversion.sources:
        own.add_tensor(conversion.target, name, pattern, partial(read, names[name]))  # type: ignore[arg-type]
    made = own.convert(conversion.target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def keep_types(model: Any, dtype: torch.dtype) -> None:
    """The parameters that from_pretrained leaves in float32 in such a model, in place; it is on the meta device."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern, groups, _ = build_glob_alternation(list(plan))
    for name, parameter in list(model.named_parameters()):
        if (found := pattern.search(name)) is not None:
            parameter.data = parameter.data.to(plan[groups[str(found.lastgroup)]])


def layer_names_in_files(model: Any, layers: Iterable[str]) -> dict[str, str]:
    """{layer: name in files} of the layers that transformers calls otherwise in what it saves of such a model."""
    found = {}
    for layer in layers:
        (key,) = revert_weight_conversion(model, {f"{layer}.weight": torch.empty(0, dtype=torch.float32, device="cpu")})
        if key != f"{layer}.weight":
            found[layer] = key.removesuffix(".weight")
    return found


def keep_names(model: Any, layers: Iterable[str]) -> None:
    """Have transformers save a model under its own names where it would join the codes of some of these layers with
    others, part them, or turn them: its loading does that to floats alone; or call a bias by a name that is not its
    layer's. What it reads floats by (_weight_conversions) is put aside for names_of_floats."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    converters = [one.reverse_transform() for one in reversed(conversions) if isinstance(one, WeightConverter)]
    renamings = [one.reverse_transform() for one in reversed(conversions) if isinstance(one, WeightRenaming)]

    def stem(layer: str, tensor: str) -> str:
        return str(rename_source_key(f"{layer}.{tensor}", renamings, [])[0]).removesuffix(f".{tensor}")

    def is_changed(layer: str) -> bool:
        is_converted = rename_source_key(f"{layer}.weight", [], converters)[1] is not None
        return is_converted or stem(layer, "weight") != stem(layer, "bias")

    if any(map(is_changed, layers)):
        model.__dict__.setdefault(_OF_FLOATS, model.__dict__.get("_weight_conversions"))
        model._weight_conversions = []


def names_of_floats(model: Any) -> None:
    """Take back what keep_names did."""
    if _OF_FLOATS in model.__dict__:
        model._weight_conversions = model.__dict__.pop(_OF_FLOATS)


def takes_apart(model: Any) -> Callable[[str], bool]:
    """(name of a tensor in a file) -> whether transformers makes other tensors of such a model of it than one."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state, prefix = set(model.state_dict()), model.base_model_prefix

    def ask(name: str) -> bool:
        target, pattern = rename_source_key(name, renamings, converters, prefix, dict.fromkeys(state))
        return pattern is not None and target in state

    return ask


def rows_in_files(model: Any, parameter: str, experts: int, rows: int) -> list[tuple[int, str, str, Tensor]] | None:
    """How files hold a parameter [experts, rows, ...] of a model of transformers that has a matrix an expert.

    ->  (expert, name of a layer, expression for it and those of the other experts, which rows of the expert's matrix
        int64) for each matrix; None: the file holds the parameter as a whole.
    """
    numbers = torch.arange(experts * rows, device="cpu").view(experts, rows, 1)
    kept = model.__dict__.pop("_weight_conversions", None)  # of a model that was loaded: those that its file needed
    model.__dict__["get_parameter"] = lambda _: numbers  # whose shape operations ask for: the experts are codes
    try:
        made = revert_weight_conversion(model, {parameter: numbers})
    finally:
        del model.__dict__["get_parameter"]
        if kept is not None:
            model._weight_conversions = kept
    found: list[tuple[int, str, str, Tensor]] = []
    for name, held in made.items():
        mine, (bank, _, after) = held.flatten(), name.partition(".experts.")
        number, _, last = after.removesuffix(".weight").partition(".")
        expert = int(mine[0]) // rows
        if not name.endswith(".weight") or number != str(expert) or bool((mine // rows != expert).any()):
            return None
        pattern = rf"{re.escape(bank)}\.experts\.\d+\.{re.escape(last)}"
        found.append((expert, name.removesuffix(".weight"), pattern, mine % rows))
    again = revert_weight_conversion(model, dict.fromkeys(made, numbers))  # as transformers does with what it saves
    is_stable = all(b.endswith(a) or a.endswith(b) for a, b in zip(sorted(made), sorted(again), strict=True))
    every = torch.cat([expert * rows + mine for expert, _, _, mine in found]).sort()[0]
    return found if is_stable and torch.equal(every, numbers.flatten()) else None
