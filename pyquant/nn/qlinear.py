"""QLinear: a Linear whose weights are held as codes and whose product runs in integers (or 16-bit floats)."""

from __future__ import annotations

from typing import Any, Final, NoReturn, cast

import torch
from torch import Tensor, nn

from pyquant import ops
from pyquant.core.presets import W8A8Dynamic
from pyquant.core.qtensor import QTensor
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, PyquantError
from pyquant.nn import kernel_info as info
from pyquant.nn import reference, state, straight_through, weights
from pyquant.nn.linear_state import LinearState, check_scheme
from pyquant.ops.check import describe
from pyquant.ops.translate import reraise

_qlinear = torch.ops.pyquant.qlinear.default
_weight_only = torch.ops.pyquant.weight_only_linear.default
_float = torch.ops.pyquant.float_linear.default

# What an op raises for wrong operands; translated after the fact, so that a right call pays nothing.
_OP_ERRORS: Final = (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError)


class QLinear(LinearState):
    """y = activation(x @ W.T + bias) + residual, with W quantised as `scheme` says.

    in_features, out_features, bias, device   as in torch.nn.Linear.
    scheme      QScheme; decides what is stored and how the product runs.
    activation  None, 'relu', 'gelu', 'gelu_tanh', 'silu', or 'clamp' with limits in `clamp`.
    clamp       (low, high) of activation 'clamp'.
    dtype       result type where the input is codes; a float input gives its own type. Follows .half(), .bfloat16().

    A layer made this way holds zero weights and is meant to be filled by load_state_dict; use from_float or from_codes
    otherwise. Its state: `weight` (int8 [N, K]) or `weight_packed` (uint8 [N, ceil(K / 2)], 4 bits), `weight_scale`,
    and as the scheme needs `weight_zero_point`, `bias`, `input_scale`, `input_zero_point`, `output_scale`,
    `output_zero_point`. Scales and bias are float32, zero points int32, whatever the model is cast to. In memory the
    codes are held once, in `storage`, in the layout of the device; scales and bias are copied into it, so change them
    by assignment (`layer.bias = t`) or load_state_dict, not in place.

    Raises SchemeError, ArgumentError. Source: docs/numerics.md 2-5, 8.

    Example:
        >>> layer = QLinear.from_float(nn.Linear(64, 32), W8A8Dynamic())
        >>> layer(torch.zeros(2, 64)).shape
        torch.Size([2, 32])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        scheme: QScheme | None = None,
        activation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        clamp: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        self._describe(in_features, out_features, bool(bias), scheme or W8A8Dynamic(), activation, clamp, dtype)
        where = state.device_of(device)
        fresh: dict[str, Tensor] = {}
        for name, slot in self.state_slots.items():
            if name in ("weight", "weight_packed", "bias", "weight_zero_point"):
                fresh[name] = torch.zeros(slot.shape, dtype=slot.dtype, device=where)
            elif name == "weight_scale":
                fresh[name] = torch.ones(slot.shape, dtype=slot.dtype, device=where)
        self._fill(fresh)

    @classmethod
    def from_float(
        cls,
        linear: nn.Linear,
        scheme: QScheme,
        *,
        input_scale: float | Tensor | None = None,
        input_zero_point: int | Tensor | None = None,
        output_scale: float | Tensor | None = None,
        output_zero_point: int | Tensor | None = None,
        activation: str | None = None,
        clamp: tuple[float, float] | None = None,
    ) -> QLinear:
        """A QLinear with the weights of a float Linear, max-calibrated per channel or group.

        linear        nn.Linear, float32, float16 or bfloat16, finite; not changed.
        input_scale   real size of one input code (static schemes): number or one-element tensor, finite and > 0.
        input_zero_point, output_zero_point   code of real 0 (affine static schemes).
        output_scale  real size of one output code (schemes with outputs).
        Raises SchemeError for a group size that does not divide in_features, ArgumentError naming what is wrong.

        Example:
            >>> from pyquant.core.presets import W8A8
            >>> QLinear.from_float(nn.Linear(8, 4), W8A8(), input_scale=0.05).input_scale.item() > 0
            True
        """
        if not isinstance(linear, nn.Linear):
            raise ArgumentError("linear", type(linear).__name__, "a torch.nn.Linear")
        check_scheme(scheme)
        weight = linear.weight.detach()
        if scheme.is_float:
            if weight.dtype not in weights.FLOAT_TYPES:
                raise ArgumentError("weight", str(weight.dtype).removeprefix("torch."), "float32, float16 or bfloat16")
            codes = weight.to(
                getattr(torch, scheme.float_dtype or ""), memory_format=torch.contiguous_format, copy=True
            )
            scale = zero_point = None
        else:
            codes, scale, zero_point = weights.quantise_weight(weight, scheme.weights)
        bias = None if linear.bias is None else linear.bias.detach().to(torch.float32, copy=True)
        return cls.from_codes(
            codes, scale, scheme=scheme, bias=bias, weight_zero_point=zero_point, input_scale=input_scale,
            input_zero_point=input_zero_point, output_scale=output_scale, output_zero_point=output_zero_point,
            activation=activation, clamp=clamp, dtype=weight.dtype,
        )  # fmt: skip

    @classmethod
    def from_codes(
        cls,
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
    ) -> QLinear:
        """A QLinear from ready codes; lives on the device of `codes`.

        codes         int8 [N, K] within the scheme's code range (16-bit schemes: the weights, in float_dtype).
        weight_scale  float32 [N] or [N, K / group_size], finite and > 0 (16-bit schemes: None).
        Others as in from_float; bias float32 [N].
        Raises ArgumentError, NonFiniteError or SchemeError naming what is wrong.

        Example:
            >>> QLinear.from_codes(torch.ones(2, 3, dtype=torch.int8), torch.ones(2), scheme=W8A8Dynamic()).out_features
            2
        """
        check_scheme(scheme)
        if not isinstance(codes, Tensor) or codes.dim() != 2:
            got = f"{type(codes).__name__} {list(codes.shape) if isinstance(codes, Tensor) else repr(codes)}"
            raise ArgumentError("codes", got[:120], "a tensor [out_features, in_features]")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._describe(codes.shape[1], codes.shape[0], bias is not None, scheme, activation, clamp, dtype)
        plan = layer.state_slots
        given: dict[str, Tensor | None] = {
            "weight_scale": weight_scale,
            "weight_zero_point": weight_zero_point,
            "bias": bias,
        }
        for name, value in (
            ("input_scale", input_scale), ("input_zero_point", input_zero_point),
            ("output_scale", output_scale), ("output_zero_point", output_zero_point),
        ):  # fmt: skip
            given[name] = state.scalar(name, value, plan.get(name), codes.device)
        for name, value in given.items():
            if value is None and name in plan and name != "input_scale":
                raise ArgumentError(name, "None", f"{plan[name].text} with scheme {scheme}")
            if value is not None and name not in plan:
                raise ArgumentError(name, "a tensor", f"None with scheme {scheme}")
        if given["input_scale"] is None and "input_scale" in plan:
            raise ArgumentError("input_scale", "None", f"a number > 0: scheme {scheme} has a static input range")
        limits = None if scheme.is_float else scheme.weights.code_range
        dtype_of_codes = plan["weight"].dtype if scheme.is_float else torch.int8
        state.check("codes", codes, state.Slot(dtype_of_codes, (codes.shape[0], codes.shape[1]), limits))
        weight = ops.pack_int4(codes) if scheme.weights.bits == 4 else codes
        layer._fill({layer._weight_name: weight} | {n: v for n, v in given.items() if v is not None})
        return layer

    def to_float(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """A torch.nn.Linear with the dequantised weights and the bias; the activation is not part of it.

        dtype  None: the layer's own `dtype`. In float32 the weights are exactly scale * (code - zero_point).

        Example:
            >>> QLinear.from_float(nn.Linear(8, 4), W8A8Dynamic()).to_float().weight.shape
            torch.Size([4, 8])
        """
        dtype = dtype or self.dtype
        real = self.dequantised_weight()
        has_bias = self.bias is not None
        linear = nn.Linear(self.in_features, self.out_features, has_bias, device="meta")
        linear.weight = nn.Parameter(real.to(dtype))
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.to(dtype, copy=True))
        return linear.train(self.training)

    def dequantised_weight(self) -> Tensor:
        """float32 [N, K]: the real weights that the codes stand for."""
        if self.scheme.is_float:
            return self.weight.to(torch.float32)
        return weights.dequantise_weight(self.weight, self.weight_scale, self.weight_zero_point, self.scheme.weights)

    # ---- running

    def forward(self, x: Tensor | QTensor, residual: Tensor | None = None) -> Any:
        """The layer.

        x         float32, float16 or bfloat16 [..., in_features], or a QTensor of codes. A static layer takes codes of
                  its own input scale; a dynamic layer any per-token or per-tensor codes (exact, but its weights are
                  laid out anew for each such call).
        residual  float [..., out_features], added after the activation; or None.
        ->        [..., out_features] in x's type (`dtype` for codes), or a QTensor where the scheme has outputs. A row
                  of x that holds NaN or infinity gives a row of NaN with dynamic inputs.
        Gradients flow to float x (straight through the rounding; where a static range clips, none) and to residual.
        Raises ArgumentError, UnsupportedError.
        """
        if self._is_direct:
            try:
                if not x.requires_grad and residual is None:  # type: ignore[union-attr]
                    return _qlinear(x, self._buffers["storage"], None, self._spec)
            except _OP_ERRORS as error:
                if isinstance(x, Tensor):
                    self._explain(error, x)
        return self._forward_general(x, residual)

    def _forward_general(self, x: Tensor | QTensor, residual: Tensor | None) -> Any:
        if self.missing:
            raise ArgumentError(
                self.missing, "None", f"a value: scheme {self.scheme} needs it; give it to from_float or quantize_, or "
                "load a state_dict that has it"
            )  # fmt: skip
        if not isinstance(x, (Tensor, QTensor)):
            raise ArgumentError("x", f"{type(x).__name__} {x!r}"[:120], "a Tensor or a QTensor")
        if residual is not None and not isinstance(residual, Tensor):
            raise ArgumentError("residual", type(residual).__name__, "a Tensor or None")
        try:
            if not self.scheme.is_integer:
                return self._forward_float(x, residual)
            if isinstance(x, QTensor):
                y = self._forward_codes(x, residual)
            elif torch.is_grad_enabled() and _needs_grad(x, residual) and not self._gives_codes:
                y = straight_through.apply(self, x, residual)
            else:
                y = _qlinear(x, self._buffers["storage"], residual, self._spec)
        except PyquantError:
            raise
        except _OP_ERRORS as error:
            self._explain(error, x)
        if self.output_scale is None:
            return y
        return QTensor(y, self.output_scale, self.output_zero_point)

    def _forward_float(self, x: Tensor | QTensor, residual: Tensor | None) -> Tensor:
        if isinstance(x, QTensor):
            raise ArgumentError("x", "a QTensor", f"a float tensor: scheme {self.scheme} does not take codes")
        self._check_operand(x, weights.FLOAT_TYPES)
        storage, fused = self.storage, (self.activation, *self.clamp)
        if self.scheme.is_float:
            return _tensor(_float(x.to(storage.dtype), storage, self.bias, residual, *fused, x.dtype))
        w, zero_point = self.scheme.weights, self.weight_zero_point
        scaled = (storage, self.weight_scale, zero_point, self.bias)
        return _tensor(_weight_only(x, *scaled, residual, w.bits, w.group_size or 0, *fused))

    def _forward_codes(self, x: QTensor, residual: Tensor | None) -> Tensor:
        self._check_codes(x)
        data, zero_point = _signed(x)
        out_dtype = None if self._gives_codes or self.dtype == torch.float32 else self.dtype
        if self.scheme.is_static:
            self._check_linked(x, zero_point)
            return _tensor(_qlinear(data, self.storage, residual, self._spec, out_dtype))
        w, limits = self.scheme.weights, self._output_range()
        four_bit_inputs = self.scheme.inputs is not None and self.scheme.inputs.bits == 4
        gemm = ops.gemm_s8s8 if w.bits == 8 else ops.gemm_s4s4 if four_bit_inputs else ops.gemm_s8s4
        return gemm(
            data, self._canonical(), self.weight_scale, x.scale, zero_point, self.bias, residual, self.output_scale,
            self.output_zero_point, w.group_size or 0, self.activation, *self.clamp, *limits,
            torch.int8 if self._gives_codes else self.dtype,
        )  # fmt: skip

    def _check_operand(self, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        if x.dtype not in dtypes or x.layout != torch.strided or x.dim() < 1 or x.shape[-1] != self.in_features:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ArgumentError("x", describe(x), f"{names} [..., {self.in_features}], dense")
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
        for name, tensor, dtype in (
            ("data", x.data, None),
            ("scale", x.scale, torch.float32),
            ("zero_point", x.zero_point, torch.int32),
        ):
            if tensor is None and name == "zero_point":
                continue
            if not isinstance(tensor, Tensor) or dtype not in (None, tensor.dtype):
                got = describe(tensor) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ArgumentError(f"x.{name}", got, f"a {str(dtype or 'int8').removeprefix('torch.')} tensor")
        self._check_operand(x.data, (torch.int8, torch.uint8))

    def _check_linked(self, x: QTensor, zero_point: Tensor | None) -> None:
        """Codes that come with another scale would silently mean other numbers. Linked layers share the memory of the
        scale, which spares reading it (on a GPU: waiting for it); a compiled graph cannot look at values at all."""
        if torch.compiler.is_compiling():
            return
        if _same_memory(x.scale, self.input_scale) and _same_memory(zero_point, self.input_zero_point):
            return
        scale, own_scale = x.scale.flatten().tolist(), self.input_scale.tolist() if self.input_scale is not None else []
        zero, own_zero = ([0] if z is None else z.flatten().tolist() for z in (zero_point, self.input_zero_point))
        if scale != own_scale or zero != own_zero:
            got = f"codes of scale {scale[:3]}, zero point {zero[:3]}"
            raise ArgumentError("x", got, f"codes of this layer's input: scale {own_scale}, zero point {own_zero}")

    def reference(self, x: Tensor | QTensor, residual: Tensor | None = None) -> Any:
        """What forward must give, from pyquant.numerics alone: equal bits for integer schemes.

        Arguments and result as in forward. Slow.

        Example:
            >>> layer, x = QLinear.from_float(nn.Linear(8, 4), W8A8Dynamic()), torch.randn(3, 8)
            >>> torch.equal(layer(x), layer.reference(x))
            True
        """
        return reference.forward(self, x, residual)

    def kernel_info(self, M: int = 1) -> info.KernelInfo:
        """Which kernel runs a call of M rows on this layer's device, and why.

        Raises ArgumentError for M that is not a whole number >= 0.
        """
        return info.explain(self, M)

    def extra_repr(self) -> str:
        """The layer in one line, as print(model) shows it."""
        words = [
            f"in_features={self.in_features}",
            f"out_features={self.out_features}",
            f"bias={'bias' in self.state_slots}",
        ]
        words.append(f"scheme={self.scheme}")
        if self.activation != "none":
            words.append(f"activation={self.activation}{self.clamp if self.activation == 'clamp' else ''}")
        return ", ".join(words) + (f", without {self.missing}" if self.missing else "")


def _tensor(result: Any) -> Tensor:
    """torch does not say what its ops return; ours return one tensor."""
    return cast(Tensor, result)


def _needs_grad(x: Tensor, residual: Tensor | None) -> bool:
    return x.requires_grad or (residual is not None and residual.requires_grad)


def _same_memory(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.numel() == 1 and a.device == b.device and a.data_ptr() == b.data_ptr()


def _signed(x: QTensor) -> tuple[Tensor, Tensor | None]:
    """int8 codes and their zero point; uint8 codes become the int8 codes of the same real numbers."""
    if x.data.dtype != torch.uint8:
        return x.data, x.zero_point
    zero = torch.zeros_like(x.scale, dtype=torch.int32) if x.zero_point is None else x.zero_point
    return (x.data ^ 128).view(torch.int8), zero - 128
