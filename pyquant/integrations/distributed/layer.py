"""QLinears of which every rank holds a share: rows of the weight (colwise), or columns of it (rowwise)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.fx import Proxy
from torch.nn import functional as F

from pyquant import numerics, ops
from pyquant.core import arguments
from pyquant.core.dtypes import FLOATS, INT8, describe
from pyquant.core.qtensor import QTensor
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.integrations.distributed.layouts import Layouts, bounds, is_last
from pyquant.integrations.distributed.state import Share, cut
from pyquant.integrations.distributed.sums import share_of, summed, token_params
from pyquant.nn.kernel_info import KernelInfo
from pyquant.nn.linear_call import needs_derivative, signed, unpacked
from pyquant.nn.linear_state import traced
from pyquant.nn.qlinear import QLinear
from pyquant.nn.straight_through import limits
from pyquant.numerics.epilogue import finish, store
from pyquant.numerics.gemm import is_per_token
from pyquant.ops.autograd import activation_gradient
from pyquant.ops.transforms import autocast

INTEGER: Final = "int32 sums, exact"
FLOAT: Final = "float32 sums, in no fixed order"
_OF_ROWS: Final = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "bias")  # a row for each output
_ops = torch.ops.pyquant


class SharedQLinear(Share, QLinear):
    """What both have in common."""

    _columns: int  # of the whole weight

    def to_float(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """Refused: a share is no layer of its own. gather_quantized_ makes whole layers of shares."""
        raise UnsupportedError(
            f"a float layer of {self.share}: call gather_quantized_ of pyquant.integrations.distributed first"
        )

    def reference(self, x: Tensor | QTensor, residual: Tensor | None = None) -> Any:
        """Refused: the specification knows whole layers. gather_quantized_ makes whole layers of shares."""
        raise UnsupportedError(f"the reference of {self.share}: gather_quantized_ makes the whole layer, which has one")

    def extra_repr(self) -> str:
        """The share in one line, as print(model) shows it."""
        return f"{super().extra_repr()}, {self.share}"

    @property
    def takes_tokens(self) -> bool:
        """Not past forward, which knows the layouts."""
        return False

    @classmethod
    def take(cls, layer: QLinear, layouts: Layouts, source: int | None) -> None:
        """Make a whole QLinear a share of itself, in place."""
        whole, placements = layer._state(), cls.placements(layer)
        parts, share = cut(whole, layouts, placements, source), cls.described(layer, layouts)
        rows, columns = cls.sizes(layer, layouts)
        layer.__class__ = cls
        layer._become(layouts, placements, whole, share)  # type: ignore[attr-defined, operator]
        layer.__dict__["_columns"] = layer.in_features
        redescribe(layer, columns, rows)
        layer._fill(parts)

    def gather(self) -> None:
        """Make the share the whole QLinear that it is of, in place; every rank must."""
        whole = self.whole_state()
        self.__class__ = QLinear  # type: ignore[assignment]
        columns = self.__dict__.pop("_columns")
        for name in ("_layouts", "_placements", "_whole_shapes", "share", "_products"):
            self.__dict__.pop(name, None)
        self.note = self.__dict__.pop("_note_before", self.note)
        redescribe(self, columns, whole[self._weight_name].shape[0])
        self._fill(whole)

    @classmethod
    def placements(cls, layer: QLinear) -> dict[str, int]:
        """Which tensors of the state are cut, and along which dimension."""
        raise NotImplementedError

    @classmethod
    def sizes(cls, layer: QLinear, layouts: Layouts) -> tuple[int, int]:
        """Rows and columns of the weight that this rank holds."""
        raise NotImplementedError

    @classmethod
    def described(cls, layer: QLinear, layouts: Layouts) -> str:
        """The share in words."""
        raise NotImplementedError


class ColwiseQLinear(SharedQLinear):
    """A QLinear that holds some of the rows of the weight, and gives some of the outputs: the bits of the whole one."""

    @classmethod
    def placements(cls, layer: QLinear) -> dict[str, int]:
        return {name: 0 for name in layer.state_slots if name in _OF_ROWS}

    @classmethod
    def sizes(cls, layer: QLinear, layouts: Layouts) -> tuple[int, int]:
        begin, end = bounds(layer.out_features, layouts.world, layouts.rank)
        return end - begin, layer.in_features

    @classmethod
    def described(cls, layer: QLinear, layouts: Layouts) -> str:
        begin, end = bounds(layer.out_features, layouts.world, layouts.rank)
        return f"outputs {begin} to {end} of {layer.out_features}, colwise over {layouts.world} ranks"

    def forward(self, x: Any, residual: Tensor | None = None) -> Any:
        """The layer.

        x         as QLinear takes it, in the layout of input_layouts, or a DTensor; a QTensor only where it is whole.
        residual  [..., outputs of this rank], where the result is left on the ranks.
        ->        the outputs of this rank, or what output_layouts and use_local_output make of all.
        """
        if isinstance(x, Proxy):
            return traced(self, x, residual)
        layouts = self._layouts
        if residual is not None and not (is_last(layouts.outputs, residual.dim()) and layouts.use_local_output):
            raise UnsupportedError(
                f"a residual of a colwise layer with output_layouts={layouts.outputs}; allowed: Shard(-1), local"
            )
        return self._leave(super().forward(layouts.enter(x, Replicate()), residual))

    def _leave(self, y: Any) -> Any:
        """The outputs of this rank under the layout that was asked for."""
        if isinstance(y, QTensor):
            return self._layouts.leave(y, Shard(y.data.dim() - 1), ())
        return self._layouts.leave(y, Shard(y.dim() - 1), (*y.shape[:-1], self._whole_shapes[self._weight_name][0]))


class RowwiseQLinear(SharedQLinear):
    """A QLinear that holds some of the columns of the weight: sums over the ranks, then the epilogue, once."""

    packs = False  # its products end in accumulators, which no packed layer gives
    _products: tuple[Tensor, Tensor] | None = None  # of two-level scales: codes times steps, and the base of each row

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
        super()._fill(tensors, in_place=in_place, waits=waits)
        w = self.scheme.weights
        self._products = None
        if self.scheme.is_float or not w.two_level or self.storage.is_meta:
            return
        # The base of the whole row: what is a whole multiple of it on every rank may on one be that of a larger number.
        whole = self._placed("weight_scale", self.weight_scale).full_tensor()
        base, _ = numerics.split_scales(whole, numerics.largest_step(*w.code_range))
        step = torch.round(self.weight_scale.double() / base.double()[:, None]).to(torch.int8)
        self._products = self.codes * step.repeat_interleave(w.group_size or 1, 1), base

    def forward(self, x: Any, residual: Tensor | None = None) -> Any:
        """The layer.

        x         [..., inputs of this rank], in the layout of input_layouts, or a DTensor; float, or codes of a QTensor
                  whose scales are those of whole rows.
        residual  in the layout of the result, added after the sum.
        ->        [..., out_features] in the layout of output_layouts.
        Every rank must call. Gradients flow to float x and residual, as through QLinear.
        """
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
        t, bias = self._integers(x, outputs) if self.scheme.is_integer else self._floats(x, outputs)
        if residual is not None and (residual.shape != t.shape or residual.dtype not in FLOATS):
            raise ArgumentError("residual", describe(residual), f"float {list(t.shape)}, in the layout of the result")
        low, high = self.clamp
        t = finish(t, bias=bias, residual=residual, activation=self.activation, clamp_min=low, clamp_max=high)
        if not self._gives_codes:
            return store(t, dtype)
        qmin, qmax = self._output_range()
        scale, zero_point = self.output_scale, self.output_zero_point
        return store(t, torch.int8, out_scale=scale, out_zero_point=zero_point, out_qmin=qmin, out_qmax=qmax)

    def _floats(self, x: Tensor | QTensor, outputs: Placement) -> tuple[Tensor, Tensor | None]:
        """The sums of a layer whose inputs are in floating point, and the bias of their columns."""
        if isinstance(x, QTensor):
            raise ArgumentError("x", "a QTensor", f"a float tensor: scheme {self.scheme} does not take codes")
        if self.scheme.is_float:
            part = _ops.float_linear.default(x.to(self.storage.dtype), self.storage, out_dtype=torch.float32)
        else:
            w, zero_point = self.scheme.weights, self.weight_zero_point
            how = {"w_bits": w.bits, "group_size": w.group_size or 0, "out_dtype": torch.float32}
            part = _ops.weight_only_linear.default(x, self.storage, self.weight_scale, zero_point, **how)
        return summed(part, self._layouts, outputs), self._of_columns(self.bias_, part.dim(), outputs)

    def _integers(self, x: Tensor | QTensor, outputs: Placement) -> tuple[Tensor, Tensor | None]:
        """float32: the sums times their scales, in the order of docs/numerics.md 4, and the bias of their columns."""
        data, x_scale, zero_point, per_token = self._codes_of(x)
        t = summed(self._accumulators(data, zero_point), self._layouts, outputs).to(torch.float32)
        dims = data.dim()
        if per_token:
            rows = x_scale if is_last(outputs, dims) else share_of(x_scale, self._layouts, outputs, dims)
            rows = rows.unsqueeze(-1)
        else:
            rows = x_scale.reshape(())
        bias = self._of_columns(self.bias_, dims, outputs)
        if not sums_are_exact(self.scheme):
            return t * rows, bias
        w_scale = self._of_columns(self._operands[1], dims, outputs)
        return t * w_scale * rows if per_token else t * (rows * w_scale), bias

    def _codes_of(self, x: Tensor | QTensor) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        """int8 codes of this rank's columns, the scale and zero point that all ranks have, and whether by token."""
        inputs = cast(TensorScheme, self.scheme.inputs)
        if isinstance(x, QTensor):
            x = unpacked(x)
            self._check_codes(x)
            data, zero_point = signed(x)
            if self.scheme.is_static:
                self._check_linked(x, zero_point)
            return data, x.scale, zero_point, not self.scheme.is_static and is_per_token(x.scale, data)
        if self.scheme.is_static:
            scale, zero_point = cast(Tensor, self.input_scale), self.input_zero_point
            return ops.quantize(x, scale, zero_point, "per_tensor", 0, *inputs.code_range), scale, zero_point, False
        scale, zero_point = token_params(x, inputs, self._layouts.group)
        codes = _ops.quantize.default(x.detach(), scale, zero_point, "per_token", 0, *inputs.code_range)
        return codes, scale, zero_point, True

    @property
    def _operands(self) -> tuple[Tensor, Tensor]:
        """Codes and scales as the product takes them."""
        return self._products or (self.storage, self.weight_scale)

    def _accumulators(self, data: Tensor, zero_point: Tensor | None) -> Tensor:
        """int32 [..., N]: what these columns add to the accumulators, their part of the zero-point term included. With
        group scales float32: the groups of this rank in ascending order, times their scales."""
        codes, scale = self._operands
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


def redescribe(layer: QLinear, in_features: int, out_features: int) -> None:
    """Give a layer other sizes; its numbers are to be filled in."""
    clamp = layer.clamp if layer.activation == "clamp" else None
    has_bias = "bias" in layer.state_slots
    layer._describe(in_features, out_features, has_bias, layer.scheme, layer.activation, clamp, layer.dtype)
