"""Names that users choose for the inputs and outputs of an ONNX file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyquant.core import arguments
from pyquant.errors import ArgumentError


def check_names(input_names: Sequence[str] | None, output_names: Sequence[str] | None) -> None:
    """Raises ArgumentError for what is no sequence of names, each once; an output is not called as an input is."""
    known: dict[str, str] = {}
    for argument, names in (("input_names", input_names), ("output_names", output_names)):
        for name in () if names is None else arguments.iterable(argument, names, "names"):
            if not isinstance(name, str) or not name:
                raise ArgumentError(argument, arguments.shown(name), "names: text that is not empty")
            if name in known:
                also = "" if known[name] == argument else f", which is in {known[name]} too"
                raise ArgumentError(argument, f"{name!r} twice" if not also else f"{name!r}{also}", "each name once")
            known[name] = argument


def check_number(argument: str, names: Sequence[str] | None, count: int, of: str) -> None:
    """Raises ArgumentError for names of which there are not as many as tensors."""
    if names is not None and len(names) != count:
        raise ArgumentError(argument, f"{len(names)}: {', '.join(names)}"[:200], f"{count}, one for each {of}")


def name_values(graph: Any, input_names: Sequence[str] | None, output_names: Sequence[str] | None) -> None:
    """Names for the graph's inputs and outputs; what is called so inside of it gets another name."""
    chosen = {*(input_names or ()), *(output_names or ())}
    if not chosen:
        return
    inside = [*graph.inputs, *graph.initializers.values()]
    inside += [value for node in graph.all_nodes() for value in node.outputs]
    taken = {value.name for value in inside} | chosen
    for value in inside:
        if value.name in chosen:
            if value.is_initializer():
                argument = "input_names" if value.name in (input_names or ()) else "output_names"
                raise ArgumentError(argument, f"{value.name!r}", "names that no parameter of the model has")
            number = next(i for i in range(len(taken) + 1) if f"{value.name}_{i}" not in taken)
            value.name = f"{value.name}_{number}"
            taken.add(value.name)
    for value, name in zip(graph.inputs, input_names or (), strict=False):
        value.name = name
    for value, name in zip(graph.outputs, output_names or (), strict=False):
        value.name = name
