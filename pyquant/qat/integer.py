"""The training forward in integers: codes times codes on the deployed kernels, straight-through gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pyquant.core.scheme import QScheme
from pyquant.ops.autograd import rows_of
from pyquant.qat.first_derivatives import once_only
from pyquant.qat.kept import Kept, can_keep
from pyquant.qat.learned import LearnedFakeQuantize
from pyquant.qat.weight import copied
from pyquant.simulate import torch_operators
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.linear import FakeQuantLinear

if TYPE_CHECKING:
    from typing_extensions import Self

_ops = torch.ops.pyquant


def why_not_integer(scheme: QScheme) -> str | None:
    """Why a scheme's simulation is another function than an integer product, or None."""
    if scheme.inputs is None:
        return "its activations stay in floating point (weight-only), so there is no integer product"
    if scheme.inputs.bits > 8:
        return "its inputs have int16 codes, and integer products have codes of a byte"
    if scheme.weights.granularity == "per_group":
        where = f"along in_features (group_size={scheme.weights.group_size})"
        if scheme.weights.two_level:
            return f"its weights have steps that change {where}, and the integer forward has one scale a channel"
        return f"its weight scales change {where}: the sum is no integer sum, and its simulation adds in another order"
    return None


class Operand(NamedTuple):
    """Codes of one operand: q int8; scale float32 and zero_point int32 (None: 0); mask of what was not clipped."""

    q: Tensor
    scale: Tensor
    zero_point: Tensor | None
    mask: Tensor | None


class IntegerForwardLinear(FakeQuantLinear):
    """FakeQuantLinear whose product runs in integers, as that of the deployed layer does, bit for bit; by
    prepare_qat_.

    The product of the codes is exact, and scales and bias follow in the order of docs/numerics.md 5: in float32 it
    is the simulation without the rounding of its sums; under autocast, where the simulation rounds scale * code to
    16 bits before it multiplies, it is what the simulation means. Backward is that of the simulation, from int8
    codes and one bit for each element (a learned input range needs the float input besides). Source: docs/qat.md 4."""

    _kept: Kept[Operand]

    @classmethod
    def of(cls, layer: FakeQuantLinear) -> Self:
        """The same layer with the integer product; everything is shared."""
        twin = copied(layer, cls)
        twin._kept = Kept()
        return twin

    def forward(self, input: Tensor) -> Tensor:
        """input float [..., in_features] -> float [..., out_features] (under autocast: of its type)."""
        x = input
        inputs, weights = self.input_fake_quant, self.weight_fake_quant
        if inputs is None or inputs.mode != "quantize" or weights.mode != "quantize" or torch_operators.are_chosen():
            return super().forward(x)  # calibration, a quantiser that is switched off, or an export of the simulation
        if x.dim() == 1:
            y: Tensor = self.forward(x.unsqueeze(0)).squeeze(0)
            return y
        fakes = (inputs, weights)
        learned = [fake.parameter() if isinstance(fake, LearnedFakeQuantize) else None for fake in fakes]
        kind = x.device.type
        out_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        x_op, w_op = _input_operand(inputs, x), self._weight_operand()
        factors = [
            fake.gradient_scale(t) if isinstance(fake, LearnedFakeQuantize) else 1.0
            for fake, t in zip(fakes, (x, self.weight))
        ]
        ranges = (inputs.scheme.code_range, weights.scheme.code_range)
        y = _IntegerProduct.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, *learned, *x_op, *w_op, out_dtype, factors, ranges, self._kept
        )
        return y if self.output_fake_quant is None else self.output_fake_quant(y)

    def _weight_operand(self) -> Operand:
        if not can_keep(self.weight):
            return self._weight_codes()
        ranges = () if self.weight_fake_quant.follows else (self.weight_fake_quant.scale,)
        return self._kept.get(lambda old: self._weight_codes(), self.weight, *ranges)

    def _weight_codes(self) -> Operand:
        fake, weight = self.weight_fake_quant, self.weight.detach()
        s = fake.scheme
        if fake.follows:
            q, scale, _ = _ops.quantize_dynamic(weight, s.granularity, 0, True, *s.code_range)
            codes = Operand(q, scale, None, None)
        else:
            codes = _static_operand(fake, weight, needs_mask=True)
        if s.granularity == "per_tensor":
            codes = codes._replace(scale=codes.scale.expand(self.out_features).contiguous())
        return codes


def _input_operand(fake: FakeQuantize, x: Tensor) -> Operand:
    if not fake.follows:
        codes = _static_operand(fake, x.detach(), needs_mask=x.requires_grad)
        # [] is one number for all rows, rounded once; [1] would mean one per row where there is one row
        zero_point = None if codes.zero_point is None else codes.zero_point.reshape(())
        return codes._replace(scale=codes.scale.reshape(()), zero_point=zero_point)
    s = fake.scheme
    q, scale, zero_point = _ops.quantize_dynamic(x.detach(), s.granularity, 0, s.symmetric, *s.code_range)
    return Operand(q, scale, None if s.symmetric else zero_point, None)


def _static_operand(fake: FakeQuantize, data: Tensor, needs_mask: bool) -> Operand:
    scale, zero_point = fake.qparams()
    how = (scale, zero_point, *fake.how)  # group size 0: why_not_integer refuses groups
    q = _ops.quantize(data, *how)
    # The mask is one bit that the codes do not tell: whether the largest code is a clipped number.
    needs_mask = needs_mask and not isinstance(fake, LearnedFakeQuantize)
    return Operand(q, scale, zero_point, _ops.fake_quantize(data, *how)[1] if needs_mask else None)


class _IntegerProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        x_learned: Tensor | None,
        w_learned: Tensor | None,
        qx: Tensor,
        x_scale: Tensor,
        x_zero: Tensor | None,
        x_mask: Tensor | None,
        qw: Tensor,
        w_scale: Tensor,
        w_zero: Tensor | None,
        w_mask: Tensor | None,
        out_dtype: torch.dtype,
        factors: list[float],
        ranges: tuple[tuple[int, int], tuple[int, int]],
        kept: Kept[Operand],
    ) -> Tensor:
        kept_x = None if x_learned is None else x
        kept_w = None if w_learned is None else weight
        ctx.save_for_backward(qx, x_scale, x_zero, x_mask, qw, w_scale, w_mask, kept_x, kept_w)
        ctx.types = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.shapes = [None if learned is None else learned.shape for learned in (x_learned, w_learned)]
        ctx.factors, ctx.ranges, ctx.kept = factors, ranges, kept
        float_bias = None if bias is None else bias.detach().to(torch.float32)
        y: Tensor = _ops.gemm_s8s8(
            qx, qw, w_scale, x_scale, x_zero, float_bias, None, None, None, 0, "none", 0.0, 0.0, -127, 127, out_dtype
        )
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.compiler.is_compiling():
            ctx.kept.after_backward()
        qx, x_scale, x_zero, x_mask, qw, w_scale, w_mask, x, weight = ctx.saved_tensors
        x_dtype, w_dtype, bias_dtype = ctx.types
        x_range, w_range = ctx.ranges
        grad_x = grad_w = grad_b = grad_x_scale = grad_w_scale = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[3]:
            real_w = _ops.dequantize(qw, w_scale, None, "per_channel", 0, grad.dtype)
            grad_x = (grad @ real_w).to(x_dtype)
            if x is not None:
                how = ("per_tensor", 0, *x_range)
                grad_x, grad_x_scale = _ops.fake_quantize_lsq_backward(grad_x, x, x_scale, x_zero, *how)
                grad_x_scale = grad_x_scale.reshape(ctx.shapes[0]) * ctx.factors[0]
            elif x_mask is not None:
                grad_x = _ops.fake_quantize_backward(grad_x, x_mask)
        rows = rows_of(grad)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[4]:
            granularity = "per_tensor" if x_scale.dim() == 0 else "per_token"
            real_x = _ops.dequantize(qx, x_scale, x_zero, granularity, 0, grad.dtype)
            grad_w = (rows.t() @ rows_of(real_x)).to(w_dtype)
            if weight is not None:
                per_tensor = ctx.shapes[1].numel() == 1 and w_scale.numel() != 1
                how = ("per_tensor" if per_tensor else "per_channel", 0, *w_range)
                scale = w_scale[:1] if per_tensor else w_scale
                grad_w, grad_w_scale = _ops.fake_quantize_lsq_backward(grad_w, weight, scale, None, *how)
                grad_w_scale = grad_w_scale.reshape(ctx.shapes[1]) * ctx.factors[1]
            elif w_mask is not None:
                grad_w = _ops.fake_quantize_backward(grad_w, w_mask)
        if ctx.needs_input_grad[2]:
            grad_b = rows.sum(0, dtype=torch.float32).to(bias_dtype)
        return once_only((grad_x, grad_w, grad_b, grad_x_scale, grad_w_scale, *(None,) * 12))
