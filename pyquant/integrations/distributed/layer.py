"""QLinears of which every rank holds a share: what all have in common, and rows of the weight (colwise)."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.fx import Proxy

from pyquant.core import arguments
from pyquant.core.qtensor import QTensor
from pyquant.errors import UnsupportedError
from pyquant.integrations.distributed.layouts import Layouts, bounds, is_last
from pyquant.integrations.distributed.state import Share, cut
from pyquant.nn.linear_state import traced
from pyquant.nn.qlinear import QLinear

_OF_ROWS: Final = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "bias")  # a row for each output


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
        for name in ("_layouts", "_placements", "_whole_shapes", "share", "packs", "_products", "_is_product_packed"):
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

    def forward(self, x: Any = None, residual: Tensor | None = None, *, input: Any = None) -> Any:
        """The layer.

        x         as QLinear takes it, in the layout of input_layouts, or a DTensor; a QTensor only where it is whole.
        residual  [..., outputs of this rank], where the result is left on the ranks.
        ->        the outputs of this rank, or what output_layouts and use_local_output make of all.
        """
        x = arguments.x_or_input(x, input)
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


def redescribe(layer: QLinear, in_features: int, out_features: int) -> None:
    """Give a layer other sizes; its numbers are to be filled in."""
    clamp = layer.clamp if layer.activation == "clamp" else None
    has_bias = "bias" in layer.state_slots
    layer._describe(in_features, out_features, has_bias, layer.scheme, layer.activation, clamp, layer.dtype)
