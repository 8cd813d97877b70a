"""QLinear: a Linear whose weights are held as codes and whose product runs in integers (or 16-bit floats)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from pyquant.core import arguments
from pyquant.core.dtypes import FLOATS
from pyquant.core.presets import W8A8Dynamic
from pyquant.core.qtensor import QTensor
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.nn import state, weights
from pyquant.nn.linear_call import OP_ERRORS, LinearCall

_qlinear = torch.ops.pyquant.qlinear.default
_weight_only = torch.ops.pyquant._weight_only.default
_SCALE, _ZERO_POINT, _BIAS = (state.held(name) for name in ("weight_scale", "weight_zero_point", "bias"))


def _is_written_down() -> bool:
    """Whether a compiler or torch.jit.trace makes a graph of the call."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]


class QLinear(LinearCall):
    """y = activation(x @ W.T + bias) + residual, with W quantised as `scheme` says.

    in_features, out_features, bias, device   as in torch.nn.Linear.
    scheme      QScheme; decides what is stored and how the product runs.
    activation  None, 'relu', 'gelu', 'gelu_tanh', 'silu', or 'clamp' with limits in `clamp`.
    clamp       (low, high) of activation 'clamp'.
    dtype       result type where the input is codes; a float input gives its own type. Follows .half(), .bfloat16().

    A layer made this way holds zero weights and is meant to be filled by load_state_dict; use from_float or from_codes
    otherwise. Its state: `weight` (int8 [N, K]) or `weight_packed` (uint8 [N, ceil(K / 2)], 4 bits), `weight_scale`,
    and as the scheme needs `weight_zero_point`, `bias`, `input_scale`, `input_zero_point`, `output_scale`,
    `output_zero_point`. Scales and bias are held in float32, zero points in int32, whatever the model is cast to; the
    attributes `weight` and `bias` show `dtype`, as a float layer's do. In memory the codes are held once, in `storage`,
    in the layout of the device, with copies of the numbers; what is written into an attribute in place
    (`layer.input_scale.mul_(2)`) goes into both, or is refused as an assignment of it would be.

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
        scheme = W8A8Dynamic() if scheme is None else scheme
        self._describe(in_features, out_features, arguments.flag("bias", bias), scheme, activation, clamp, dtype)
        self._fill(state.fresh(self.state_slots, state.device_of(device)))

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
        """A QLinear with the weights of a float Linear, their ranges by the scheme's calibrator.

        linear        nn.Linear, float32, float16 or bfloat16, finite; not changed.
        input_scale   real size of one input code (static schemes): number or one-element tensor, finite and > 0.
        input_zero_point, output_zero_point   code of real 0 (affine static schemes).
        output_scale  real size of one output code (schemes with outputs).
        Raises SchemeError for a group size that does not divide in_features, or weights with the calibrator 'fixed';
        ArgumentError naming what is wrong.

        Example:
            >>> from pyquant.core.presets import W8A8
            >>> QLinear.from_float(nn.Linear(8, 4), W8A8(), input_scale=0.05).input_scale.item() > 0
            True
        """
        if not isinstance(linear, nn.Linear):
            raise ArgumentError("linear", type(linear).__name__, "a torch.nn.Linear")
        return cls._from_matrix(
            linear.weight.detach(),
            linear,
            scheme,
            input_scale=input_scale,
            input_zero_point=input_zero_point,
            output_scale=output_scale,
            output_zero_point=output_zero_point,
            activation=activation,
            clamp=clamp,
        )

    def to_float(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """A torch.nn.Linear with the dequantised weights and the bias; the activation is not part of it.

        dtype  None: the layer's own `dtype`. In float32 the weights are exactly scale * (code - zero_point).

        Example:
            >>> QLinear.from_float(nn.Linear(8, 4), W8A8Dynamic()).to_float().weight.shape
            torch.Size([4, 8])
        """
        linear = nn.Linear(self.in_features, self.out_features, self.bias_ is not None, device="meta")
        return self._filled(linear, weights.float_type(dtype, self.dtype))

    # ---- running

    def forward(
        self,
        x: Tensor | QTensor | None = None,
        residual: Tensor | None = None,
        *,
        input: Tensor | QTensor | None = None,
    ) -> Any:
        """The layer.

        x         float32, float16 or bfloat16 [..., in_features], or a QTensor of codes. A static layer takes codes of
                  its own input scale; a dynamic layer per-token codes, with zero points only where its own inputs have
                  them. It takes others too (per tensor, or zero points where it has none): exact, but its weights are
                  repacked for each such call.
        residual  float [..., out_features], added after the activation; or None.
        input     x by the name that it has in torch's layer.
        ->        [..., out_features] in x's type (`dtype` for codes), or a QTensor where the scheme has outputs. A row
                  of x that holds NaN or infinity gives a row of NaN with dynamic inputs.
        Gradients flow to float x (straight through the rounding; where a static range clips, none) and to residual.
        Raises ArgumentError, UnsupportedError.
        """
        if self._is_direct and isinstance(x, Tensor) and not x.is_nested:
            try:
                if not x.requires_grad and residual is input is None and forward_ad._current_level < 0:
                    return _qlinear(x, self._buffers["storage"], None, self._spec)
            except OP_ERRORS as error:
                self._explain(error, x)
        elif self._how is not None and isinstance(x, Tensor) and not (x.is_nested or _is_written_down()):
            # Graphs have the op of which compilers know the epilogue, and whose derivative there is. Columns are
            # counted here: of int4, two a byte, the op could not tell one less than there are.
            try:
                is_plain = not x.requires_grad and residual is input is None and forward_ad._current_level < 0
                if is_plain and self.in_features in x.shape[-1:]:
                    held = self._buffers
                    scaled = (held["storage"], held[_SCALE], held[_ZERO_POINT], held[_BIAS])
                    return _weight_only(x, *scaled, None, *self._how)
            except OP_ERRORS as error:
                self._check_operand(x, FLOATS)
                self._explain(error, x)
        return self._forward_general(arguments.x_or_input(x, input), residual)
