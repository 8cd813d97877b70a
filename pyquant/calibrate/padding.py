"""Which positions of a padded batch count: the one rule for all statistics, losses and reports.

A batch tells its padding by the masks that tokenizers return. `padding_of` finds them in a call of the model;
`left_out` says them to whatever observes while the model runs; `counted` is what an observer takes of a tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

MASK: Final = "attention_mask"
DECODER_MASK: Final = "decoder_attention_mask"
_DECODER_INPUTS: Final = ("decoder_input_ids", "decoder_inputs_embeds")


@dataclass(frozen=True)
class _Kept:
    """The positions of [batch, tokens] that are no padding: int64, counted row by row; None: it is not known."""

    shape: tuple[int, int]
    index: Tensor | None


@dataclass(frozen=True)
class Padding:
    """What one call of a model tells of its padding; without masks all positions count.

    slots  bool [rows], within a bank of experts: which of its rows, sorted by expert, are no padding.
    """

    masks: tuple[_Kept, ...] = ()
    slots: Tensor | None = None

    def routed(self, tokens: Tensor, total: int) -> Padding:
        """That of rows which a router takes of [total, channels]; tokens: int64 [rows], their numbers there."""
        index = _index_of([mask for mask in self.masks if mask.shape[0] * mask.shape[1] == total])
        if index is None:
            return NO_PADDING
        counts = torch.zeros(total, dtype=torch.bool, device=tokens.device)
        counts[index.to(tokens.device)] = True
        return Padding(slots=counts[tokens])

    def text(self) -> str:
        """What saved results are told apart by; '' where all positions count."""
        left = [(mask.shape, None if mask.index is None else mask.index.tolist()) for mask in self.masks]
        return repr(left) if left else ""

    def part(self, first: int, last: int) -> Padding:
        """That of the rows first <= i < last among those of a bank."""
        if self.slots is None:
            return NO_PADDING
        return Padding((_Kept((last - first, 1), self.slots[first:last].nonzero().flatten()),))


NO_PADDING: Final = Padding()
_now: ContextVar[Padding] = ContextVar("pyquant_padding", default=NO_PADDING)
_counts: ContextVar[bool] = ContextVar("pyquant_padding_counts", default=False)


def padding_of(named: Mapping[str, Any], has_decoder: bool = False) -> Padding:
    """The padding of a call, or of the batch that it is made of.

    named        tensors by name. A mask is a 2-D tensor [batch, tokens] of zeros and ones (bool, int or float) called
                 attention_mask or decoder_attention_mask, with a 0: padding. Others are no masks; nor is one of floats
                 that are all 0, which is what masks that are added look like.
    has_decoder  the model has a decoder beside its encoder: what has the shape of the decoder's inputs, or may have it
                 as these are not given, counts whole where the decoder's mask is not given too.
    """
    first, second = named.get(MASK), named.get(DECODER_MASK)
    masks = [_kept(first), _kept(second)]
    if _counts.get() or not any(mask is not None and mask.index is not None for mask in masks):
        return NO_PADDING
    found = [mask for mask in masks if mask is not None]
    if masks[1] is None and (has_decoder or any(name in named for name in _DECODER_INPUTS)):
        inputs = [value for name in _DECODER_INPUTS if isinstance(value := named.get(name), Tensor) and value.dim() > 1]
        shapes = [(x.shape[0], x.shape[1]) for x in inputs] or [mask.shape for mask in found]
        found += [_Kept(shape, None) for shape in shapes]
    elif masks[0] is None and second is not None:
        # nothing is known of the encoder, of which a batch of another length tells nothing wrong
        inputs = [x for name in ("input_ids", "inputs_embeds") if isinstance(x := named.get(name), Tensor)]
        found += [_Kept((x.shape[0], x.shape[1]), None) for x in inputs if x.dim() > 1]
    return Padding(tuple(found))


def has_decoder(model: nn.Module) -> bool:
    """Whether a module in the model is called with the inputs of a decoder beside those of an encoder."""
    return any(_takes_decoder_inputs(kind) for kind in {type(module) for module in model.modules()})


def _takes_decoder_inputs(kind: type[nn.Module]) -> bool:
    try:
        return _DECODER_INPUTS[0] in inspect.signature(kind.forward).parameters
    except (TypeError, ValueError, AttributeError):  # of compiled code, and of scripted classes
        return False


def _kept(mask: object) -> _Kept | None:
    """Of a mask that is one; its index is None where it leaves nothing out. None: it is no mask."""
    if not isinstance(mask, Tensor) or mask.is_nested or mask.dim() != 2 or mask.is_meta or mask.is_complex():
        return None
    is_one = mask == 1
    if mask.numel() == 0 or not bool((is_one | (mask == 0)).all()):
        return None
    shape, counts = (mask.shape[0], mask.shape[1]), is_one.flatten()
    if bool(counts.all()) or (mask.is_floating_point() and not bool(counts.any())):
        return _Kept(shape, None)
    return _Kept(shape, counts.nonzero().flatten())


@contextmanager
def left_out(padding: Padding) -> Iterator[None]:
    """Inside, in this thread, `counted` leaves this padding out, whatever was left out around it."""
    token = _now.set(padding)
    try:
        yield
    finally:
        _now.reset(token)


def now() -> Padding:
    """What is left out at this moment."""
    return _now.get()


def counted(x: Tensor) -> Tensor:
    """The rows of a tensor that are no padding, while the model runs a padded batch; else the very tensor.

    x   [batch, tokens, ...] or [batch * tokens, channels], as the batch's mask [batch, tokens] is: -> [rows, ...],
        perhaps none. Of any other shape, and where two masks fit and differ, x itself: it cannot be told.
    For the forward of a CalibrationTarget of your own: statistics.observe(counted(x)). Source: docs/calibration.md 4.

    Example:
        >>> counted(torch.ones(2, 3, 4)).shape  # nothing is running
        torch.Size([2, 3, 4])
    """
    masks = _now.get().masks
    if not masks or not isinstance(x, Tensor) or x.is_nested:
        return x
    index = _index_of([mask for mask in masks if _fits(x, mask.shape)])
    if index is None:
        return x
    rows = x if x.dim() == 2 else x.flatten(0, 1)
    return rows.index_select(0, index.to(x.device))


def _fits(x: Tensor, shape: tuple[int, int]) -> bool:
    # [batch, channels] is no mask's: a pooled result may have as many channels as there are tokens
    return x.shape[0] == shape[0] * shape[1] if x.dim() == 2 else x.dim() > 2 and x.shape[:2] == shape


def _index_of(masks: list[_Kept]) -> Tensor | None:
    """The positions that all these masks leave; None where there is no mask, or they differ."""
    found = [mask.index for mask in masks]
    known = [index for index in found if index is not None]
    if not known or len(known) < len(found):
        return None
    first, *others = known
    return first if all(torch.equal(other, first.to(other.device)) for other in others) else None


@contextmanager
def counting_padding() -> Iterator[None]:
    """Inside, in this thread, padded positions count as all others do, in whatever is given batches.

    Example:
        >>> with counting_padding():
        ...     padding_of({"attention_mask": torch.tensor([[1, 1, 0]])})
        Padding(masks=(), slots=None)
    """
    token = _counts.set(True)
    try:
        yield
    finally:
        _counts.reset(token)
