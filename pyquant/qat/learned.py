"""Learned ranges (LSQ): the scale is a parameter that training moves; per tensor, per channel and per group alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from pyquant.errors import ArgumentError
from pyquant.qat.first_derivatives import once_only
from pyquant.qat.kept import Kept, can_keep
from pyquant.qat.weight import Rounded, copied, rounded_into
from pyquant.simulate.fake_quantize import FLOOR_KEY, FakeQuantize, How

if TYPE_CHECKING:
    from typing_extensions import Self

_ops = torch.ops.pyquant

# A learned scale is at least this share of the one that it started with (calibrated): one step that was too
# large would otherwise take it to zero or below, where every number is clipped and the layer gives its bias.
FLOOR: Final = 1 / 16


class LearnedFakeQuantize(FakeQuantize):
    """FakeQuantize whose `scale` is a parameter (float32, whatever the model is cast to).

    The gradient of the scale is that of Learned Step Size Quantization, times 1 / sqrt(n * qmax), n the number of
    elements that share the scale (of inputs: in one sample, that is without the first dimension), so that scales and
    weights move at like rates. Zero points of affine schemes stay where they are. A scale is positive: it does not fall
    below 1/16 of the one that it started with, its `floor`; forward puts it back there.

    Made by prepare_qat_(..., learn_amax=...). State dict: `scale` and `zero_point`, as FakeQuantize has them, and
    `floor`, which a FakeQuantize leaves out when it loads. From a state without it learning starts anew at its scale.
    Raises ArgumentError in forward where no range was ever calibrated, or the scale is not float32.
    Source: Esser et al. 2020, arXiv:1902.08153; docs/numerics.md 10.4.
    """

    scale: Tensor
    floor: Tensor

    @classmethod
    def of(cls, fake: FakeQuantize, weight: Tensor | None = None) -> Self:
        """The same fake quantiser with a learned scale, which begins where its range is now.

        weight  the tensor that it quantises, where that is a weight: a range that follows its data begins there.
        """
        if fake.follows:
            if weight is None:
                raise ArgumentError("learn_amax", f"a dynamic tensor ({fake.scheme})", "static tensors and weights")
            scale, zero_point = fake.qparams(weight)
        else:
            scale, zero_point = fake.scale.detach().clone(), fake.zero_point
        twin = copied(fake, cls)
        twin.follows = False
        twin._buffers = {name: t for name, t in twin._buffers.items() if name not in ("scale", "zero_point")}
        twin.register_parameter("scale", nn.Parameter(scale))
        twin.register_buffer("zero_point", zero_point)
        twin._non_persistent_buffers_set = set(twin._non_persistent_buffers_set)
        twin.register_buffer("floor", scale * FLOOR)
        twin._is_known = bool(scale.isfinite().all())
        twin._kept = None if weight is None else Kept()
        return twin

    _kept: Kept[Rounded] | None

    @property
    def positive_scale(self) -> Tensor:
        """The scale in use, detached: float32, at least `floor`."""
        return torch.maximum(self.scale.detach(), self.floor)

    @torch.no_grad()
    def set_qparams(self, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """Take a scale (float32, finite, > 0), from which learning starts, and a zero point (int32)."""
        super().set_qparams(scale, zero_point)
        self.floor.copy_(self.scale * FLOOR)

    def parameter(self) -> Tensor:
        """The scale as the parameter of this step: float32 (ArgumentError otherwise), put back to its floor."""
        if self.scale.dtype != torch.float32:
            allowed = "float32: leave scales out of mixed-precision policies (docs/qat.md 7)"
            raise ArgumentError("scale", self.scale.dtype, allowed)
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._put_back()
        return self.scale

    def _put_back(self) -> None:
        """Move the parameter itself to its floor, so that the next step starts there and not far below."""
        if type(self.scale) is nn.Parameter and not self.scale.is_inference():
            torch.maximum(self.scale.data, self.floor, out=self.scale.data)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self._put_back()
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        key, scale = prefix + FLOOR_KEY, state_dict.get(prefix + "scale")
        if key not in state_dict and isinstance(scale, Tensor):
            floor = scale.detach() * FLOOR
            is_like = floor.shape == self.floor.shape and not self.floor.is_meta
            state_dict[key] = torch.where(floor > 0, floor, self.floor.to(floor)) if is_like else floor
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def qparams(self, x: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Scale and zero point (None: symmetric) that forward uses."""
        self.check_calibrated()
        return self.positive_scale, self.zero_point

    def _static(self, x: Tensor) -> Tensor:
        scale = self.parameter()
        y, how = None, self.how
        if self._kept is not None and can_keep(x) and can_keep(self.scale):
            y = self._kept.get(
                lambda old: rounded_into(old, x, self.positive_scale, self.zero_point, how), x, self.scale
            ).y
            if not torch.is_grad_enabled():
                return y.detach()
        learned: Tensor = _LearnedStep.apply(  # type: ignore[no-untyped-call]
            x, scale, self.floor, self.zero_point, how, self.gradient_scale(x), y, self._after_backward
        )
        return learned

    def gradient_scale(self, x: Tensor) -> float:
        """1 / sqrt(n * qmax) for the tensor x; see the class."""
        if self._kept is not None:  # a weight
            n = x.numel() // max(self.scale.numel(), 1)
        else:
            n = x[0].numel() if x.dim() > 1 and x.shape[0] > 0 else x.numel()
        return 1.0 / math.sqrt(max(n, 1) * self.scheme.code_range[1])

    def _after_backward(self) -> None:
        if self._kept is not None:
            self._kept.after_backward()


class _LearnedStep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        floor: Tensor,
        zero_point: Tensor | None,
        how: How,
        factor: float,
        y: Tensor | None,
        after: Callable[[], None],
    ) -> Tensor:
        positive = torch.maximum(scale.detach(), floor)
        ctx.save_for_backward(x, positive, zero_point)
        ctx.how, ctx.factor, ctx.after = how, factor, after
        rounded: Tensor = _ops.fake_quantize(x, positive, zero_point, *how)[0] if y is None else y.detach()
        return rounded

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.compiler.is_compiling():
            ctx.after()
        x, positive, zero_point = ctx.saved_tensors
        grad_x, grad_scale = _ops.fake_quantize_lsq_backward(grad, x, positive, zero_point, *ctx.how)
        return once_only((grad_x, grad_scale * ctx.factor, *(None,) * 6))
