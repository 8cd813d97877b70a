"""The bias of a layer that keeps it elsewhere too: what is written into what was shown goes to where it is read."""

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

_BUFFER: Final = state.held("bias")
_SET_DATA: Final = Tensor.data.__set__  # type: ignore[attr-defined]
_ASKS_FOR_GRADIENTS: Final = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


class ShownBias(Tensor):
    """A bias as a layer shows it, or a view of one; what is computed with it is a plain tensor.

    A packed buffer has a copy of the bias, and a layer of another type shows one: after an operation that wrote into
    what was shown (`layer.bias.zero_()`, `layer.bias.data[3] = 1`, `out=`) the layer takes the numbers. Asking for a
    gradient raises UnsupportedError, as the layer computes none; a Parameter may be made of it.
    """

    home: weakref.ref[Any]  # the layer that showed it
    whole: Tensor  # what was shown, plain, of the same memory
    held: Tensor  # the layer's own, float32: another one there means that the layer has been given another bias

    @classmethod
    def of(cls, layer: Any, shown: Tensor, held: Tensor) -> ShownBias:
        self: ShownBias = shown.as_subclass(cls)
        self.home, self.whole, self.held = weakref.ref(layer), shown, held
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS_FOR_GRADIENTS and all((*args[1:], *kwargs.values())):
            _refuse_gradient(sys._getframe(1))
        shown = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, ShownBias)]
        with torch._C.DisableTorchFunctionSubclass():
            before = [_edition(one) for one in shown]
            if is_alone := all(issubclass(cls, kind) for kind in types):
                result = func(*args, **kwargs)
            else:
                args, kwargs = pytree.tree_map_only(ShownBias, plain, (args, kwargs))
        if not is_alone:  # a Proxy of torch.fx or another's subclass: its function is asked, and knows nothing of this
            result = func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            for one, edition in zip(shown, before, strict=True):
                if _edition(one) != edition or func == _SET_DATA:
                    one._give_back(args[1] if func == _SET_DATA else one.whole)
            return pytree.tree_map_only(Tensor, lambda t: _as_part(t, shown), result)

    def _give_back(self, numbers: Tensor) -> None:
        layer = self.home()
        if layer is not None and layer._buffers[_BUFFER] is self.held:
            own, new = self.held, numbers.detach()
            if not own.is_meta and own.dtype != new.dtype:  # what was not written keeps the digits that were not shown
                new = torch.where(own.to(new.dtype) == new, own, new.to(own.dtype))
            layer._fill(layer._state() | {"bias": new}, in_place=True)
            self.held = layer._buffers[_BUFFER]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = memo.setdefault(id(self), plain(self).clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)


def plain(shown: ShownBias) -> Tensor:
    """The numbers, in the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return shown.as_subclass(Tensor)


def _edition(tensor: Tensor) -> object:
    """What a write changes."""
    if not tensor.is_inference():
        return tensor._version
    return None if tensor.is_meta else tensor.tolist()


def _as_part(result: Tensor, shown: Iterable[ShownBias]) -> Tensor:
    """A result, or, where it shares the memory of what a layer shows, that as such."""
    if type(result) is Tensor and result.layout == torch.strided:
        memory = result.untyped_storage()._cdata
        for one in shown:
            if one.whole.untyped_storage()._cdata == memory:
                part: ShownBias = result.as_subclass(ShownBias)
                part.home, part.whole, part.held = one.home, one.whole, one.held
                return part
    return result


def _refuse_gradient(caller: Any) -> None:
    if caller.f_globals.get("__name__") != "torch.nn.parameter":
        raise UnsupportedError(
            "a gradient of the bias of a quantised layer: its numbers are frozen; train a model that simulates "
            "(prepare_qat_, insert_fake_quantize_) or a Parameter of your own"
        )
