"""The pieces of an explicit integer chain: quantise once, hand codes from layer to layer, add a quantised residual."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from pyquant import ops
from pyquant.core import arguments
from pyquant.core.dtypes import FLOATS, KERNEL_BITS, KERNEL_BITS_TEXT, describe, dtype_name
from pyquant.core.qtensor import PackedQTensor, QTensor
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError
from pyquant.nn import state
from pyquant.nn.linear_call import LinearCall, same_memory, unpacked
from pyquant.nn.linear_state import traced

ExpectedRange = tuple[TensorScheme, Tensor, Tensor | None]  # scheme, scale, zero point

_ACTIVATIONS: Final = (None, "relu")


def _is_zero(value: object) -> bool:
    """The number 0, which symmetric and dynamic schemes take for no zero point."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not bool(value)
    return type(value) is int and value == 0


def _is_taken(scheme: TensorScheme, may_be_dynamic: bool) -> bool:
    """Whether there are kernels for a scheme of a chain."""
    granularity = "per_token" if scheme.dynamic else "per_tensor"
    is_wanted = may_be_dynamic or not scheme.dynamic
    return is_wanted and scheme.bits in KERNEL_BITS and scheme.granularity == granularity


class _WithRange(nn.Module):
    """A static scale and zero point, which keep their types whatever the model is cast to."""

    scale: Tensor  # None with a dynamic scheme
    zero_point: Tensor | None

    def _hold(
        self, scheme: object, scale: float | Tensor | None, zero_point: int | Tensor | None, may_be_dynamic: bool
    ) -> None:
        scheme = TensorScheme() if scheme is None else scheme
        if not isinstance(scheme, TensorScheme) or not _is_taken(scheme, may_be_dynamic):
            allowed = "static per_tensor" + " or dynamic per_token" * may_be_dynamic
            raise ArgumentError("scheme", str(scheme), f"{KERNEL_BITS_TEXT} bits, {allowed}")
        self.scheme = scheme
        home = scale.device if isinstance(scale, Tensor) else torch.device("cpu")
        slot = state.Slot(torch.float32, (1,))
        self.register_buffer("scale", None if scheme.dynamic else state.scalar("scale", scale, slot, home))
        if (scale is None) != scheme.dynamic:
            got = "None" if scale is None else scale
            raise ArgumentError("scale", got, f"{'None' if scheme.dynamic else 'a number > 0'} with scheme {scheme}")
        if scheme.symmetric or scheme.dynamic:
            if zero_point is not None and not _is_zero(zero_point):
                raise ArgumentError("zero_point", zero_point, f"None with scheme {scheme}")
            zero_point = None
        elif zero_point is None:
            raise ArgumentError("zero_point", "None", f"a whole number with scheme {scheme}")
        slot = state.Slot(torch.int32, (1,), scheme.code_range)
        self.register_buffer("zero_point", state.scalar("zero_point", zero_point, slot, home))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _WithRange:
        for name, tensor in self._buffers.items():
            if tensor is not None:
                self._buffers[name] = state.same_type(fn, tensor)
        return self

    def extra_repr(self) -> str:
        """The scheme in one line, as print(model) shows it."""
        return str(self.scheme)


class Quantize(_WithRange):
    """The beginning of a chain: real numbers in, codes (a QTensor) out.

    scale       real size of one code; None with a dynamic scheme.
    zero_point  code of real 0 of an affine static scheme, else None.
    scheme      TensorScheme of 4 or 8 bits, static per tensor, or dynamic per token (one scale a row).
    Raises ArgumentError or SchemeError naming what does not fit. Source: docs/chains.md.

    Example:
        >>> Quantize(0.5)(torch.tensor([1.0, -2.0])).data.tolist()
        [2, -4]
    """

    def __init__(
        self,
        scale: float | Tensor | None = None,
        zero_point: int | Tensor | None = None,
        scheme: TensorScheme | None = None,
    ) -> None:
        super().__init__()
        self._hold(scheme, scale, zero_point, may_be_dynamic=True)

    def forward(self, x: Tensor) -> QTensor:
        """x float, any shape (dynamic: [..., K]) -> codes of the same shape; int4 ones two a byte (a PackedQTensor)
        where the device's tensor cores read them so."""
        s = self.scheme
        if not isinstance(x, Tensor) or x.dtype not in FLOATS:
            raise ArgumentError("x", describe(x), "a float tensor")
        if s.dynamic:
            codes, scale, zero_point = ops.quantize_dynamic(x, "per_token", 0, s.symmetric, *s.code_range)
            made = QTensor(codes, scale, None if s.symmetric else zero_point)
        else:
            codes = ops.quantize(x, self.scale, self.zero_point, "per_tensor", 0, *s.code_range)
            made = QTensor(codes, self.scale, self.zero_point)
        if not s.code_type.is_packed or codes.dim() == 0 or not ops.packs_int4(codes.device, codes.shape[-1]):
            return made
        return PackedQTensor(ops.pack_int4(codes), made.scale, made.zero_point)


class Dequantize(nn.Module):
    """The end of a chain: codes in, real numbers out.

    dtype  of the result: float32, float16 or bfloat16.

    Example:
        >>> Dequantize()(QTensor(torch.tensor([2, -4], dtype=torch.int8), torch.tensor([0.5]))).tolist()
        [1.0, -2.0]
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if dtype not in FLOATS:
            raise ArgumentError("dtype", dtype, "torch.float32, torch.float16 or torch.bfloat16")
        self.dtype = dtype

    def forward(self, x: QTensor) -> Tensor:
        """scale * (data - zero_point), rounded once to `dtype`; the scale is one number, or one a row."""
        if not isinstance(x, QTensor):
            raise ArgumentError("x", type(x).__name__, "a QTensor")
        return dequantise(x, self.dtype)

    def extra_repr(self) -> str:
        """The type of the result, as print(model) shows it."""
        return dtype_name(self.dtype)


class QSequential(nn.Sequential):
    """An nn.Sequential whose joints are checked when it is made: what gives codes is followed by what takes those.

    Raises ArgumentError naming the two members of a joint that cannot work: codes for a layer that takes real numbers,
    or codes of another scale than the next layer was calibrated with.

    Example:
        >>> from pyquant.core.presets import W8A8
        >>> from pyquant.nn.qlinear import QLinear
        >>> chain = QSequential(Quantize(0.1), QLinear.from_float(nn.Linear(4, 2), W8A8(), input_scale=0.1))
        >>> chain(torch.ones(1, 4)).shape
        torch.Size([1, 2])
    """

    def __init__(self, *args: Any) -> None:
        parts = args[0].values() if len(args) == 1 and isinstance(args[0], Mapping) else args
        for part in parts:
            if not isinstance(part, nn.Module):
                raise ArgumentError("modules", type(part).__name__, "torch.nn.Modules, or one OrderedDict of them")
        super().__init__(*args)
        members = [(name, member) for name, member in self.named_children() if type(member) is not nn.Identity]
        for (before, giver), (after, taker) in itertools.pairwise(members):
            wrong = joint_error(giver, taker)
            if wrong is not None:
                raise ArgumentError("args", f"'{before}' before '{after}': {wrong}", "members that fit each other")


class Residual(nn.Module):
    """Marks the skip branch of a block: `x = layer(x) + self.residual(skip)`. Does nothing in a float model.

    insert_fake_quantize_ replaces it by a rounding one (under a static scheme), convert_ that by QResidual: so the
    branch is known to be quantised, and a layer that produces it may hand over codes. So does quantize_ with a recipe
    (`residuals`); with a scheme or a config it leaves the branch as it is.

    Example:
        >>> Residual()(torch.ones(2)).tolist()
        [1.0, 1.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        """x, unchanged."""
        return x


class QResidual(_WithRange):
    """The skip branch as codes stand for it: real numbers are rounded to the nearest code, codes are dequantised.

    scale, zero_point, scheme   as in Quantize, static.
    The result is real again: it is the residual operand of a kernel's epilogue, which adds in float32.
    """

    def __init__(
        self, scale: float | Tensor, zero_point: int | Tensor | None = None, scheme: TensorScheme | None = None
    ) -> None:
        super().__init__()
        self._hold(scheme, scale, zero_point, may_be_dynamic=False)

    def forward(self, x: Tensor | QTensor) -> Tensor:
        """x float, or a QTensor of this module's own scale -> float of x's type (codes: float32). Straight-through
        gradient. Raises ArgumentError for codes of another scale."""
        if isinstance(x, QTensor):
            if not torch.compiler.is_compiling() and not _same_range(x, self.scale, self.zero_point):
                got, own = _range_text(x.scale, x.zero_point), _range_text(self.scale, self.zero_point)
                raise ArgumentError("x", f"codes of {got}", f"codes of {own}")
            return dequantise(x, torch.float32)
        y: Tensor = ops.fake_quantize(x, self.scale, self.zero_point, "per_tensor", 0, *self.scheme.code_range)[0]
        return y


class QResidualAdd(nn.Module):
    """y = activation(layer(x) + residual), one kernel where the layer is a QLinear or QConv2d.

    layer       the module that computes the main branch last: float, simulated or quantised.
    activation  None or 'relu', applied to the sum.

    A float model holds it as it is. insert_fake_quantize_ and convert_ replace `layer` and the Residual in `residual`
    like any others; from then on the quantised residual is an operand of the layer's epilogue. Where the layer gives
    codes, ReLU is a maximum over codes, and costs nothing where the zero point is the smallest code
    (`relu_is_free`, set by link_).

    Example:
        >>> add = QResidualAdd(nn.Linear(4, 4), activation="relu")
        >>> add(torch.ones(1, 4), torch.ones(1, 4)).shape
        torch.Size([1, 4])
    """

    def __init__(self, layer: nn.Module, activation: str | None = None) -> None:
        super().__init__()
        arguments.module("layer", layer)
        if activation not in _ACTIVATIONS:
            raise ArgumentError("activation", repr(activation), " or ".join(map(repr, _ACTIVATIONS)))
        self.layer, self.residual, self.activation = layer, Residual(), activation
        self.relu_is_free = False

    def forward(self, x: Any, residual: Any) -> Any:
        """x of the layer, residual of the shape of its result (both float or QTensor) -> as the layer gives it."""
        if isinstance(x, Proxy) and isinstance(self.layer, LinearCall):  # what comes, floats or codes, a trace hides
            return traced(self, x, residual)
        skip = self.residual(residual)
        if isinstance(self.layer, LinearCall):
            y = self.layer(x, residual=skip)
        else:
            y = self.layer(x) + skip
        if self.activation is None or (isinstance(y, QTensor) and self.relu_is_free):
            return y
        if not isinstance(y, QTensor):
            return torch.relu(y)
        plain = unpacked(y)
        floor = torch.zeros(1, dtype=torch.int8, device=y.data.device) if y.zero_point is None else y.zero_point
        codes = torch.maximum(plain.data, floor.to(torch.int8))
        return type(y)(ops.pack_int4(codes) if isinstance(y, PackedQTensor) else codes, y.scale, y.zero_point)

    def extra_repr(self) -> str:
        """The activation, as print(model) shows it."""
        return "" if self.activation is None else f"activation={self.activation}"


def dequantise(x: QTensor, dtype: torch.dtype) -> Tensor:
    """Real numbers of codes; the scale is one number or one a row."""
    x = unpacked(x)
    granularity = "per_tensor" if x.scale.numel() == 1 else "per_token"
    return ops.dequantize(x.data, x.scale, x.zero_point, granularity, 0, dtype)


def expected_range(taker: nn.Module) -> ExpectedRange | None:
    """Scheme, scale and zero point of the codes that a module takes; None where it takes real numbers alone."""
    if isinstance(taker, LinearCall):
        inputs = taker.scheme.inputs
        if inputs is None or inputs.dynamic or taker.input_scale_ is None:
            return None
        return inputs, taker.input_scale_, taker.input_zero_point_
    if isinstance(taker, QResidual):
        return taker.scheme, taker.scale, taker.zero_point
    return None


def joint_error(giver: nn.Module, taker: nn.Module) -> str | None:
    """Why a module cannot follow another one in a chain; None where it can, or where nothing is known."""
    gives_codes = isinstance(giver, Quantize) or (isinstance(giver, LinearCall) and giver.scheme.outputs is not None)
    if not gives_codes:
        return "it takes codes and is given real numbers" if isinstance(taker, Dequantize) else None
    if isinstance(taker, (Dequantize, nn.Sequential)) or not _is_known(taker):
        return None
    if isinstance(taker, LinearCall) and taker.scheme.inputs is not None and taker.scheme.inputs.dynamic:
        return None  # takes codes of any scale
    expected = expected_range(taker)
    if expected is None:
        return f"a {type(taker).__name__} takes real numbers and is given codes"
    scale, zero_point = (
        (giver.scale, giver.zero_point)
        if isinstance(giver, Quantize)
        else (giver.output_scale_, giver.output_zero_point_)  # type: ignore[union-attr]
    )
    if scale is None or not same_numbers(scale, expected[1]) or not same_numbers(zero_point, expected[2]):
        got = "a scale of each row's own" if scale is None else _range_text(scale, zero_point)  # type: ignore[arg-type]
        return f"codes of {got} for a layer of {_range_text(expected[1], expected[2])}"
    return None


def _is_known(taker: nn.Module) -> bool:
    kind = type(taker)
    return isinstance(taker, (LinearCall, _WithRange)) or kind.__module__.startswith("torch.nn.modules")


def _same_range(x: QTensor, scale: Tensor, zero_point: Tensor | None) -> bool:
    if same_memory(x.scale, scale) and same_memory(x.zero_point, zero_point):
        return True
    return x.scale.numel() == 1 and same_numbers(x.scale, scale) and same_numbers(x.zero_point, zero_point)


def same_numbers(a: Any, b: Any) -> bool:
    one, two = (0 if v is None else v.item() for v in (a, b))
    return bool(one == two)


def _range_text(scale: Tensor, zero_point: Tensor | None) -> str:
    zero = 0 if zero_point is None else zero_point.flatten()[:1].tolist()[0]
    return f"scale {scale.flatten()[:1].tolist()[0]:.6g}, zero point {zero}"
