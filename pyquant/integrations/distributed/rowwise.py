"""A QLinear of which every rank holds columns of the weight: products of codes are added over the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.fx import Proxy
from torch.nn import functional as F

from pyquant import numerics, ops
from pyquant.core import arguments
from pyquant.core.dtypes import FLOATS, INT8, describe
from pyquant.core.qtensor import QTensor
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError
from pyquant.integrations.distributed.layer import SharedQLinear
from pyquant.integrations.distributed.layouts import Layouts, bounds, is_last
from pyquant.integrations.distributed.sums import share_of, summed, token_params
from pyquant.nn.kernel_info import KernelInfo
from pyquant.nn.linear_call import needs_derivative, operand_of, signed, unpacked
from pyquant.nn.linear_state import traced
from pyquant.nn.qlinear import QLinear
from pyquant.nn.straight_through import limits
from pyquant.numerics.epilogue import finish, store
from pyquant.numerics.gemm import is_per_token
from pyquant.ops.autograd import activation_gradient
from pyquant.ops.transforms import autocast

INTEGER: Final = "int32 sums, exact"
FLOAT: Final = "float32 sums, in no fixed order"
_ops = torch.ops.pyquant
_qlinear = torch.ops.pyquant.qlinear.default


class RowwiseQLinear(SharedQLinear):
    """A QLinear that holds some of the columns of the weight: sums over the ranks, then the epilogue, once.

    On a CPU the weights lie packed, as those of a whole layer: qlinear quantises or takes codes and stops at the
    accumulators, and goes on from their sums.
    """

    _products: tuple[Tensor, Tensor] | None = None  # of two-level scales: codes times steps, and the base of each row
    _is_product_packed = False

    @classmethod
    def placements(cls, layer: QLinear) -> dict[str, int]:
        cut_along = {layer._weight_name}
        if not layer.scheme.is_float and layer.scheme.weights.group_size is not None:
            cut_along |= {"weight_scale", "weight_zero_point"}
        return {name: 1 for name in layer.state_slots if name in cut_along}

    @classmethod
    def sizes(cls, layer: QLinear, layouts: Layouts) -> tuple[int, int]:
        begin, end = bounds(layer.in_features, layouts.world, layouts.rank)
        return layer.out_features, end - begin

    @classmethod
    def described(cls, layer: QLinear, layouts: Layouts) -> str:
        begin, end = bounds(layer.in_features, layouts.world, layouts.rank)
        sums = INTEGER if sums_are_exact(layer.scheme) else FLOAT
        return f"inputs {begin} to {end} of {layer.in_features}, rowwise over {layouts.world} ranks: {sums}"

    def _fill(self, tensors: Mapping[str, Tensor], *, in_place: bool = False, waits: bool = False) -> None:
        weight, is_two_level = tensors.get(self._weight_name), self.scheme.is_integer and self.scheme.weights.two_level
        is_on_cpu = weight is not None and weight.device.type == "cpu"
        self.packs = is_on_cpu and not is_two_level
        super()._fill(tensors, in_place=in_place, waits=waits)
        self._products = None
        if is_two_level and not self.storage.is_meta:
            self._products = self._of_whole_rows()
            self._is_product_packed = is_on_cpu and self.missing is None
            if self._is_product_packed:
                numbers = self._packed_numbers(self._state())
                self._products = ops.pack_linear(*self._products, self._spec, *numbers), self._products[1]

    def _of_whole_rows(self) -> tuple[Tensor, Tensor]:
        """Codes times steps, and the base of each row, which is that of the whole row: what is a whole multiple of it
        on every rank may on one be that of a larger number."""
        w = self.scheme.weights
        whole = self._placed("weight_scale", self.weight_scale_).full_tensor()
        base, _ = numerics.split_scales(whole, numerics.largest_step(*w.code_range))
        step = torch.round(self.weight_scale_.double() / base.double()[:, None]).to(torch.int8)
        return self.codes * step.repeat_interleave(w.group_size or 1, 1), base

    def _linear_spec(self, device: torch.device) -> tuple[int, ...]:
        spec = super()._linear_spec(device)
        if not spec or sums_are_exact(self.scheme):
            return spec
        # The groups' sums alone: scales of rows, bias and what follows come after the sums of the ranks.
        whole = ops.LinearSpec.from_ints(spec)
        alone = replace(whole, input="dynamic", activation="none", clamp_min=0.0, clamp_max=0.0)
        return replace(alone, has_bias=False, codes_out=False).to_ints()

    def _packed_numbers(self, held: Mapping[str, Tensor]) -> tuple[Tensor | None, ...]:
        numbers = super()._packed_numbers(held)
        return numbers if sums_are_exact(self.scheme) else (None,) * len(numbers)

    def forward(self, x: Any = None, residual: Tensor | None = None, *, input: Any = None) -> Any:
        """The layer.

        x         [..., inputs of this rank], in the layout of input_layouts, or a DTensor; float, or codes of a QTensor
                  whose scales are those of whole rows.
        residual  in the layout of the result, added after the sum.
        ->        [..., out_features] in the layout of output_layouts.
        Every rank must call. Gradients flow to float x and residual, as through QLinear.
        """
        x = arguments.x_or_input(x, input)
        if isinstance(x, Proxy):
            return traced(self, x, residual)
        layouts = self._layouts
        local = layouts.enter(x, Shard(-1))
        self._check_ready(local, residual)
        lead = (local.data if isinstance(local, QTensor) else local).shape[:-1]
        whole = (*lead, self.out_features)
        if isinstance(local, Tensor) and needs_derivative(local, residual):
            if residual is not None:
                residual = layouts.everywhere(residual, whole)
            return layouts.leave(_Summed.apply(local, residual, self), Replicate(), whole)  # type: ignore[no-untyped-call]
        y = self._result(self._share(local, residual, layouts.outputs))
        return layouts.leave(y, layouts.outputs, whole)

    def _share(self, x: Tensor | QTensor, residual: Tensor | None, outputs: Placement) -> Tensor:
        """The products of all ranks' columns, summed, and the epilogue of what `outputs` gives this rank of them."""
        if isinstance(x, Tensor):
            x = autocast(x)
            self._check_operand(x, FLOATS)
        dtype = x.dtype if isinstance(x, Tensor) else self.dtype
        if not self.scheme.is_integer:
            t, bias = self._floats(x, outputs)
            return self._finished(t, bias, residual, dtype)
        data, x_scale, zero_point, per_token = self._codes_of(x)
        sums = summed(self._accumulators(data, x_scale, zero_point, per_token), self._layouts, outputs)
        if per_token and not is_last(outputs, data.dim()):
            x_scale = share_of(x_scale, self._layouts, outputs, data.dim())
        if self._ends_in_op(outputs, data.dim(), per_token):
            self._check_residual(residual, sums)
            of_codes = torch.int8 if self._gives_codes else dtype
            return cast(
                Tensor, _qlinear(sums, self._operand, residual, self._spec, of_codes, x_scale if per_token else None)
            )
        t, bias = self._scaled(sums, x_scale, per_token, outputs)
        return self._finished(t, bias, residual, dtype)

    def _ends_in_op(self, outputs: Placement, dims: int, per_token: bool) -> bool:
        """Whether the packed weights' own epilogue follows: of all columns, and under the scales that it knows."""
        is_known = per_token is not self.scheme.is_static
        return self._operand is not None and sums_are_exact(self.scheme) and is_known and not is_last(outputs, dims)

    def _check_residual(self, residual: Tensor | None, t: Tensor) -> None:
        if residual is not None and (residual.shape != t.shape or residual.dtype not in FLOATS):
            raise ArgumentError("residual", describe(residual), f"float {list(t.shape)}, in the layout of the result")

    def _finished(self, t: Tensor, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        self._check_residual(residual, t)
        low, high = self.clamp
        t = finish(t, bias=bias, residual=residual, activation=self.activation, clamp_min=low, clamp_max=high)
        if not self._gives_codes:
            return store(t, dtype)
        qmin, qmax = self._output_range()
        scale, zero_point = self.output_scale_, self.output_zero_point_
        return store(t, torch.int8, out_scale=scale, out_zero_point=zero_point, out_qmin=qmin, out_qmax=qmax)

    def _floats(self, x: Tensor | QTensor, outputs: Placement) -> tuple[Tensor, Tensor | None]:
        """The sums of a layer whose inputs are in floating point, and the bias of their columns."""
        if isinstance(x, QTensor):
            raise ArgumentError("x", "a QTensor", f"a float tensor: scheme {self.scheme} does not take codes")
        if self.scheme.is_float:
            part = _ops.float_linear.default(operand_of(self.storage, x), self.storage, out_dtype=torch.float32)
        else:
            w, zero_point = self.scheme.weights, self.weight_zero_point_
            how = {"w_bits": w.bits, "group_size": w.group_size or 0, "out_dtype": torch.float32}
            part = _ops.weight_only_linear.default(x, self.storage, self.weight_scale_, zero_point, **how)
        return summed(part, self._layouts, outputs), self._of_columns(self.bias_, part.dim(), outputs)

    def _scaled(
        self, sums: Tensor, x_scale: Tensor, per_token: bool, outputs: Placement
    ) -> tuple[Tensor, Tensor | None]:
        """float32: the sums times their scales, in the order of docs/numerics.md 4, and the bias of their columns."""
        t, dims = sums.to(torch.float32), sums.dim()
        rows = x_scale.unsqueeze(-1) if per_token else x_scale.reshape(())
        bias = self._of_columns(self.bias_, dims, outputs)
        if not sums_are_exact(self.scheme):
            return t * rows, bias
        own = self.weight_scale_ if self._products is None else self._products[1]
        w_scale = self._of_columns(own, dims, outputs)
        return t * w_scale * rows if per_token else t * (rows * w_scale), bias

    def _codes_of(self, x: Tensor | QTensor) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        """int8 codes of this rank's columns (or floats that qlinear itself quantises, by a static scale), the scale and
        zero point that all ranks have, and whether by token."""
        inputs = cast(TensorScheme, self.scheme.inputs)
        if isinstance(x, QTensor):
            x = unpacked(x)
            self._check_codes(x)
            data, zero_point = signed(x)
            if self.scheme.is_static:
                self._check_linked(x, zero_point)
            return data, x.scale, zero_point, not self.scheme.is_static and is_per_token(x.scale, data)
        if self.scheme.is_static:
            scale, zero_point = cast(Tensor, self.input_scale_), self.input_zero_point_
            if self._operand is not None and sums_are_exact(self.scheme):
                return x, scale, zero_point, False
            return ops.quantize(x, scale, zero_point, "per_tensor", 0, *inputs.code_range), scale, zero_point, False
        scale, zero_point = token_params(x, inputs, self._layouts.group)
        codes = _ops.quantize.default(x.detach(), scale, zero_point, "per_token", 0, *inputs.code_range)
        return codes, scale, zero_point, True

    @property
    def _operand(self) -> Tensor | None:
        """The packed weights of this rank, as qlinear reads them; None: they are not packed."""
        if self._products is not None:
            return self._products[0] if self._is_product_packed else None
        return self.storage if self._is_packed else None

    def _accumulators(self, data: Tensor, x_scale: Tensor, zero_point: Tensor | None, per_token: bool) -> Tensor:
        """int32 [..., N]: what these columns add to the accumulators, their part of the zero-point term included. With
        group scales float32: the groups of this rank in ascending order, times their scales."""
        inputs, packed = cast(TensorScheme, self.scheme.inputs), self._operand
        is_exact, lead = sums_are_exact(self.scheme), data.shape[:-1]
        if packed is None or (zero_point is not None and inputs.symmetric):
            return self._plain_accumulators(data, zero_point)
        if is_exact and self.scheme.is_static:
            return cast(Tensor, _qlinear(data, packed, None, self._spec, torch.int32))
        if zero_point is not None and zero_point.shape != lead:
            zero_point = zero_point.reshape(()).expand(lead)
        if not (is_exact and per_token):  # scales that follow later, or are none of the accumulators'
            x_scale = torch.ones(lead, dtype=torch.float32, device=data.device)
        of = torch.int32 if is_exact else torch.float32
        return cast(Tensor, _qlinear(data, packed, None, self._spec, of, x_scale, zero_point))

    def _plain_accumulators(self, data: Tensor, zero_point: Tensor | None) -> Tensor:
        """The same of weights that are not packed for qlinear, or not for such codes."""
        codes, scale = self._canonical(), self.weight_scale_
        if self._products is not None:
            codes, scale = self._products
            codes = ops.unpack_linear(codes, self._spec) if self._is_product_packed else codes
        w_type = self.scheme.weights.product_type
        x_type = INT8 if w_type is INT8 else cast(TensorScheme, self.scheme.inputs).code_type
        gemm = getattr(_ops, f"gemm_{x_type.native_name}{w_type.native_name}").default
        how: dict[str, Any] = {"x_zero_point": zero_point, "out_dtype": torch.int32}
        if not sums_are_exact(self.scheme):
            how |= {"w_scale": scale, "group_size": self.scheme.weights.group_size, "out_dtype": torch.float32}
        return cast(Tensor, gemm(data, codes, **how))

    def _of_columns(self, vector: Tensor | None, dims: int, outputs: Placement) -> Any:
        """Of a number for each output those of the columns that this rank gives."""
        if vector is None or not is_last(outputs, dims):
            return vector
        return share_of(vector, self._layouts, Shard(0), 1)

    def kernel_info(self, M: int = 1) -> KernelInfo:
        """What multiplies this rank's columns, and how the ranks' products are added."""
        arguments.whole("M", M, 0)
        device, exact = str(self.storage.device), sums_are_exact(self.scheme)
        kernel = "gemm of plain codes" if self.scheme.is_integer else "the product of floating-point inputs"
        kernel = kernel if self._operand is None else "qlinear of packed codes"
        return KernelInfo(
            kernel, device, exact, f"rowwise over {self._layouts.world} ranks: {INTEGER if exact else FLOAT}"
        )


class _Summed(torch.autograd.Function):
    """The gradient of a rowwise layer: straight through the rounding, as of a QLinear, for this rank's columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, layer: RowwiseQLinear) -> Tensor:
        ctx.layer, ctx.residual_dtype = layer, None if residual is None else residual.dtype
        ctx.save_for_backward(x)
        return layer._share(x, residual, Replicate())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,), layer = ctx.saved_tensors, ctx.layer
        weight, g = layer._real(torch.float32), grad.float()
        if layer.activation != "none":
            before = summed(F.linear(x.float(), weight), layer._layouts, Replicate())
            before = before if layer.bias_ is None else before + layer.bias_
            g = activation_gradient(before, g, layer.activation, *layer.clamp)
        back, (low, high) = g @ weight, limits(layer)
        if low is not None and high is not None:
            back = back * ((x.float() >= low) & (x.float() <= high))
        return back.to(x.dtype), None if ctx.residual_dtype is None else grad.to(ctx.residual_dtype), None


def sums_are_exact(scheme: QScheme) -> bool:
    """Whether the ranks' products of a rowwise layer are integers under one scale a row, so that any order of adding
    them gives the bits of one rank.

    Example:
        >>> from pyquant import W4A8Dynamic, W8A8Dynamic
        >>> sums_are_exact(W8A8Dynamic()), sums_are_exact(W4A8Dynamic(group_size=32))
        (True, False)
    """
    w = scheme.weights
    return scheme.is_integer and (w.group_size is None or w.two_level)
