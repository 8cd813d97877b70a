"""What every layer with a weight matrix shares: how it takes codes, and how it multiplies rows by the matrix."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, Final, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import Proxy

from pyquant import ops
from pyquant.core import arguments
from pyquant.core.dtypes import FLOATS, INT8, describe, dtype_name
from pyquant.core.qtensor import PackedQTensor, QTensor
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError, PyquantError
from pyquant.nn import kernel_info as info
from pyquant.nn import reference, state, straight_through, weights
from pyquant.nn.linear_state import LinearState, activation_and_limits, check_scheme, traced
from pyquant.nn.patches import Patches
from pyquant.ops.transforms import autocast
from pyquant.ops.translate import reraise

_qlinear = torch.ops.pyquant.qlinear.default
_weight_only = torch.ops.pyquant.weight_only_linear.default
_float = torch.ops.pyquant.float_linear.default

# What an op raises for wrong operands; translated after the fact, so that a right call pays nothing.
OP_ERRORS: Final = (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError)

Self = TypeVar("Self", bound="LinearCall")
Float = TypeVar("Float", nn.Linear, nn.Conv2d)


def float_weights(weight: Tensor, scheme: QScheme) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What from_codes takes, of float weights [N, K]: max-calibrated codes, scale and zero point (16 bits: a copy)."""
    if not scheme.is_float:
        return weights.quantise_weight(weight, scheme.weights)
    if weight.dtype not in FLOATS:
        raise ArgumentError("weight", dtype_name(weight.dtype), "float32, float16 or bfloat16")
    converted = weight.to(getattr(torch, scheme.float_dtype or ""), memory_format=torch.contiguous_format, copy=True)
    return converted, None, None


class LinearCall(LinearState):
    """rows [..., K] -> [..., N]: the product of QLinear, and of QConv2d once it has gathered its patches."""

    _packs_results = True  # int4 codes may be given two a byte, neighbours in the last dimension

    @classmethod
    def from_codes(
        cls: type[Self],
        codes: Tensor,
        weight_scale: Tensor | None,
        *,
        scheme: QScheme,
        bias: Tensor | None = None,
        weight_zero_point: Tensor | None = None,
        input_scale: float | Tensor | None = None,
        input_zero_point: int | Tensor | None = None,
        output_scale: float | Tensor | None = None,
        output_zero_point: int | Tensor | None = None,
        activation: str | None = None,
        clamp: tuple[float, float] | None = None,
        dtype: torch.dtype = torch.float32,
        **geometry: Patches,
    ) -> Self:
        """A layer from ready codes; lives on their device.

        codes         int8 [N, K] within the scheme's code range (16-bit schemes: the weights, in float_dtype); K of a
                      QConv2d in the order (kernel row, kernel column, channel).
        weight_scale  float32 [N] or [N, K / group_size], finite and > 0 (16-bit schemes: None).
        geometry      of a QConv2d, and of no other: `patches`, a Patches that divides K into channels.
        Others as in from_float; bias float32 [N].
        Raises ArgumentError, NonFiniteError or SchemeError naming what is wrong.

        Example:
            >>> from pyquant import QLinear, W8A8Dynamic
            >>> QLinear.from_codes(torch.ones(2, 3, dtype=torch.int8), torch.ones(2), scheme=W8A8Dynamic()).out_features
            2
        """
        check_scheme(scheme)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._lay_out(codes, **geometry)
        layer._describe(codes.shape[1], codes.shape[0], bias is not None, scheme, activation, clamp, dtype)
        return layer._take(codes, {
            "weight_scale": weight_scale, "weight_zero_point": weight_zero_point, "bias": bias,
            "output_scale": output_scale, "output_zero_point": output_zero_point,
            "input_zero_point": input_zero_point, "input_scale": input_scale,
        })  # fmt: skip

    @classmethod
    def _from_matrix(
        cls: type[Self], matrix: Tensor, layer: nn.Linear | nn.Conv2d, scheme: QScheme, **given: Any
    ) -> Self:
        """A layer with the weights [N, K] of a float one, max-calibrated, and its bias."""
        check_scheme(scheme)
        codes, scale, given["weight_zero_point"] = float_weights(matrix, scheme)
        given["bias"] = None if layer.bias is None else layer.bias.detach().to(torch.float32, copy=True)
        return cls.from_codes(codes, scale, scheme=scheme, dtype=layer.weight.dtype, **given)

    def _lay_out(self, codes: Tensor) -> None:
        """Raise ArgumentError where codes are no matrix that the geometry of the layer divides."""
        check_matrix(codes, "a tensor [out_features, in_features]")

    def _take(self: Self, codes: Tensor, numbers: dict[str, Any]) -> Self:
        """Fill a described layer with codes [N, K] and the numbers of its scheme (state.NUMBERS; None: not given)."""
        scheme, plan = self.scheme, self.state_slots
        given = dict(numbers)
        for name in ("input_scale", "input_zero_point", "output_scale", "output_zero_point"):
            given[name] = state.scalar(name, numbers[name], plan.get(name), codes.device)
        for name, value in given.items():
            if value is not None and name not in plan:
                raise ArgumentError(name, "a tensor", f"None with scheme {scheme}")
            if value is None and name in plan:
                range_text = f"a number > 0: scheme {scheme} has a static input range"
                allowed = range_text if name == "input_scale" else f"{plan[name].text} with scheme {scheme}"
                raise ArgumentError(name, "None", allowed)
        limits = None if scheme.is_float else scheme.weights.code_range
        dtype_of_codes = plan["weight"].dtype if scheme.is_float else torch.int8
        state.check("codes", codes, state.Slot(dtype_of_codes, (self.out_features, self.in_features), limits))
        weight = weights.stored(codes, scheme.weights.code_type)
        self._fill({self._weight_name: weight} | {n: v for n, v in given.items() if v is not None})
        return self

    def with_activation(self: Self, activation: str | None, clamp: tuple[float, float] | None = None) -> Self:
        """The same layer with another activation; hooks, attributes and (where the layout allows) memory are shared.

        activation, clamp  as in QLinear.
        Raises ArgumentError for an unknown activation or wrong limits.

        Example:
            >>> from pyquant import QLinear
            >>> QLinear(8, 4).with_activation("gelu").activation
            'gelu'
        """
        twin = self._twin()
        twin.activation, twin.clamp = activation_and_limits(activation, clamp)
        twin._fill(self._state(), waits=self._waits)
        return twin

    def with_outputs(
        self: Self, outputs: TensorScheme | None, scale: Tensor | None = None, zero_point: Tensor | None = None
    ) -> Self:
        """The same layer that gives codes (a QTensor), or with None real numbers; hooks and attributes are shared.

        outputs     static per-tensor scheme of the codes.
        scale       float32 [1], finite and > 0; its memory is shared, so that a layer that holds the same tensor as its
                    input scale knows at once that the codes are meant for it.
        zero_point  int32 [1] where the scheme is affine, else None.
        Raises SchemeError for another scheme or a layer that does not run in integers, ArgumentError for the numbers.

        Example:
            >>> from pyquant import QLinear, TensorScheme
            >>> QLinear(8, 4).with_outputs(TensorScheme(), torch.tensor([0.5]))(torch.zeros(1, 8)).data.dtype
            torch.int8
        """
        twin = self._twin()
        numbers = {"output_scale": scale, "output_zero_point": zero_point}
        twin.scheme = replace(self.scheme, outputs=outputs)
        twin._gives_codes = outputs is not None
        twin.state_slots = state.slots(twin.scheme, self.out_features, self.in_features, "bias" in self.state_slots)
        for name, tensor in numbers.items():
            if (tensor is None) == (name in twin.state_slots):
                allowed = twin.state_slots[name].text if tensor is None else f"None with scheme {twin.scheme}"
                raise ArgumentError(name, "None" if tensor is None else "a tensor", allowed)
        held = {name: tensor for name, tensor in self._state().items() if name not in numbers}
        given = {name: tensor for name, tensor in numbers.items() if tensor is not None}
        twin._fill(held | given, waits=self._waits)
        return twin

    def _twin(self: Self) -> Self:
        """The same layer with containers of its own."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.__dict__["_buffers"], twin.__dict__["_parameters"] = dict(self._buffers), dict(self._parameters)
        return twin

    def dequantised_weight(self) -> Tensor:
        """float32 [N, K]: the real weights that the codes stand for."""
        return self._form.matrix(self.storage, self.weight_scale, self.weight_zero_point)

    def _filled(self, layer: Float, dtype: torch.dtype) -> Float:
        """A float layer on the meta device with the numbers of this one."""
        layer.weight = nn.Parameter(self._real(dtype))
        if self.bias_ is not None:
            layer.bias = nn.Parameter(self.bias_.to(dtype, copy=True))
        return layer.train(self.training)

    def reference(self, x: Tensor | QTensor, residual: Tensor | None = None) -> Any:
        """What forward must give, from pyquant.numerics alone: equal bits for integer schemes.

        Arguments and result as in forward. Slow.

        Example:
            >>> from pyquant import QLinear, W8A8Dynamic
            >>> layer, x = QLinear.from_float(nn.Linear(8, 4), W8A8Dynamic()), torch.randn(3, 8)
            >>> torch.equal(layer(x), layer.reference(x))
            True
        """
        self._check_call(x, residual)
        return self._result(reference.result(self, x, residual))

    def _forward_general(self, x: Tensor | QTensor, residual: Tensor | None) -> Any:
        if isinstance(x, Proxy):
            return traced(self, x, residual)
        self._check_ready(x, residual)
        try:
            gives_numbers = self.scheme.is_integer and not self._gives_codes
            if gives_numbers and isinstance(x, Tensor) and needs_derivative(x, residual):
                return straight_through.apply(self, x, residual)
            return self._result(self._run(x, residual, self.storage))
        except PyquantError:
            raise
        except OP_ERRORS as error:
            self._explain(error, x)

    def _run(self, x: Tensor | QTensor, residual: Tensor | None, storage: Tensor) -> Tensor:
        """The layer with the weights in `storage`, without derivatives; codes as they are stored."""
        if not self.scheme.is_integer:
            return self._forward_float(x, residual)
        if isinstance(x, QTensor):
            return self._forward_codes(x, residual)
        return _tensor(_qlinear(x, storage, residual, self._spec, self._codes_dtype(x)))

    def _result(self, y: Tensor) -> Any:
        if self.output_scale is None:
            return y
        kind = PackedQTensor if y.dtype == torch.uint8 else QTensor
        return kind(y, self.output_scale, self.output_zero_point)

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
                self.missing, "None", f"a value: scheme {self.scheme} needs it; give it to from_float or quantize_, or "
                "load a state_dict that has it"
            )  # fmt: skip
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
            return _tensor(_float(x.to(storage.dtype), storage, self.bias_, residual, *fused, x.dtype))
        w, zero_point = self.scheme.weights, self.weight_zero_point
        scaled = (storage, self.weight_scale, zero_point, self.bias_)
        return _tensor(_weight_only(x, *scaled, residual, w.bits, w.group_size or 0, *fused))

    def _forward_codes(self, x: QTensor, residual: Tensor | None) -> Tensor:
        x = self._readable(x)
        self._check_codes(x)
        data, zero_point = (x.data, x.zero_point) if isinstance(x, PackedQTensor) else signed(x)
        if self.scheme.is_static:
            self._check_linked(x, zero_point)
        return self._product(data, x.scale, zero_point, residual, self.dtype, self.storage)

    def _product(
        self, data: Tensor, x_scale: Tensor, zero_point: Tensor | None, residual: Tensor | None, dtype: torch.dtype,
        storage: Tensor,
    ) -> Tensor:  # fmt: skip
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
        w, limits = self.scheme.weights, self._output_range()
        x_type = INT8 if inputs is None else inputs.code_type
        gemm = getattr(ops, f"gemm_{x_type.native_name}{w.code_type.native_name}")
        y: Tensor = gemm(
            data, self._canonical(), self.weight_scale, x_scale, zero_point, self.bias_, residual, self.output_scale,
            self.output_zero_point, w.group_size or 0, self.activation, *self.clamp, *limits,
            torch.int8 if self._gives_codes else dtype,
        )  # fmt: skip
        return ops.pack_int4(y) if out_dtype == torch.uint8 else y

    def _readable(self, x: QTensor) -> QTensor:
        """Packed codes where the layer's own codes are int4 ones, else one a byte."""
        inputs = self.scheme.inputs
        reads_packed = inputs is not None and inputs.code_type.is_packed
        return x if reads_packed or not isinstance(x, PackedQTensor) else unpacked(x)

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

    def _explain(self, error: Exception, x: Tensor | QTensor) -> NoReturn:
        """What an op said, in the words of the layer: its packed buffer is no argument that a caller knows."""
        if isinstance(x, Tensor):
            self._check_device(x)
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
        if same_memory(x.scale, self.input_scale) and same_memory(zero_point, self.input_zero_point):
            return
        scale, own_scale = x.scale.flatten().tolist(), self.input_scale.tolist() if self.input_scale is not None else []
        zero, own_zero = ([0] if z is None else z.flatten().tolist() for z in (zero_point, self.input_zero_point))
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
        """Which kernel runs a call of M rows on this layer's device, and why.

        Raises ArgumentError for M that is not a whole number >= 0.
        """
        return info.explain(self, M)


def check_matrix(codes: object, allowed: str, divisor: int = 1) -> None:
    """Raise ArgumentError where codes are no matrix with a number of columns that `divisor` divides."""
    if not isinstance(codes, Tensor) or codes.dim() != 2 or codes.shape[1] % divisor:
        got = f"{type(codes).__name__} {list(codes.shape) if isinstance(codes, Tensor) else repr(codes)}"
        raise ArgumentError("codes", got[:120], allowed)


def _tensor(result: Any) -> Tensor:
    """torch does not say what its ops return; ours return one tensor."""
    return cast(Tensor, result)


def needs_derivative(x: Tensor, residual: Tensor | None) -> bool:
    """Whether someone asks for the derivative of this call, backwards or (within a dual level) forwards."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and (x.requires_grad or (residual is not None and residual.requires_grad))


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
