"""Numbers of a layer that are held elsewhere too: what is written into what was shown goes to where it is read."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyquant.errors import UnsupportedError
from pyquant.nn import state
from pyquant.ops import values

_SET_DATA: Final = Tensor.data.__set__  # type: ignore[attr-defined]
_BASE: Final = Tensor._base.__get__  # type: ignore[union-attr]
_ASKS_FOR_GRADIENTS: Final = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


class Shown(Tensor):
    """A bias, scale or zero point as a layer shows it, or a view of one; what is computed with it is a plain tensor.

    A packed buffer has a copy of each, and a layer of another type shows a bias of that: after an operation that wrote
    into what was shown (`layer.bias.zero_()`, `layer.input_scale.data[0] = 0.1`, `out=`) the layer takes the numbers,
    or keeps what it had and raises ArgumentError, where they are not what it may hold. Asking for a gradient raises
    UnsupportedError, as the layer computes none; a Parameter may be made of it.
    """

    home: weakref.ref[Any]  # the layer that showed it
    slot: str  # one of state.NUMBERS
    whole: Tensor  # what was shown, plain, of the same memory
    root: weakref.ref[Shown]  # what was shown, of which this is a part, or itself
    held: Tensor  # the layer's own: another one there means that the layer has been given other numbers

    @classmethod
    def of(cls, layer: Any, name: str, shown: Tensor, held: Tensor) -> Shown:
        self: Shown = shown.as_subclass(cls)
        self.home, self.slot, self.root = weakref.ref(layer), name, weakref.ref(self)
        self.whole, self.held = shown, held
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _BASE:  # no part: who follows it comes to an end
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        shown = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Shown)]
        if func in _ASKS_FOR_GRADIENTS and all((*args[1:], *kwargs.values())):
            _refuse_gradient(shown[0].slot, sys._getframe(1))
        with torch._C.DisableTorchFunctionSubclass():
            before = [_Before(one) for one in shown]
            if is_alone := all(issubclass(cls, kind) for kind in types):
                result = func(*args, **kwargs)
            else:
                args, kwargs = pytree.tree_map_only(Shown, plain, (args, kwargs))
        if not is_alone:  # a Proxy of torch.fx or another's subclass: its function is asked, and knows nothing of this
            result = func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            for one, was in zip(shown, before, strict=True):
                if func == _SET_DATA:
                    one._give_back(args[1], was)
                elif was.has_changed():
                    one._give_back(one.whole, was)
            return pytree.tree_map_only(Tensor, lambda t: _as_part(t, shown), result)

    def _give_back(self, numbers: Tensor, was: _Before) -> None:
        layer, buffer = self.home(), state.held(self.slot)
        if layer is None or layer._buffers[buffer] is not self.held:
            return
        own, written = self.held, numbers.detach().clone()
        was.restore()  # a layer has its old numbers until it takes the new ones, or refuses them
        new = written
        if not own.is_meta and own.dtype != new.dtype:  # what was not written keeps the digits that were not shown
            new = torch.where(own.to(new.dtype) == new, own, new.to(own.dtype))
        if self.slot.startswith(
            ("input", "output")
        ):  # the layer that gives, or takes, the codes may hold the same memory
            layer._buffers[buffer] = own.clone()
        try:
            layer._fill(layer._state() | {self.slot: new}, in_place=True)
        except BaseException:
            layer._buffers[buffer] = own
            raise
        self.held = layer._buffers[buffer]
        if self.held is own:
            with torch.no_grad():
                self.whole.copy_(written)
            return
        for one in (self, self.root()):
            if one is not None:
                one.held = one.whole = self.held
                if one.numel() == 1:  # of one number, a part is all of it
                    _SET_DATA(one, self.held.view(one.shape))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = memo.setdefault(id(self), plain(self).clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


class _Before:
    """What was shown, before an operation that may write into it or a part of it."""

    def __init__(self, part: Shown) -> None:
        self.part, self.whole, self.numbers = part, part.whole, part.whole.detach().clone()
        self.version = None if part.is_inference() else part._version

    def has_changed(self) -> bool:
        if self.version is not None:  # of the part: the counter of its .data is another
            return self.part._version != self.version
        return not (self.whole.is_meta or torch.equal(self.whole, self.numbers))

    def restore(self) -> None:
        with torch.no_grad():
            self.whole.copy_(self.numbers)


def number(name: str) -> Any:
    """One of state.NUMBERS but the bias as an attribute. Its buffer has another name (state.held), so that torch.func's
    functional_call, which puts tensors into buffers of their name, assigns it instead: the packed weight follows."""
    key = state.held(name)

    def get(layer: Any) -> Any:
        lent = layer._lent_by_caller(name)
        return show(layer, name, layer._buffers[key], layer._buffers[key]) if lent is None else lent

    return property(get)


def show(layer: Any, name: str, shown: Tensor | None, held: Tensor | None) -> Tensor | None:
    """`shown`, which has what the layer holds as `held`, so that it may be written into; where a graph is recorded, as
    it is."""
    is_recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    if shown is None or held is None or is_recorded or type(held) is not Tensor or values.is_batch(held):
        return shown
    return Shown.of(layer, name, shown, held)


def plain(tensor: Any) -> Any:
    """The numbers of what was shown, in the same memory; anything else as it is."""
    if not isinstance(tensor, Shown):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _as_part(result: Tensor, shown: Iterable[Shown]) -> Tensor:
    """A result, or, where it shares the memory of what a layer shows, that as such."""
    if type(result) is Tensor and result.layout == torch.strided:
        memory = result.untyped_storage()._cdata
        for one in shown:
            if one.whole.untyped_storage()._cdata == memory:
                part: Shown = result.as_subclass(Shown)
                part.home, part.slot, part.root = one.home, one.slot, one.root
                part.whole, part.held = one.whole, one.held
                return part
    return result


def _refuse_gradient(name: str, caller: Any) -> None:
    if caller.f_globals.get("__name__") != "torch.nn.parameter":
        raise UnsupportedError(
            f"a gradient of the {name} of a quantised layer: its numbers are frozen; train a model that simulates "
            "(prepare_qat_, insert_fake_quantize_) or a Parameter of your own"
        )
