"""Where the result of every quantised layer goes, seen in one run of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from pyquant.core import arguments
from pyquant.core.qtensor import PackedQTensor, QTensor
from pyquant.errors import ArgumentError
from pyquant.nn.chain import Dequantize, QResidual, QResidualAdd, Quantize
from pyquant.nn.linear_call import LinearCall

INPUT_NAMES: Final = ("x", "input")  # by which layers may be given what they multiply


@dataclass(frozen=True)
class Use:
    """One reader of a layer's result."""

    # 'layer': a module that could take codes; 'residual': the real residual operand of a layer; 'function': a torch
    # function, called by the code of a module; 'result': the caller of the model
    kind: str
    name: str  # of the module, or of the function and the module that calls it


@dataclass
class Flow:
    """The result of one quantised layer: who reads it, and how large it is (all calls together)."""

    name: str
    layer: LinearCall
    uses: list[Use] = field(default_factory=list)
    elements: int = 0
    dtype: torch.dtype | None = None
    gives_codes: bool = False


def producers(model: nn.Module) -> dict[str, LinearCall]:
    """{name: quantised layer}; a layer that QResidualAdd calls goes by the name of that module."""
    layers: dict[str, LinearCall] = {}
    owned = set()
    for name, module in model.named_modules():
        if isinstance(module, QResidualAdd) and isinstance(module.layer, LinearCall):
            layers[name] = module.layer
            owned.add(id(module.layer))
        elif isinstance(module, LinearCall) and id(module) not in owned:
            layers[name] = module
    return layers


def trace(model: nn.Module, example_inputs: object) -> tuple[dict[str, Flow], Any]:
    """Run the model once, without gradients. -> the flow of every quantised layer that ran, and the result.

    Functions that only look (shape, dtype, size) are no readers.
    """
    tracer = _Tracer(model)
    with torch.no_grad(), tracer.calls.watched(), tracer:
        result = call(model, example_inputs)
    for value in values(result):
        tracer.read(value, Use("result", "the caller of the model"))
    return tracer.flows, result


def call(model: nn.Module, example_inputs: object) -> Any:
    """The model, run on its example."""
    if isinstance(example_inputs, Mapping):
        if not all(isinstance(name, str) for name in example_inputs):
            raise ArgumentError("example_inputs", "a mapping with keys that are no text", "names of arguments as keys")
        return model(**example_inputs)
    if isinstance(example_inputs, tuple) and not isinstance(example_inputs, QTensor):
        return model(*example_inputs)
    return model(example_inputs)


class Calls:
    """Which module of a model is at work; entered(module, args, kwargs) and left(module, result) are called around."""

    def __init__(
        self, model: nn.Module, entered: Callable[..., None] | None = None, left: Callable[..., None] | None = None
    ) -> None:
        self.model, self.entered, self.left = model, entered, left
        self.names = {id(module): name for name, module in reversed(list(model.named_modules()))}
        self._stack: list[nn.Module] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Hooks on every module."""
        handles: list[Any] = []
        try:
            for module in self.model.modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                    handles.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def place(self) -> str:
        """The module at work by name and class; '' for none."""
        if not self._stack:
            return ""
        kind, name = type(self._stack[-1]).__name__, self.names.get(id(self._stack[-1]), "")
        return f"'{name}' ({kind})" if name else kind

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stack.append(module)
        if self.entered is not None:
            self.entered(module, args, kwargs)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if self._stack and self._stack[-1] is module:
            self._stack.pop()
        if self.left is not None:
            self.left(module, result)


class _Tracer(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls = Calls(model, self._enter, self._leave)
        self.producers = producers(model)
        self.flows: dict[str, Flow] = {}
        self._made: dict[int, tuple[Any, str]] = {}  # values are kept alive: an id must not be used twice
        self._inside = 0  # depth of modules whose own functions are no readers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._inside and self._made and any(isinstance(v, Tensor) for v in tree_leaves(result)):
            for value in values((args, kwargs)):
                if id(value) in self._made:
                    place = self.calls.place()
                    where = f"in {place}" if place else "outside of the model"
                    function = str(resolve_name(func) or getattr(func, "__name__", func))
                    self.read(value, Use("function", f"{function.removeprefix('torch.nn.functional.')} {where}"))
        return result

    def read(self, value: object, use: Use) -> None:
        """Note a reader of a value, if a quantised layer made it."""
        source = self._made.get(id(value))
        if source is not None and use not in self.flows[source[1]].uses:
            self.flows[source[1]].uses.append(use)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self.calls.names[id(module)]
        if _takes_codes(module):
            given = [first_given(args, kwargs)]
            self.read(given[0], Use("layer", name))
            for value in (*args[1:], *(v for key, v in kwargs.items() if key not in INPUT_NAMES)):
                self.read(value, Use("residual", name))
        self._inside += _is_opaque(module)

    def _leave(self, module: nn.Module, result: Any) -> None:
        self._inside -= _is_opaque(module)
        name = self.calls.names[id(module)]
        layer = self.producers.get(name)
        if layer is None or result is None:
            return
        data = result.data if isinstance(result, QTensor) else result
        flow = self.flows.setdefault(name, Flow(name, layer))
        flow.elements += data.numel() * (2 if isinstance(result, PackedQTensor) else 1)
        flow.dtype, flow.gives_codes = data.dtype, isinstance(result, QTensor)
        self._made[id(result)] = (result, name)


def _takes_codes(module: nn.Module) -> bool:
    return isinstance(module, (LinearCall, QResidual, Quantize, Dequantize))


def _is_opaque(module: nn.Module) -> bool:
    is_sum = isinstance(module, QResidualAdd) and isinstance(module.layer, LinearCall)
    return is_sum or _takes_codes(module)


def values(tree: Any) -> list[Any]:
    """Tensors and QTensors (each as one value) among nested arguments."""
    leaves = tree_leaves(tree, is_leaf=lambda v: isinstance(v, QTensor))
    return [leaf for leaf in leaves if isinstance(leaf, (Tensor, QTensor))]


def check_model(model: object) -> nn.Module:
    """The model, if it is one that can be traced: a module in evaluation mode."""
    found = arguments.module("model", model)
    if found.training:
        raise ArgumentError("model", "a model in training mode", "evaluation mode: call model.eval() first")
    return found


def first_given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a layer multiplies, by position or by its name in ours or in torch's layers, else the first there is; None:
    nothing."""
    if args:
        return args[0]
    return next((kwargs[name] for name in INPUT_NAMES if name in kwargs), next(iter(kwargs.values()), None))


def watch_input(layer: nn.Module, see: Callable[[Tensor], None]) -> RemovableHandle:
    """see(x) before every call of a layer, with what it is given, by position or by name."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        see(first_given(args, kwargs))

    return layer.register_forward_pre_hook(hook, with_kwargs=True)


def first_tensor(result: Any) -> Tensor | None:
    """What counts of a model's result: itself, 'logits', 'last_hidden_state', or the first tensor in it; None: none."""
    if isinstance(result, Mapping):
        named = [result.get(key) for key in ("logits", "last_hidden_state")]
        result = [*named, *result.values()]
    items = result if isinstance(result, (tuple, list)) else [result]
    return next((item for item in items if isinstance(item, Tensor)), None)
