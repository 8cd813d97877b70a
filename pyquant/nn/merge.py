"""merge_: quantised layers that read the same tensor become one product; merge_report: which, and why others do not."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.nn import flow as flows
from pyquant.nn.merge_rules import difference, obstacle
from pyquant.nn.merged_linear import Group, MergedLinear, member_kind
from pyquant.nn.offloaded import refuse_offloaded
from pyquant.nn.qlinear import QLinear
from pyquant.nn.swap import swap_modules, uses_of

# Attributes of one module that read one tensor in the models of transformers, in the order of their rows.
SIBLINGS: Final = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("gate_proj", "up_proj"),
    ("wi_0", "wi_1"),
    ("w1", "w3"),
)
# Names of attention whose keys come from another tensor than its queries.
_CROSS: Final = ("cross", "encoder_attn", "encdec", "image_attn")


@dataclass(frozen=True)
class MergeRecord:
    """Quantised layers that read one tensor.

    names   of the layers, in the order of their rows.
    state   'merged': they are one product. 'mergeable': they will be after merge_. 'apart': they stay as they are.
    reason  why they stay apart; empty for others.
    """

    names: tuple[str, ...]
    state: str
    reason: str = ""


def merge_(model: nn.Module, example_inputs: object = None) -> nn.Module:
    """Let quantised layers that read the same tensor (q, k and v; gate and up) be one product, in place.

    model           nn.Module with QLinears that run in integers: call it after quantize_ or load_pretrained.
    example_inputs  a tensor, a tuple of arguments or a mapping of keyword arguments: the model, in evaluation mode, is
                    run once to see which layers read one tensor. None: nothing is run, and the names of transformers'
                    models tell (q_proj k_proj v_proj, gate_proj up_proj ...; not in cross attention).
    ->              the model. Its layers are MergedLinears under their names: each is called as before, state_dict and
                    saved files are those of the model as it was, and a loaded model is merged by another call.
    The first that is called with a tensor quantises it once and multiplies it by the weights of all; the others take
    their part when they are called with the same tensor. Equal bits. That needs torch.no_grad() or, on a CPU,
    torch.inference_mode(), which does not count writes to a tensor: there its numbers are compared with those of the
    first call. With gradients, in torch.compile, and in inference mode on a GPU, every call computes all parts and
    keeps its own, which is right and slow. Writes past torch (x.data, other libraries) between two calls under no_grad
    are not seen.
    Layers stay apart, for the reason in merge_report, where schemes, biases, activations, types, or static input
    scales differ, or a layer has hooks, gives codes, stands in several places or is in 16 bits; weight-only layers
    unless they are on a CPU, whose compiled library gives a channel the same bits beside any others. A
    gated feed-forward block may be fused before or after; other activations before (fuse_): they leave merged layers
    alone. Transactional. Calling it again changes nothing.
    Raises ArgumentError for a model without quantised layers. Source: docs/layers.md.

    Example:
        >>> from pyquant import quantize_
        >>> feed = nn.ModuleDict({"gate_proj": nn.Linear(8, 16), "up_proj": nn.Linear(8, 16)})
        >>> x, model = torch.ones(1, 8), quantize_(nn.Sequential(feed), "W8A8Dynamic", check_speed=False)
        >>> before = model[0]["up_proj"](x)
        >>> with torch.no_grad():
        ...     torch.equal(merge_(model)[0]["up_proj"](x), before)
        True
    """
    layers = _named(model)
    new: list[tuple[list[str], nn.Module]] = []
    for record in _records(model, example_inputs):
        if record.state == "mergeable":
            found = [layers[name] for name in record.names]
            for name in record.names:
                refuse_offloaded(name, layers[name])
            group = Group(found)
            kind = cast(type[MergedLinear], member_kind(found[0]))
            members = [kind.of(layer, group, place) for place, layer in enumerate(found)]
            new += [([name], member) for name, member in zip(record.names, members, strict=True)]
    swap_modules(model, new)
    return model


def merge_report(model: nn.Module, example_inputs: object = None) -> list[MergeRecord]:
    """Which quantised layers read one tensor, and whether they are or can be one product.

    model, example_inputs   as in merge_; the model is not changed.
    ->   one record for every set of layers that are, could be, or stay apart, in the model's order.
    Raises ArgumentError.

    Example:
        >>> from pyquant import quantize_
        >>> feed = nn.ModuleDict({"gate_proj": nn.Linear(8, 16), "up_proj": nn.Linear(8, 16, bias=False)})
        >>> [record.reason for record in merge_report(quantize_(feed, "W8A8Dynamic", check_speed=False))]
        ['one has a bias and another none']
    """
    _named(model)
    return _records(model, example_inputs)


def _named(model: object) -> dict[str, QLinear]:
    found = {n: m for n, m in arguments.module("model", model).named_modules() if isinstance(m, QLinear)}
    if not found or "" in found:
        got = f"a {type(model).__name__} {'itself' if found else 'without QLinear'}"
        raise ArgumentError("model", got, "a module that contains quantised layers: call quantize_ first")
    return found


def _records(model: nn.Module, example_inputs: object) -> list[MergeRecord]:
    layers, uses = _named(model), uses_of(model)
    records: list[MergeRecord] = []
    for names in _by_names(model, layers) if example_inputs is None else _by_run(model, layers, example_inputs):
        apart = {name: reason for name in names if (reason := obstacle(layers[name], uses[id(layers[name])]))}
        alike: list[list[str]] = []
        for name in (name for name in names if name not in apart):
            others = next((one for one in alike if not difference(layers[one[0]], layers[name])), None)
            alike.append([name]) if others is None else others.append(name)
        for one in alike:
            if len(one) > 1:
                records.append(MergeRecord(tuple(one), _state(layers, one)))
        for one in (one for one in alike if len(one) == 1 and len(names) > 1):
            other = next((n for n in names if n != one[0] and n not in apart), None)
            if other is not None:
                apart[one[0]] = difference(layers[other], layers[one[0]])
        for reason in dict.fromkeys(apart.values()):
            records.append(MergeRecord(tuple(n for n in names if apart.get(n) == reason), "apart", reason))
    return records


def _state(layers: dict[str, QLinear], names: list[str]) -> str:
    return "merged" if isinstance(layers[names[0]], MergedLinear) else "mergeable"


def _by_names(model: nn.Module, layers: dict[str, QLinear]) -> list[list[str]]:
    """Siblings by the names of attributes."""
    found = []
    for path, parent in model.named_modules():
        if any(word in f"{path}.{type(parent).__name__}".lower() for word in _CROSS):
            continue
        for siblings in SIBLINGS:
            names = [f"{path}.{name}" if path else name for name in siblings if name in parent._modules]
            names = [name for name in names if name in layers]
            if len(names) > 1:
                found.append(names)
    return found


def _by_run(model: nn.Module, layers: dict[str, QLinear], example_inputs: object) -> list[list[str]]:
    """Layers that read one tensor, the same in every call of a run."""
    reads: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    kept: list[Any] = []  # alive, so that no id is used twice

    def entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = flows.first_given(args, kwargs)
        if isinstance(module, QLinear) and isinstance(x, Tensor):
            kept.append(x)
            reads[id(module)].append((id(x), 0 if x.is_inference() else x._version))

    with torch.no_grad(), flows.Calls(flows.check_model(model), entered).watched():
        flows.call(model, example_inputs)
    found: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for name, layer in layers.items():
        if id(layer) in reads:
            found.setdefault(tuple(reads[id(layer)]), []).append(name)
    return [names for names in found.values() if len(names) > 1]
