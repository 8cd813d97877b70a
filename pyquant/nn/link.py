"""link_: layers hand codes to the next layer instead of real numbers; chain_report: where they do, and why not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError, PyquantError
from pyquant.nn import flow as flows
from pyquant.nn import obstacles, state
from pyquant.nn.chain import ExpectedRange, QResidual, QResidualAdd, expected_range, same_numbers
from pyquant.nn.flow import Flow, Use
from pyquant.nn.fuse_rules import Pair, neighbours, register_pair
from pyquant.nn.linear_call import LinearCall
from pyquant.nn.swap import swap_modules, uses_of
from pyquant.nn.undo import Undo, put, undone_on_error

_LINKS: dict[type[nn.Module], list[Pair]] = {}


@dataclass(frozen=True)
class ChainRecord:
    """The result of one quantised layer on its way.

    name         of the layer (or of the QResidualAdd that calls it).
    state        'linked': readers get codes. 'linkable': they will after link_. 'broken': they get real numbers.
                 'end': the result of the model.
    readers      modules and functions that read it.
    reason       why the chain breaks here; empty where it does not.
    elements     of the result, in the example run.
    float_bytes  that one writing and every reading of the result move as real numbers.
    code_bytes   the same as codes: a byte each, half of one where int4 codes are packed (ops.packs_int4).
    extra_bytes  what this layer moves more than codes would: float_bytes - code_bytes, or 0 where codes flow or
                 nothing could be done ('end').
    """

    name: str
    state: str
    readers: tuple[str, ...]
    reason: str
    elements: int
    float_bytes: int
    code_bytes: int
    extra_bytes: int


def register_link(parent_class: type[nn.Module], producer: str, consumer: str) -> type[nn.Module]:
    """Tell link_ that a module class hands the result of one layer to another one, and to nothing else.

    parent_class, producer, consumer   as parent_class, linear and activation of register_fusion.
    Needed by link_ without an example alone. Raises ArgumentError as register_fusion.

    Example:
        >>> class Feed(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        ...     def forward(self, x):
        ...         return self.down(self.up(x))
        >>> _ = register_link(Feed, "up", "down")
    """
    return register_pair(_LINKS, parent_class, ("producer", producer), ("consumer", consumer))


def link_(
    model: nn.Module, example_inputs: object = None, *, pairs: Iterable[tuple[str, str]] | None = None
) -> nn.Module:
    """Let layers whose readers are calibrated integer layers give them codes instead of real numbers, in place.

    model           quantised, calibrated, fused (an activation in between stops a chain), in evaluation mode.
    example_inputs  a tensor, a tuple of arguments or a mapping of keyword arguments: the model is run once to see where
                    every result goes, and once more to compare. None: nothing is run; neighbours in an nn.Sequential
                    and the pairs of register_link are linked.
    pairs           (producer, consumer) names of layers to link, and no others, in place of both: for producers whose
                    result nothing else reads. A pair that cannot be linked is an error that says why.
    ->              the model. A linked layer has `outputs` in its scheme: the input scheme and scale of its readers.
    Where all real numbers in between were float32 the result is the same bit for bit (checked with the example);
    16-bit results were rounded before they were quantised, and no longer are. Gradients do not flow through codes.
    The control flow must not depend on the data. Call it again after model.to(device) or load_pretrained: it changes
    nothing but lets the layers share the memory of their scales, so that no call compares them.
    Transactional. Raises ArgumentError; PyquantError where the linked model gives another result.
    Source: docs/chains.md, docs/numerics.md 13.

    Example:
        >>> from pyquant.core.presets import W8A8
        >>> from pyquant import quantize_
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).eval()
        >>> model = link_(quantize_(model, W8A8(), input_scales={"0": 0.02, "1": 0.02}))
        >>> str(model[0].scheme.outputs)
        'int8 per_tensor'
    """
    flows.check_model(model)
    before: Any = None
    if pairs is not None:
        if example_inputs is not None:
            raise ArgumentError("pairs", "pairs and example_inputs", "one of the two")
        found = list(_paired(model, pairs))
    elif example_inputs is None:
        found = list(_structural(model))
    else:
        traced, before = flows.trace(model, example_inputs)
        found = list(traced.values())
    with undone_on_error() as undo:
        _link(model, [one for one in found if _judge(model, one)[0] in ("linked", "linkable")], undo)
        if before is not None:
            exact = all(one.dtype in (torch.float32, torch.int8, torch.uint8) for one in found)
            _compare(model, example_inputs, before, exact)
    return model


def chain_report(model: nn.Module, example_inputs: object) -> list[ChainRecord]:
    """Where integer chains run, where they break and why, and how many bytes more that moves: counted, not timed.

    model, example_inputs   as in link_; the model is run once and not changed.
    ->   one record for every quantised layer that ran, in the order of execution.
    Raises ArgumentError.

    Example:
        >>> from pyquant.core.presets import W8A8Dynamic
        >>> from pyquant import quantize_
        >>> model = quantize_(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).eval(), W8A8Dynamic())
        >>> [(record.state, record.extra_bytes) for record in chain_report(model, torch.zeros(3, 8))]
        [('broken', 144), ('end', 0)]
    """
    flows.check_model(model)
    return [_record(model, one) for one in flows.trace(model, example_inputs)[0].values()]


def _record(model: nn.Module, one: Flow) -> ChainRecord:
    state, reason = _judge(model, one)
    size = 0 if one.dtype is None else (one.layer.dtype if one.gives_codes else one.dtype).itemsize
    passes = 1 + len(one.uses)
    float_bytes, code_bytes = size * one.elements * passes, one.elements // _codes_in_a_byte(model, one) * passes
    extra = 0 if state in ("linked", "end") else float_bytes - code_bytes
    readers = tuple(use.name for use in one.uses)
    return ChainRecord(one.name, state, readers, reason, one.elements, float_bytes, code_bytes, extra)


def _codes_in_a_byte(model: nn.Module, one: Flow) -> int:
    """Of the codes that this result is or could be: those that its readers take, else those that its layer takes."""
    taken = [expected_range(model.get_submodule(use.name)) for use in one.uses if use.kind == "layer"]
    kinds = [one.layer.scheme.outputs, *(known[0] for known in taken if known), one.layer.scheme.inputs]
    scheme = next((kind for kind in kinds if kind is not None), None)
    return 2 if one.layer.packs_codes(scheme, one.layer.storage.device) else 1


def _judge(model: nn.Module, one: Flow) -> tuple[str, str]:
    """State and reason of one layer's result."""
    if not one.uses:
        return "end", "nothing reads the result"
    if all(use.kind == "result" for use in one.uses):
        return "end", ""
    if one.gives_codes or one.layer.scheme.outputs is not None:
        return "linked", ""
    if not one.layer.scheme.is_integer:
        return "broken", f"scheme {one.layer.scheme} computes in floating point and gives real numbers"
    if obstacles.has_hooks(model.get_submodule(one.name)) or obstacles.has_hooks(one.layer):
        return "broken", "the layer has hooks, which expect real numbers"
    for use in one.uses:
        reason = _why_real(model, use)
        if reason is not None:
            return "broken", reason
    (first, own), *others = [(use.name, _range_of(model.get_submodule(use.name))) for use in one.uses]
    for name, other in others:
        is_same = own[0].code_range == other[0].code_range and same_numbers(own[1], other[1])
        if not is_same or not same_numbers(own[2], other[2]):
            difference = f"{own[1].item():.6g} for '{first}', {other[1].item():.6g} for '{name}'"
            return "broken", f"it is read with different scales or zero points: {difference}"
    return "linkable", ""


def _why_real(model: nn.Module, use: Use) -> str | None:
    """Why a reader needs real numbers; None where it takes codes of a known scale."""
    if use.kind == "result":
        return "it is also a result of the model"
    if use.kind == "function":
        return f"{use.name} works on real numbers: fuse it, fold it, or quantise what it is part of"
    if use.kind == "residual":
        return f"it is the residual operand of '{use.name}', not quantised: use QResidualAdd or mark it with Residual"
    reader = model.get_submodule(use.name)
    if obstacles.has_hooks(reader):
        return f"'{use.name}' has hooks, which expect real numbers"
    if expected_range(reader) is not None:
        return None
    if not isinstance(reader, LinearCall):
        return f"'{use.name}' ({type(reader).__name__}) has no input scale"
    if reader.scheme.inputs is None:
        return f"'{use.name}' takes real numbers ({reader.scheme})"
    if reader.scheme.inputs.dynamic:
        return f"'{use.name}' finds the scale of its input at run time ({reader.scheme}); codes need a static one"
    return f"'{use.name}' is not calibrated"


def _range_of(reader: nn.Module) -> ExpectedRange:
    """expected_range of a reader that is known to have one."""
    return cast(ExpectedRange, expected_range(reader))


def _structural(model: nn.Module) -> Iterator[Flow]:
    """Flows that the structure alone proves: neighbours in an nn.Sequential and registered pairs, used in one place."""
    uses = uses_of(model)
    known = flows.producers(model)
    for path, parent in model.named_modules():
        registered = [] if "forward" in parent.__dict__ else _LINKS.get(type(parent), [])
        for first, second in (*neighbours(parent), *registered):
            name, reader = (f"{path}.{child}" if path else child for child in (first, second))
            layer, taker = known.get(name), parent._modules.get(second)
            if layer is None or not isinstance(taker, (LinearCall, QResidual)):
                continue
            if uses[id(parent._modules[first])] == 1 and uses[id(taker)] == 1:
                yield Flow(name, layer, [Use("layer", reader)])


def _paired(model: nn.Module, pairs: Iterable[tuple[str, str]]) -> Iterator[Flow]:
    """The flows of named pairs, each of which can be linked."""
    known, modules = flows.producers(model), dict(model.named_modules())
    readers: dict[str, list[Use]] = {}
    for producer, consumer in arguments.iterable("pairs", pairs, "pairs (producer, consumer) of names"):
        if producer not in known or not isinstance(modules.get(consumer), (LinearCall, QResidual, QResidualAdd)):
            wrong = consumer if producer in known else producer
            raise ArgumentError("pairs", f"{wrong!r}, no quantised layer", ", ".join(list(known)[:8]) or "none")
        readers.setdefault(producer, []).append(Use("layer", consumer))
    for producer, uses in readers.items():
        flow = Flow(producer, known[producer], uses)
        state, reason = _judge(model, flow)
        if state not in ("linked", "linkable"):
            got = f"{producer!r} to {', '.join(repr(use.name) for use in uses)}: {reason}"
            raise ArgumentError("pairs", got, "calibrated integer layers one after the other")
        yield flow


def _link(model: nn.Module, flows: list[Flow], undo: list[Undo]) -> None:
    readers = {}
    for one in flows:
        taken = [model.get_submodule(use.name) for use in one.uses if use.kind == "layer"]
        readers[one.name] = [reader for reader in taken if expected_range(reader) is not None]
        for other in readers[one.name][1:]:  # one memory for all, so that no call needs to compare numbers
            _share(readers[one.name][0], other, undo)
    new: list[tuple[list[str], nn.Module]] = []
    for one in (one for one in flows if readers[one.name]):
        scheme, scale, zero_point = _range_of(readers[one.name][0])
        owner = model.get_submodule(one.name)
        if isinstance(owner, QResidualAdd):
            is_free = zero_point is not None and int(zero_point) == scheme.code_range[0]
            put(owner.__dict__, "relu_is_free", is_free, undo)
        names = [name for name, module in model.named_modules(remove_duplicate=False) if module is one.layer]
        new.append((names, one.layer.with_outputs(scheme, scale, zero_point)))
    if any("" in names for names, _ in new):
        raise ArgumentError("model", "a single layer", "a module that contains layers")
    swap_modules(model, new, undo=undo)


def _share(first: nn.Module, other: nn.Module, undo: list[Undo]) -> None:
    expected, prefix = _range_of(first), "input_" if isinstance(other, LinearCall) else ""
    for name, tensor in ((f"{prefix}scale", expected[1]), (f"{prefix}zero_point", expected[2])):
        name = state.held(name) if isinstance(other, LinearCall) else name
        held = other._buffers[name]
        if held is not None and tensor is not None and held.device == tensor.device:
            put(other._buffers, name, tensor, undo)


def _compare(model: nn.Module, example_inputs: object, before: Any, exact: bool) -> None:
    with torch.no_grad():
        try:
            after = flows.call(model, example_inputs)
        except Exception as error:
            raise PyquantError(f"the linked model fails on the example; it is as before: {error}") from error
    old, new = ([v for v in flows.values(tree) if isinstance(v, Tensor)] for tree in (before, after))
    same = [(t.shape, t.dtype) for t in old] == [(t.shape, t.dtype) for t in new]
    pairs = zip(old, new, strict=True) if same and exact else ()
    if not same or not all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs):
        raise PyquantError(
            "the linked model gives another result on the example; it is as before: does some code look "
            "at results in a way that depends on their type?"
        )
