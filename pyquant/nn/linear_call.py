"""What every layer with a weight matrix shares: how it takes codes, and how it multiplies rows by the matrix."""

from __future__ import annotations

import warnings
from typing import Any, Final, NoReturn, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import Proxy

from pyquant import ops
from pyquant.core import arguments
from pyquant.core.dtypes import FLOATS, INT8, describe, dtype_name
from pyquant.core.qtensor import PackedQTensor, QTensor
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError, PyquantError
from pyquant.nn import kernel_info as info
from pyquant.nn import reference, straight_through, weights
from pyquant.nn.linear_codes import LinearCodes
from pyquant.nn.linear_state import traced
from pyquant.nn.nested import each_token
from pyquant.nn.obstacles import is_watched
from pyquant.ops import tuned
from pyquant.ops.transforms import autocast
from pyquant.ops.translate import reraise

_qlinear = torch.ops.pyquant.qlinear.default
_weight_only = torch.ops.pyquant.weight_only_linear.default
_float = torch.ops.pyquant.float_linear.default

# What an op raises for wrong operands; translated after the fact, so that a right call pays nothing.
OP_ERRORS: Final = (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError)


class LinearCall(LinearCodes):
    """rows [..., K] -> [..., N]: the product of QLinear, and of QConv2d once it has gathered its patches."""

    _packs_results = True  # int4 codes may be given two a byte, neighbours in the last dimension

    def reference(self, x: Tensor | QTensor, residual: Tensor | None = None) -> Any:
        """What forward must give, from pyquant.numerics alone: equal bits for integer schemes.

        Arguments and result as in forward. Slow.

        Example:
            >>> from pyquant import QLinear, W8A8Dynamic
            >>> layer, x = QLinear.from_float(torch.nn.Linear(8, 4), W8A8Dynamic()), torch.randn(3, 8)
            >>> torch.equal(layer(x), layer.reference(x))
            True
        """
        self._check_call(x, residual)
        return self._result(reference.result(self, x, residual))

    def _forward_general(self, x: Tensor | QTensor, residual: Tensor | None) -> Any:
        if isinstance(x, Proxy):
            return traced(self, x, residual)
        if isinstance(x, Tensor) and x.is_nested:
            return each_token(self, x, residual)
        self._check_ready(x, residual)
        try:
            gives_numbers = self.scheme.is_integer and not self._gives_codes
            if isinstance(x, Tensor) and needs_derivative(x, residual):
                if torch.jit.is_tracing():  # type: ignore[attr-defined]  # the op alone, which nobody differentiates
                    with torch.no_grad():
                        return self._result(self._run(x, residual, self.storage))
                if gives_numbers:
                    return straight_through.apply(self, x, residual)
            return self._result(self._run(x, residual, self.storage))
        except PyquantError:
            raise
        except OP_ERRORS as error:
            self._explain(error, x, residual)

    def _run(self, x: Tensor | QTensor, residual: Tensor | None, storage: Tensor) -> Tensor:
        """The layer with the weights in `storage`, without derivatives; codes as they are stored."""
        if not self.scheme.is_integer:
            return self._forward_float(x, residual)
        if isinstance(x, QTensor):
            return self._forward_codes(x, residual)
        return _tensor(_qlinear(x, storage, residual, self._spec, self._codes_dtype(x)))

    def _result(self, y: Tensor) -> Any:
        if self.output_scale_ is None:
            return y
        kind = PackedQTensor if y.dtype == torch.uint8 else QTensor
        return kind(y, self.output_scale_, self.output_zero_point_)

    def _codes_dtype(self, x: Tensor) -> torch.dtype | None:
        """uint8 where the codes that the layer returns are packed two a byte on the device of x, else None."""
        return torch.uint8 if self.packs_codes(self.scheme.outputs, x.device) else None

    def packs_codes(self, scheme: TensorScheme | None, device: torch.device) -> bool:
        """Whether this layer returns codes of that scheme packed two a byte on a device. Raises ArgumentError."""
        if scheme is not None and not isinstance(scheme, TensorScheme):
            raise ArgumentError("scheme", arguments.shown(scheme), "a TensorScheme, or None")
        if scheme is None or not scheme.code_type.is_packed or not self._packs_results:
            return False
        return ops.packs_int4(device, self.out_features)

    def _check_ready(self, x: object, residual: object) -> None:
        if self._waits and (self._is_packed or not self.scheme.is_integer):
            if not self.storage.is_meta:
                warnings.warn("a layer after to_empty() multiplies by zeros: load a state_dict", stacklevel=4)
        elif self.missing:
            raise ArgumentError(
                self.missing,
                "None",
                f"a value: scheme {self.scheme} needs it; give it to from_float or quantize_, or "
                "load a state_dict that has it",
            )
        if not isinstance(x, (Tensor, QTensor)):
            raise ArgumentError("x", f"{type(x).__name__} {x!r}"[:120], "a Tensor or a QTensor")
        if residual is not None and not isinstance(residual, Tensor):
            raise ArgumentError("residual", type(residual).__name__, "a Tensor or None")

    def _check_call(self, x: object, residual: object) -> None:
        """What the ops of forward would refuse, for reference, which calls none."""
        self._check_ready(x, residual)
        if isinstance(x, Tensor):
            self._check_operand(x, FLOATS)
            lead = x.shape[:-1]
        else:
            self._check_codes(cast(QTensor, x))
            lead = cast(QTensor, x).data.shape[:-1]
        if isinstance(residual, Tensor) and residual.shape != (*lead, self.out_features):
            raise ArgumentError("residual", describe(residual), f"float {[*lead, self.out_features]}")

    def _forward_float(self, x: Tensor | QTensor, residual: Tensor | None) -> Tensor:
        if isinstance(x, QTensor):
            raise ArgumentError("x", "a QTensor", f"a float tensor: scheme {self.scheme} does not take codes")
        self._check_operand(x, FLOATS)
        if needs_derivative(x, residual) and straight_through.is_transformed():
            return straight_through.smooth(self, x, residual)
        storage, fused = self.storage, (self.activation, *self.clamp)
        if self.scheme.is_float:
            x = autocast(x)
            if residual is None and self._is_torchs_linear(x, storage):
                return self._torchs_linear(x, storage)
            return _tensor(_float(operand_of(storage, x), storage, self.bias_, residual, *fused, x.dtype))
        w, zero_point = self.scheme.weights, self.weight_zero_point_
        scaled = (storage, self.weight_scale_, zero_point, self.bias_)
        return _tensor(_weight_only(x, *scaled, residual, w.bits, w.group_size or 0, *fused))

    def _is_torchs_linear(self, x: Tensor, storage: Tensor) -> bool:
        """Whether the op would hand a whole 16-bit layer, but for the residual, to torch's Linear: what is left to it
        is the bias in float32, which it converts in each call."""
        return (
            storage.is_cuda
            and x.dtype == storage.dtype
            and self.activation == "none"
            and (self.bias_ is None or "bias_narrow" in self._buffers)
            and not tuned.has_float_rows()
            and not needs_derivative(x, None)
            and not straight_through.is_transformed()
        )

    def _torchs_linear(self, x: Tensor, storage: Tensor) -> Tensor:
        """As the op computes it: of rows, to which torch adds the bias before it rounds."""
        rows = x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)
        y = torch.nn.functional.linear(rows, storage, self._buffers.get("bias_narrow"))
        return y if x.dim() == 2 else y.view(*x.shape[:-1], storage.shape[0])

    def _forward_codes(self, x: QTensor, residual: Tensor | None) -> Tensor:
        inputs = self.scheme.inputs
        if inputs is None or not inputs.code_type.is_packed:
            x = unpacked(x)
        self._check_codes(x)
        data, zero_point = (x.data, x.zero_point) if isinstance(x, PackedQTensor) else signed(x)
        if self.scheme.is_static:
            self._check_linked(x, zero_point)
        return self._product(data, x.scale, zero_point, residual, self.dtype, self.storage)

    def _product(
        self,
        data: Tensor,
        x_scale: Tensor,
        zero_point: Tensor | None,
        residual: Tensor | None,
        dtype: torch.dtype,
        storage: Tensor,
    ) -> Tensor:
        """Rows of int8 codes times the weights; `dtype` of the result where the scheme has no outputs."""
        inputs = self.scheme.inputs
        out_dtype = None if self._gives_codes or dtype == torch.float32 else dtype
        out_dtype = self._codes_dtype(data) or out_dtype
        if self.scheme.is_static:
            return _tensor(_qlinear(data, storage, residual, self._spec, out_dtype))
        # The packed weights multiply what their own quantiser could have made; for other codes they are repacked.
        is_affine = inputs is not None and not inputs.symmetric
        if data.dim() > 1 and x_scale.shape == data.shape[:-1] and (zero_point is None or is_affine):
            return _tensor(_qlinear(data, storage, residual, self._spec, out_dtype, x_scale, zero_point))
        limits, w_type = self._output_range(), self.scheme.weights.product_type
        x_type = INT8 if inputs is None else inputs.code_type
        gemm = getattr(ops, f"gemm_{x_type.native_name}{w_type.native_name}")
        w = (self._canonical(), self.weight_scale_, self.scheme.weights, self.in_features)
        codes, w_scale, group_size = weights.multiplied(*w)
        y: Tensor = gemm(
            data,
            codes,
            w_scale,
            x_scale,
            zero_point,
            self.bias_,
            residual,
            self.output_scale_,
            self.output_zero_point_,
            group_size,
            self.activation,
            *self.clamp,
            *limits,
            torch.int8 if self._gives_codes else dtype,
        )
        return ops.pack_int4(y) if out_dtype == torch.uint8 else y

    @property
    def takes_tokens(self) -> bool:
        """Whether _multiply_tokens is a call of this layer that nobody would miss: dynamic inputs, float results, and
        nothing is registered to run with its calls."""
        inputs = self.scheme.inputs
        return self._is_direct and inputs is not None and inputs.dynamic and not is_watched(self)

    def _multiply_tokens(
        self, codes: Tensor, scale: Tensor, zero_point: Tensor, residual: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """The layer behind a kernel that has quantised its tokens as its own quantiser would.

        codes  int8 [..., in_features], two dimensions at least; scale, zero_point  float32 and int32, one a token;
        residual  as in forward; dtype  of the result. -> [..., out_features]. Without derivatives.
        """
        inputs = self.scheme.inputs
        zeros = None if inputs is None or inputs.symmetric else zero_point
        out_dtype = None if dtype == torch.float32 else dtype
        return _tensor(_qlinear(codes, self._buffers["storage"], residual, self._spec, out_dtype, scale, zeros))

    def _check_operand(self, x: Tensor, dtypes: tuple[torch.dtype, ...], columns: int | None = None) -> None:
        columns = self.in_features if columns is None else columns
        if x.dtype not in dtypes or x.layout != torch.strided or x.dim() < 1 or x.shape[-1] != columns:
            names = " or ".join(dtype_name(dtype) for dtype in dtypes)
            raise ArgumentError("x", describe(x), f"{names} [..., {columns}], dense")
        self._check_device(x)

    def _check_device(self, x: Tensor) -> None:
        device = self.storage.device
        if x.device != device:
            raise ArgumentError("x", f"device {x.device}", f"device {device}, where the layer is")

    def _explain(self, error: Exception, x: Tensor | QTensor, residual: Tensor | None = None) -> NoReturn:
        """What an op said, in the words of the layer: its packed buffer is no argument that a caller knows."""
        if isinstance(x, Tensor):
            self._check_device(x)
        if "Not yet supported ScalarType" in str(error):  # torch's, of its newest types
            for name, given in (("x", x), ("residual", residual)):
                if isinstance(given, Tensor) and given.dtype not in FLOATS:
                    raise ArgumentError(name, describe(given), " or ".join(map(dtype_name, FLOATS))) from None
        reraise(error)

    def _check_codes(self, x: QTensor) -> None:
        self._check_parts(x)
        if isinstance(x, PackedQTensor):
            self._check_operand(x.data, (torch.uint8,), (self.in_features + 1) // 2)
        else:
            self._check_operand(x.data, (torch.int8, torch.uint8))

    def _check_parts(self, x: QTensor) -> None:
        wanted = {"data": None, "scale": torch.float32, "zero_point": torch.int32}
        for name, dtype in wanted.items():
            tensor = getattr(x, name)
            if tensor is None and name == "zero_point":
                continue
            if not isinstance(tensor, Tensor) or dtype not in (None, tensor.dtype):
                raise ArgumentError(f"x.{name}", describe(tensor), f"a {dtype_name(dtype or torch.int8)} tensor")

    def _check_linked(self, x: QTensor, zero_point: Tensor | None) -> None:
        """Codes that come with another scale would silently mean other numbers. Linked layers share the memory of the
        scale, which spares reading it (on a GPU: waiting for it); a compiled graph cannot look at values at all."""
        if torch.compiler.is_compiling():
            return
        if same_memory(x.scale, self.input_scale_) and same_memory(zero_point, self.input_zero_point_):
            return
        scale, own_scale = (
            x.scale.flatten().tolist(),
            self.input_scale_.tolist() if self.input_scale_ is not None else [],
        )
        zero, own_zero = ([0] if z is None else z.flatten().tolist() for z in (zero_point, self.input_zero_point_))
        if scale != own_scale or zero != own_zero:
            got = f"codes of scale {scale[:3]}, zero point {zero[:3]}"
            raise ArgumentError("x", got, f"codes of this layer's input: scale {own_scale}, zero point {own_zero}")

    def extra_repr(self) -> str:
        """The layer in one line, as print(model) shows it."""
        words = [*self._sizes(), f"bias={'bias' in self.state_slots}", f"scheme={self.scheme}"]
        if self.activation != "none":
            words.append(f"activation={self.activation}{self.clamp if self.activation == 'clamp' else ''}")
        return ", ".join(words) + (f", without {self.missing}" if self.missing else "")

    def _sizes(self) -> list[str]:
        return [f"in_features={self.in_features}", f"out_features={self.out_features}"]

    def kernel_info(self, M: int = 1) -> info.KernelInfo:
        """Which kernel runs a call of M rows (of a convolution: pixels of the result) on this layer's device, and why.

        Raises ArgumentError for M that is not a whole number >= 0.
        """
        return info.explain(self, M)


def _tensor(result: Any) -> Tensor:
    """torch does not say what its ops return; ours return one tensor."""
    return cast(Tensor, result)


def operand_of(storage: Tensor, x: Tensor) -> Tensor:
    """x as the product with a 16-bit layer's weights takes it: in their type on a GPU, as it is for the float32 product
    of a CPU."""
    return x.to(storage.dtype) if storage.is_cuda else x


def needs_derivative(x: Tensor, residual: Tensor | None) -> bool:
    """Whether someone asks for the derivative of this call, backwards or (within a dual level) forwards. Nobody does of
    a program that torch.export writes down: it has the op alone, also where parameters stand before the layer."""
    if forward_ad._current_level >= 0:
        return True
    if not torch.is_grad_enabled() or not (x.requires_grad or (residual is not None and residual.requires_grad)):
        return False
    return not (torch.compiler.is_compiling() and torch.compiler.is_exporting())


def same_memory(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.numel() == 1 and a.device == b.device and a.data_ptr() == b.data_ptr()


def unpacked(x: QTensor) -> QTensor:
    """The same codes one a byte."""
    if not isinstance(x, PackedQTensor):
        return x
    return QTensor(ops.unpack_int4(x.data, 2 * x.data.shape[-1]), x.scale, x.zero_point)


def signed(x: QTensor) -> tuple[Tensor, Tensor | None]:
    """int8 codes and their zero point; uint8 codes become the int8 codes of the same real numbers."""
    if x.data.dtype != torch.uint8:
        return x.data, x.zero_point
    zero = torch.zeros_like(x.scale, dtype=torch.int32) if x.zero_point is None else x.zero_point
    return (x.data ^ 128).view(torch.int8), zero - 128
