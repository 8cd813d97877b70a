"""QLinear: a Linear whose weights are held as codes and whose product runs in integers (or 16-bit floats)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from pyquant.core import arguments
from pyquant.core.presets import W8A8Dynamic
from pyquant.core.qtensor import QTensor
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.nn import reference, state, weights
from pyquant.nn.linear_call import OP_ERRORS, LinearCall, float_weights
from pyquant.nn.linear_state import check_scheme

_qlinear = torch.ops.pyquant.qlinear.default


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
    in the layout of the device; scales and bias are copied into it, so change them by assignment (`layer.bias = t`) or
    load_state_dict, not in place.

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
        codes, scale, zero_point = float_weights(linear.weight.detach(), scheme)
        bias = None if linear.bias is None else linear.bias.detach().to(torch.float32, copy=True)
        return cls.from_codes(
            codes, scale, scheme=scheme, bias=bias, weight_zero_point=zero_point, input_scale=input_scale,
            input_zero_point=input_zero_point, output_scale=output_scale, output_zero_point=output_zero_point,
            activation=activation, clamp=clamp, dtype=linear.weight.dtype,
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
        return layer._take(codes, {
            "weight_scale": weight_scale, "weight_zero_point": weight_zero_point, "bias": bias,
            "input_scale": input_scale, "input_zero_point": input_zero_point,
            "output_scale": output_scale, "output_zero_point": output_zero_point,
        })  # fmt: skip

    def to_float(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """A torch.nn.Linear with the dequantised weights and the bias; the activation is not part of it.

        dtype  None: the layer's own `dtype`. In float32 the weights are exactly scale * (code - zero_point).

        Example:
            >>> QLinear.from_float(nn.Linear(8, 4), W8A8Dynamic()).to_float().weight.shape
            torch.Size([4, 8])
        """
        dtype = weights.float_type(dtype, self.dtype)
        real = self.dequantised_weight()
        has_bias = self.bias_ is not None
        linear = nn.Linear(self.in_features, self.out_features, has_bias, device="meta")
        linear.weight = nn.Parameter(real.to(dtype))
        if self.bias_ is not None:
            linear.bias = nn.Parameter(self.bias_.to(dtype, copy=True))
        return linear.train(self.training)

    # ---- running

    def forward(self, x: Tensor | QTensor, residual: Tensor | None = None) -> Any:
        """The layer.

        x         float32, float16 or bfloat16 [..., in_features], or a QTensor of codes. A static layer takes codes of
                  its own input scale; a dynamic layer per-token codes, with zero points only where its own inputs have
                  them. It takes others too (per tensor, or zero points where it has none): exact, but its weights are
                  repacked for each such call.
        residual  float [..., out_features], added after the activation; or None.
        ->        [..., out_features] in x's type (`dtype` for codes), or a QTensor where the scheme has outputs. A row
                  of x that holds NaN or infinity gives a row of NaN with dynamic inputs.
        Gradients flow to float x (straight through the rounding; where a static range clips, none) and to residual.
        Raises ArgumentError, UnsupportedError.
        """
        if self._is_direct and isinstance(x, Tensor):
            try:
                if not x.requires_grad and residual is None and forward_ad._current_level < 0:
                    return _qlinear(x, self._buffers["storage"], None, self._spec)
            except OP_ERRORS as error:
                self._explain(error, x)
        return self._forward_general(x, residual)

    def reference(self, x: Tensor | QTensor, residual: Tensor | None = None) -> Any:
        """What forward must give, from pyquant.numerics alone: equal bits for integer schemes.

        Arguments and result as in forward. Slow.

        Example:
            >>> layer, x = QLinear.from_float(nn.Linear(8, 4), W8A8Dynamic()), torch.randn(3, 8)
            >>> torch.equal(layer(x), layer.reference(x))
            True
        """
        self._check_call(x, residual)
        return reference.forward(self, x, residual)

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
