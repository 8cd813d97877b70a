"""How a layer with a weight matrix is made: of codes, of float weights, or of another layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pyquant.core.dtypes import FLOATS, dtype_name
from pyquant.core.patches import Patches
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.nn import state, weights
from pyquant.nn.linear_buffers import activation_and_limits, check_scheme
from pyquant.nn.linear_state import LinearState

Self = TypeVar("Self", bound="LinearCodes")
Float = TypeVar("Float", nn.Linear, nn.Conv2d)


def float_weights(weight: Tensor, scheme: QScheme) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What from_codes takes, of float weights [N, K]: codes, scale and zero point (16 bits: a copy)."""
    if not scheme.is_float:
        return weights.quantise_weight(weight, scheme.weights)
    if weight.dtype not in FLOATS:
        raise ArgumentError("weight", dtype_name(weight.dtype), "float32, float16 or bfloat16")
    name = scheme.float_dtype or ""
    converted = weight.to(getattr(torch, name), memory_format=torch.contiguous_format, copy=True)
    if not weights.is_finite(converted):
        row, column = (~converted.isfinite()).nonzero()[0].tolist()
        most = torch.finfo(converted.dtype).max
        got = f"{weight[row, column].item()} at [{row}, {column}]"
        other = "; FP16('bfloat16') holds larger ones" if name == "float16" else ""
        raise NonFiniteError("weight", got, f"finite numbers that {name} holds, up to {most:g}{other}")
    return converted, None, None


class LinearCodes(LinearState):
    """The constructors that QLinear and QConv2d share, and the ways back to float weights."""

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
        return layer._take(
            codes,
            {
                "weight_scale": weight_scale,
                "weight_zero_point": weight_zero_point,
                "bias": bias,
                "output_scale": output_scale,
                "output_zero_point": output_zero_point,
                "input_zero_point": input_zero_point,
                "input_scale": input_scale,
            },
        )

    @classmethod
    def _from_matrix(
        cls: type[Self], matrix: Tensor, layer: nn.Linear | nn.Conv2d, scheme: QScheme, **given: Any
    ) -> Self:
        """A layer with the weights [N, K] of a float one, by the scheme's calibrator, and its bias."""
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
        return self._form.matrix(self.storage, self.weight_scale_, self.weight_zero_point_)

    def _filled(self, layer: Float, dtype: torch.dtype) -> Float:
        """A float layer on the meta device with the numbers of this one."""
        layer.weight = nn.Parameter(self._real(dtype))
        if self.bias_ is not None:
            layer.bias = nn.Parameter(self.bias_.to(dtype, copy=True))
        return layer.train(self.training)


def check_matrix(codes: object, allowed: str, divisor: int = 1) -> None:
    """Raise ArgumentError where codes are no matrix with a number of columns that `divisor` divides."""
    if not isinstance(codes, Tensor) or codes.dim() != 2 or codes.shape[1] % divisor:
        got = f"{type(codes).__name__} {list(codes.shape) if isinstance(codes, Tensor) else repr(codes)}"
        raise ArgumentError("codes", got[:120], allowed)
