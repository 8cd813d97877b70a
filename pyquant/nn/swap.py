"""Put new modules into a model, all of them or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.nn.linear_state import LinearState
from pyquant.nn.offloaded import refuse_offloaded

Undo = Callable[[], Any]
# torch's encoders: the attribute that opens the fused path, and the value that closes it
_FUSED_PATHS: Final = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)


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
        for names, module in new:
            for name in names:
                parent_name, _, child = name.rpartition(".")
                places = model.get_submodule(parent_name)._modules
                if isinstance(places.get(child), LinearState):
                    refuse_offloaded(name, places[child])
                put(places, child, module, steps)
        for layer in model.modules():
            _leave_fused_path(layer, steps)
            if settle := getattr(type(layer), "_settle_layers", None):  # of a bank of experts
                settle(layer, steps)
        if device is not None:
            _move(model, device, steps)
    if undo is not None:
        undo.extend(steps)


@contextmanager
def undone_on_error(undo: list[Undo] | None = None) -> Iterator[list[Undo]]:
    """Run the steps of `undo` (None: a new list, for the body to fill) in reverse where the body raises: all of them,
    also where one of them fails, or is interrupted."""
    steps = [] if undo is None else undo
    try:
        yield steps
    except BaseException:
        _run_all(steps)
        raise


def _run_all(steps: Sequence[Undo]) -> None:
    """Every step from the last to the first; what one raises goes on after the others."""
    with ExitStack() as stack:  # calls what it holds in reverse, and raises at the end
        for step in steps:
            stack.callback(step)


def as_it_is(model: nn.Module) -> list[Undo]:
    """Steps that give every module of a model the class, the attributes and the members back that it has now; numbers
    that something writes into its tensors are not among them."""
    return [
        partial(_restore_module, module, type(module), dict(module.__dict__), _held(module))
        for module in model.modules()
    ]


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


def put(holder: dict[str, Any], name: str, value: Any, undo: list[Undo]) -> None:
    """holder[name] = value, with the step that takes it back."""
    former = partial(holder.__setitem__, name, holder[name]) if name in holder else partial(holder.pop, name)
    undo.append(former)
    holder[name] = value


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


def _leave_fused_path(layer: nn.Module, undo: list[Undo]) -> None:
    """torch's encoder layers have an inference path that reads the weights of their Linears instead of calling them;
    an encoder that holds a QLinear, or a layer that simulates one, must take the ordinary path, and may come back."""
    for kind, name, off in _FUSED_PATHS:
        if isinstance(layer, kind) and name in layer.__dict__:
            former = f"pyquant_former_{name}"
            if has_quantised(layer):
                put(layer.__dict__, former, layer.__dict__.get(former, layer.__dict__[name]), undo)
                put(layer.__dict__, name, off, undo)
            elif former in layer.__dict__:
                put(layer.__dict__, name, layer.__dict__[former], undo)
                undo.append(partial(layer.__dict__.__setitem__, former, layer.__dict__.pop(former)))


def has_quantised(layer: nn.Module) -> bool:
    """Whether a module holds a layer that runs in integers or simulates one."""
    return any(isinstance(module, LinearState) or hasattr(module, "fake_quantizers") for module in layer.modules())


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
