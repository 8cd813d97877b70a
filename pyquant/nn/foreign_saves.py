"""Other libraries' savers are refused: they would write integer codes under the names of float weights.

Such a file loads without an error, as a model of garbage; and so does that of a layer whose inputs are transformed
first. A saver asks every layer for its state, so such layers look at who is asking. Who asks is found in the call
stack: it needs none of these libraries, works for a layer inside of any wrapper, and leaves nothing in the model that a
copy or a pickle would have to carry. The other way round, codes of a state_dict refuse to be loaded into float layers.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from pyquant.errors import UnsupportedError
from pyquant.ops import values

# library -> its functions that write a state which is read back as float weights, or that prepare it for such a writer.
# What resumes a run of the same code (accelerate's save_state) and what writes adapters alone (peft) is not among them.
_SAVERS: Final[dict[str, frozenset[str]]] = {
    "transformers": frozenset({"save_pretrained", "_save"}),
    "diffusers": frozenset({"save_pretrained"}),
    "sentence_transformers": frozenset({"save_pretrained", "save", "save_torch_weights"}),
    "huggingface_hub": frozenset({"save_pretrained", "_save_pretrained", "save_torch_model"}),
    "accelerate": frozenset({"save_model", "get_state_dict"}),
    "safetensors": frozenset(),  # its save_model loads strictly; here only as a step of the others
}
_RESUMERS: Final = frozenset({"save_state"})


class _Saving(threading.local):
    leaves_codes_out = False


_saving = _Saving()


@contextmanager
def without_codes() -> Iterator[None]:
    """Inside, in this thread, layers that hold codes add nothing to a state_dict; others go on meanwhile."""
    before, _saving.leaves_codes_out = _saving.leaves_codes_out, True
    try:
        yield
    finally:
        _saving.leaves_codes_out = before


def are_left_out() -> bool:
    """Whether a layer is asked for its state within `without_codes`."""
    return _saving.leaves_codes_out


CODES: Final = "the integer codes of layer '{}' as if they were its float weights"
TURNED: Final = "layer '{}' without what is done to its inputs, under names that its class does not have"


def refuse(prefix: str, what: str = CODES) -> None:
    """Raise UnsupportedError where another library's saver asks for the state of a layer that only pyquant can read
    back. what: CODES or TURNED."""
    saver = None if torch.compiler.is_compiling() else _saver()
    if saver is not None:
        library, function = saver
        raise UnsupportedError(
            f"{function} of {library} would write {what.format(prefix.removesuffix('.'))}; call "
            "pyquant.save_pretrained(model, directory) instead (model: the module that was quantised), or "
            "pyquant.dequantize_(model) first"
        )


class Codes(Tensor):
    """Integer codes in a state_dict: an ordinary tensor, except that load_state_dict of a float layer refuses it.

    nn.Linear.load_state_dict(state, strict=False) would copy the codes into the float weight. Results of operations and
    pickles are plain tensors.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_load = func is Tensor.copy_ and sys._getframe(1).f_code.co_name == "_load_from_state_dict"
        if is_load and args[0].is_floating_point():
            raise UnsupportedError(
                "integer codes of a quantised layer for the weight of a float layer: quantise this model first "
                "(quantize_, load_pretrained), or call pyquant.dequantize_ on the one whose state_dict this is"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Codes:
        return self.as_subclass(Tensor).clone().as_subclass(Codes)


def as_codes(tensor: Tensor) -> Tensor:
    """The tensor as Codes where it holds codes: integers of 8 bits, and no tensor of a tracer or transform."""
    is_codes = type(tensor) is Tensor and tensor.dtype in (torch.int8, torch.uint8) and not values.is_batch(tensor)
    return tensor.as_subclass(Codes) if is_codes and not torch.compiler.is_compiling() else tensor


def _saver() -> tuple[str, str] | None:
    """(library, function) of the saver at work, or None.

    Only the frames next to the layer count, up to the first that is neither torch's nor such a library's: a saver of
    pyquant, or a user's own torch.save, may well be called from within another library's.
    """
    frame = sys._getframe(2)
    callers: list[tuple[str, str]] = []
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        function = frame.f_code.co_name
        is_passage = package == "torch" or function in ("state_dict", "_save_to_state_dict")
        if not is_passage and package not in _SAVERS:
            break
        if not is_passage:
            callers.append((package, function))
        if frame.f_back is None:
            break
        frame = frame.f_back
    if any(function in _RESUMERS for _, function in callers):
        return None
    return next((one for one in reversed(callers) if one[1] in _SAVERS[one[0]]), None)
