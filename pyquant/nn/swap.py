"""Put new modules into a model, all of them or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyquant.nn.linear_state import LinearState
from pyquant.nn.listed import exchange_listed, listed_as_it_is
from pyquant.nn.offloaded import refuse_offloaded
from pyquant.nn.parents import tell_parents
from pyquant.nn.undo import Undo, put, undone_on_error


def swap_modules(
    model: nn.Module,
    new: Sequence[tuple[Sequence[str], nn.Module]],
    device: torch.device | None = None,
    undo: list[Undo] | None = None,
) -> None:
    """Replace modules by name, then move the model to `device` (None: stay).

    new   pairs (all names of one module, its replacement).
    undo  receives the steps that take the changes back, for a caller that may still fail; run them in reverse.
    Raises UnsupportedError where codes that accelerate has offloaded would go.
    On any exception, KeyboardInterrupt included, every change is taken back and the exception goes on.
    """
    with undone_on_error() as steps:
        exchanged: dict[int, nn.Module] = {}
        for names, module in new:
            for name in names:
                parent_name, _, child = name.rpartition(".")
                places = model.get_submodule(parent_name)._modules
                if isinstance(places.get(child), LinearState):
                    refuse_offloaded(name, places[child])
                if places.get(child) is not None:
                    exchanged[id(places[child])] = module
                put(places, child, module, steps)
        if exchanged:
            made = {id(module) for module in exchanged.values()}
            exchange_listed([one for one in model.modules() if id(one) not in made], exchanged, steps)
        for layer in model.modules():
            if settle := getattr(type(layer), "_settle_layers", None):  # of a bank of experts
                settle(layer, steps)
        tell_parents(model, steps)
        if device is not None:
            _move(model, device, steps)
    if undo is not None:
        undo.extend(steps)


def as_it_is(model: nn.Module) -> list[Undo]:
    """Steps that give every module of a model the class, the attributes and the members back that it has now; numbers
    that something writes into its tensors are not among them."""
    steps: list[Undo] = []
    for module in model.modules():
        steps.append(partial(_restore_module, module, type(module), dict(module.__dict__), _held(module)))
        steps.extend(listed_as_it_is(module))
    return steps


def _held(module: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    holders = module._modules, module._parameters, module._buffers
    return [(holder, dict(holder)) for holder in holders]


def _restore_module(
    module: nn.Module, kind: type, attributes: dict[str, Any], held: list[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    if type(module) is not kind:
        module.__class__ = kind
    for now, then in ((module.__dict__, attributes), *held):
        for name in now.keys() - then.keys():
            del now[name]
        if list(now) != list(then):  # members come back in their order
            now.clear()
        now.update(then)


def distinct(model: nn.Module, wanted: Callable[[str, nn.Module], bool]) -> list[tuple[list[str], nn.Module]]:
    """Every module with the names under which it is wanted, in the order of named_modules."""
    found: dict[int, tuple[list[str], nn.Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if wanted(name, module):
            found.setdefault(id(module), ([], module))[0].append(name)
    return list(found.values())


def uses_of(model: nn.Module) -> Counter[int]:
    """{id of a module: in how many places it stands}."""
    return Counter(id(child) for parent in model.modules() for child in parent._modules.values())


def _move(model: nn.Module, device: torch.device, undo: list[Undo]) -> None:
    for parameter in model.parameters():
        grad = parameter.grad
        undo.append(partial(_restore_data, parameter, parameter.data, grad, None if grad is None else grad.data))
    for module in model.modules():
        undo.append(partial(module._parameters.update, dict(module._parameters)))
        undo.append(partial(module._buffers.update, dict(module._buffers)))
        if isinstance(module, LinearState):  # the layout of its buffer goes with the device
            undo.append(partial(module.__dict__.update, dict(module.__dict__)))
    model.to(device)


def _restore_data(parameter: nn.Parameter, data: Tensor, grad: Tensor | None, grad_data: Tensor | None) -> None:
    parameter.data, parameter.grad = data, grad
    if grad is not None and grad_data is not None:
        grad.data = grad_data
