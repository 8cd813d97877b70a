"""What other code does to any layer, and cannot do to one that holds codes: it is refused with what to do instead.

Torch's own tools replace a weight by one that they compute; transformers resizes tables; accelerate moves tensors one
by one, by their names. Who is at work is found in the call stack, where the layer is looked at or written to: it needs
none of these libraries, and leaves nothing in the model that a copy or a pickle would have to carry.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch

from pyquant.errors import UnsupportedError
from pyquant.nn.offloaded import offload_whole

_RESIZERS: Final = frozenset({"_get_resized_embeddings", "_get_resized_lm_head"})
_COMPUTERS: Final = frozenset(
    f"torch.nn.utils.{m}" for m in ("parametrizations", "prune", "spectral_norm", "weight_norm")
)

_HOME: Final = torch.device("cpu")  # where codes are unpacked that lie in its layout elsewhere


def refuse_look() -> None:
    """Raise UnsupportedError where what looks at a weight or bias is about to resize it, or to have it computed.

    Called by the property that shows it: the tools look before they find that nothing of that name is a parameter.
    """
    if torch.compiler.is_compiling():
        return
    frame = sys._getframe(2)
    module, function = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
    if function in _RESIZERS and module.startswith("transformers."):
        raise UnsupportedError(
            "resize_token_embeddings of transformers makes rows of floats, and this table or head holds codes: call "
            "pyquant.dequantize_(model) first, resize, quantise again; or quantise without embeddings=True, heads=True"
        )
    if module in _COMPUTERS:
        _refuse_computing(module)


def refuse_parametrising() -> None:
    """Raise UnsupportedError where torch is about to register a parametrisation: called where it asks for those that
    there are."""
    if torch.compiler.is_compiling():
        return
    frame = sys._getframe(3)
    if frame is not None and frame.f_code.co_name == "register_parametrization":
        _refuse_computing("torch.nn.utils.parametrize")


def _refuse_computing(tool: str) -> None:
    raise UnsupportedError(
        f"{tool} would compute the tensors of a quantised layer from float parameters, and they are held as codes: use "
        "it on the float layer, and take it away again before quantize_ (parametrize.remove_parametrizations, "
        "prune.remove); or call pyquant.dequantize_(model) first"
    )


def before_hook(layer: Any) -> None:
    """What must be done before a hook of accelerate moves the tensors of a layer one by one: the layer is moved as a
    whole, so that its codes get the layout of the device; a hook that offloads, which would look for tensors by names
    that no state has, does that too. Called where accelerate keeps the layer's `forward`."""
    frame = sys._getframe(2)
    at_work = frame.f_code.co_name == "add_hook_to_module"
    if not at_work or not str(frame.f_globals.get("__name__", "")).startswith("accelerate."):
        return
    hook = frame.f_locals.get("hook")
    for one in getattr(hook, "hooks", (hook,)):
        _restore(layer)
        if getattr(one, "offload", False) is True:
            offload_whole(one, layer)
            continue
        device = getattr(one, "execution_device", None)
        if device is not None:
            layer.to(device)


def _restore(layer: Any) -> None:
    """Packs the codes of a layer again whose tensors were moved one by one already, by a hook of a block around it."""
    device = layer.storage.device
    if not layer._is_packed or layer.storage.is_meta or layer._linear_spec(device) == layer._spec:
        return
    if layer._linear_spec(_HOME) != layer._spec:
        raise UnsupportedError(
            f"the tensors of a quantised layer were moved to {device} one by one, in the layout of another GPU: move "
            "the model with model.to(...) before it is dispatched"
        )
    held = {name: tensor for name, tensor in layer._buffers.items() if tensor is not None}
    layer._buffers.update({name: tensor.to(_HOME) for name, tensor in held.items()})
    layer._fill({name: tensor.to(device) for name, tensor in layer._state().items()})
