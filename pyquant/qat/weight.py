"""Fake quantisation of weights for training: into reused buffers, and again only after the weight has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from pyquant.core.granularity import scale_shape
from pyquant.qat.kept import Kept, can_keep
from pyquant.simulate import torch_operators
from pyquant.simulate.fake_quantize import FakeQuantize, How

if TYPE_CHECKING:
    from typing_extensions import Self

_ops = torch.ops.pyquant


class Rounded(NamedTuple):
    """A rounded weight: y like the weight; mask of what was not clipped, None where nothing can be."""

    y: Tensor
    mask: Tensor | None
    scale: Tensor | None = None  # scratch of ranges that follow their data
    zero_point: Tensor | None = None

    def fits(self, weight: Tensor) -> bool:
        """Whether the buffers can take another result for `weight`."""
        return self.y.shape == weight.shape and self.y.dtype == weight.dtype and self.y.device == weight.device


class WeightFakeQuantize(FakeQuantize):
    """FakeQuantize for a weight in training: the same numbers, computed once per change of the weight; by
    prepare_qat_.

    The result is a buffer that the next one overwrites (a fresh one of the size of a large weight costs more than
    the arithmetic); autograd raises where a graph of an older weight is run backward then. A range that follows its
    data clips nothing; a calibrated one keeps a bit for each element. Under torch.compile and in inference mode it
    is the plain FakeQuantize. Source: docs/numerics.md 10; docs/qat.md."""

    @classmethod
    def of(cls, fake: FakeQuantize) -> Self:
        """The same fake quantiser, in this class; ranges are shared."""
        twin = copied(fake, cls)
        twin._kept = Kept()
        return twin

    _kept: Kept[Rounded]

    def forward(self, x: Tensor) -> Tensor:
        """x float [N, K] -> the same shape and type, valid until the weight changes and forward runs again."""
        if self.mode != "quantize" or torch_operators.are_chosen() or not can_keep(x):
            return super().forward(x)
        if self.follows:
            rounded = self._kept.get(lambda old: self._follow(x, old), x)
        else:
            self.check_calibrated()
            zero_points = () if self.zero_point is None else (self.zero_point,)
            ranges = (self.scale, self.zero_point, self.how)
            rounded = self._kept.get(lambda old: rounded_into(old, x, *ranges), x, self.scale, *zero_points)
        if x.requires_grad and torch.is_grad_enabled():
            y: Tensor = _StraightThrough.apply(x, rounded.y, rounded.mask, self._kept)  # type: ignore[no-untyped-call]
            return y
        return rounded.y.detach()

    def _follow(self, x: Tensor, old: Rounded | None) -> Rounded:
        s = self.scheme
        if old is None or old.scale is None or not old.fits(x):
            shape = scale_shape(s.granularity, x.shape, s.group_size or 0)
            scale = torch.empty(shape, dtype=torch.float32, device=x.device)
            old = Rounded(torch.empty_like(x), None, scale, torch.empty_like(scale, dtype=torch.int32))
        how = (s.granularity, s.group_size or 0, s.symmetric, *s.code_range)
        _ops.fake_quantize_dynamic_out(x.detach(), *how, old.y, old.scale, old.zero_point)
        return old


def rounded_into(old: Rounded | None, x: Tensor, scale: Tensor, zero_point: Tensor | None, how: How) -> Rounded:
    """x rounded by a range of its own, into the buffers of an older result where they fit."""
    if old is None or old.mask is None or not old.fits(x):
        mask = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device)
        old = Rounded(torch.empty_like(x), mask)
    _ops.fake_quantize_out(x.detach(), scale, zero_point, *how, old.y, old.mask)
    return old


class _StraightThrough(torch.autograd.Function):
    """The kept result in the place of the weight; its gradient is the weight's, where it was not clipped."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, y: Tensor, mask: Tensor | None, kept: Kept[Rounded]) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.kept = kept
        return y.detach()  # shares the version of the buffer, so that autograd sees it overwritten

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.kept.after_backward()
        (mask,) = ctx.saved_tensors
        return (grad if mask is None else _ops.fake_quantize_backward(grad, mask)), None, None, None


def copied(module: nn.Module, cls: type) -> Any:
    """A module of another class with the same state: parameters, buffers, children and hooks are shared."""
    twin: Any = object.__new__(cls)
    twin.__dict__.update(module.__dict__)
    for held in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[held] = dict(module.__dict__[held])
    return twin
