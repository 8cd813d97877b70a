"""A layer in both forms: codes for the numbers of rows at which they are quicker, real weights for the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from pyquant.core import arguments
from pyquant.core.qtensor import QTensor
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError
from pyquant.nn.kernel_info import KernelInfo
from pyquant.nn.linear_buffers import written
from pyquant.nn.qlinear import QLinear
from pyquant.numerics.activation import ACTIVATIONS

Self = TypeVar("Self", bound="TwoFormLinear")


class TwoFormLinear(QLinear):
    """A QLinear that also holds its dequantised weights, and multiplies by these where that is quicker.

    Made by pyquant.auto_ with `spare_bytes`. rows_in_floats decides by the number of rows of a call alone, so that a
    row's result depends on how many came with it: in integers it has the bits of the contract, in floats it has a
    tolerance. state_dict and files hold the codes, as of any QLinear: what is loaded elsewhere is a QLinear, and auto_
    decides again there. load_state_dict, .to(), .half() and deepcopy keep both forms, the real weights following the
    codes. link_ and fuse_ come before auto_.
    """

    rows_in_floats: tuple[tuple[int, float], ...]  # (first, last) numbers of rows, ascending
    float_weight: Tensor  # None while the layer lacks its numbers

    @classmethod
    def of(cls: type[Self], layer: QLinear, rows_in_floats: Iterable[tuple[int, float]]) -> Self:
        """The layer in both forms; its hooks, attributes and codes are shared with it.

        rows_in_floats  (first, last) numbers of rows that go to the real weights; the last may be infinite.
        Raises ArgumentError for a layer that gives codes, or has none.

        Example:
            >>> from pyquant.core.presets import W8A8Dynamic
            >>> layer = QLinear.from_float(torch.nn.Linear(8, 4), W8A8Dynamic())
            >>> both = TwoFormLinear.of(layer, [(64, math.inf)])
            >>> both.extra_bytes, [both.kernel_info(M).is_exact for M in (1, 64)]
            (128, [True, False])
        """
        if layer.scheme.outputs is not None or layer.scheme.is_float or layer.missing:
            raise ArgumentError("layer", f"a QLinear of {layer.scheme}", "one that has codes and gives real numbers")
        both = cls.__new__(cls)
        both.__dict__.update(layer.__dict__)
        both.__dict__["_buffers"], both.__dict__["_parameters"] = dict(layer._buffers), dict(layer._parameters)
        both.__dict__["_non_persistent_buffers_set"] = {*layer._non_persistent_buffers_set, "float_weight"}
        both.rows_in_floats = tuple(rows_in_floats)
        both._buffers["float_weight"] = None
        both._refresh()
        return both

    @property
    def extra_bytes(self) -> int:
        """Bytes that the real weights take beside the codes."""
        return self.in_features * self.out_features * self.dtype.itemsize

    def is_in_floats(self, rows: int) -> bool:
        """Whether a call of so many rows goes to the real weights."""
        return any(first <= rows <= last for first, last in self.rows_in_floats)

    def forward(
        self,
        x: Tensor | QTensor | None = None,
        residual: Tensor | None = None,
        *,
        input: Tensor | QTensor | None = None,
    ) -> Any:
        """As QLinear; in floats where is_in_floats says so of the number of rows of x."""
        x = arguments.x_or_input(x, input)
        if isinstance(x, Tensor) and not x.is_nested and self._takes(x):
            return self._in_floats(x, residual)
        return super().forward(x, residual)

    def reference(self, x: Tensor | QTensor, residual: Tensor | None = None) -> Any:
        """As QLinear; of rows in floats the product in float64, rounded once to the type of x."""
        if isinstance(x, Tensor) and self._takes(x):
            wide = self._in_floats(x.double(), None if residual is None else residual.double())
            return wide.to(x.dtype)
        return super().reference(x, residual)

    def kernel_info(self, M: int = 1) -> KernelInfo:
        """As QLinear; for rows in floats it is torch's product."""
        if isinstance(M, int) and not isinstance(M, bool) and self.is_in_floats(M):
            reason = "dequantised weights, held beside the codes, were quicker at so many rows (auto_)"
            return KernelInfo("torch matmul", str(self.storage.device), False, reason)
        return super().kernel_info(M)

    def with_outputs(
        self: Self, outputs: TensorScheme | None, scale: Tensor | None = None, zero_point: Tensor | None = None
    ) -> Self:
        """Refused: real weights give no codes. Raises ArgumentError."""
        raise ArgumentError("model", "a layer in both forms, made by auto_", "link_ before auto_")

    def extra_repr(self) -> str:
        """The layer in one line, as print(model) shows it."""
        spans = ", ".join(f"{first}-{'' if last == math.inf else int(last)}" for first, last in self.rows_in_floats)
        return f"{super().extra_repr()}, in floats at rows {spans}"

    def _takes(self, x: Tensor) -> bool:
        """Whether rows go to the real weights; what is wrong with others, QLinear says."""
        is_right = x.is_floating_point() and x.dim() > 0 and x.shape[-1] == self.in_features > 0
        return is_right and not self.missing and self.is_in_floats(x.numel() // self.in_features)

    def _in_floats(self, x: Tensor, residual: Tensor | None) -> Tensor:
        weight, bias = self.float_weight, self.bias_
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            weight = weight.to(x.dtype)
        y = functional.linear(x, weight, None if bias is None else bias.to(weight.dtype))
        if self.activation != "none":
            activation = ACTIVATIONS[self.activation]
            y = activation.module(*activation.limits(*self.clamp))(y)
        return y if residual is None else (y + residual).to(y.dtype)

    def _refresh(self, in_place: bool = False) -> None:
        real = None if self.missing else self._real(self.dtype)
        if in_place and real is not None:  # a captured graph reads it where it is
            real = written(self._buffers["float_weight"], real)
        self._buffers["float_weight"] = real

    def _fill(self, tensors: Mapping[str, Tensor], *, in_place: bool = False, waits: bool = False) -> None:
        super()._fill(tensors, in_place=in_place, waits=waits)
        self._refresh(in_place)

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.dtype, self.storage.device
        former, self._buffers["float_weight"] = self.float_weight, None  # made anew from the codes, never cast twice
        try:
            super()._apply(fn, recurse)
        except BaseException:
            self._buffers["float_weight"] = former
            raise
        if before != (self.dtype, self.storage.device) or self._buffers["float_weight"] is None:
            self._refresh()
        return self
