"""QEmbeddings of which every rank holds a share: some columns of every row, or some of the rows."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.fx import Proxy

from pyquant.core.dtypes import describe
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.integrations.distributed.layouts import Layouts, bounds
from pyquant.integrations.distributed.state import Share, cut
from pyquant.integrations.distributed.sums import summed
from pyquant.nn.linear_state import traced
from pyquant.nn.qembedding import QEmbedding


class SharedQEmbedding(Share, QEmbedding):
    """What both have in common."""

    _cut: ClassVar[dict[str, int]]  # tensors of the state of which ranks have parts, and along which dimension

    def to_float(self, dtype: torch.dtype | None = None) -> nn.Embedding:
        """Refused: a share is no table of its own. gather_quantized_ makes whole tables of shares."""
        raise UnsupportedError(
            f"a float table of {self.share}: call gather_quantized_ of pyquant.integrations.distributed first"
        )

    def extra_repr(self) -> str:
        """The share in one line, as print(model) shows it."""
        return f"{super().extra_repr()}, {self.share}"

    @classmethod
    def take(cls, layer: QEmbedding, layouts: Layouts, source: int | None) -> None:
        """Make a whole QEmbedding a share of itself, in place."""
        whole = layer._state()
        parts, begin, share = cut(whole, layouts, cls._cut, source), *cls._described(layer, layouts)
        layer.__class__ = cls
        layer._become(layouts, cls._cut, whole, share)  # type: ignore[attr-defined, operator]
        layer.__dict__["_begin"] = begin
        rows, columns = parts["weight"].shape
        layer._hold(rows, columns, layer.padding_idx, layer.dtype)
        layer._fill(parts)

    @classmethod
    def _described(cls, layer: QEmbedding, layouts: Layouts) -> tuple[int, str]:
        """Where the share begins, and the share in words."""
        what, size = ("columns", layer.embedding_dim) if cls._cut == {"weight": 1} else ("rows", layer.num_embeddings)
        begin, end = bounds(size, layouts.world, layouts.rank)
        return begin, f"{what} {begin} to {end} of {size} over {layouts.world} ranks"

    def gather(self) -> None:
        """Make the share the whole table that it is of, in place; every rank must."""
        whole = self.whole_state()
        self.__class__ = QEmbedding  # type: ignore[assignment]
        for name in ("_layouts", "_placements", "_whole_shapes", "share", "_begin"):
            self.__dict__.pop(name, None)
        rows, columns = whole["weight"].shape
        self._hold(rows, columns, self.padding_idx, self.dtype)
        self._fill(whole)


class ColwiseQEmbedding(SharedQEmbedding):
    """A QEmbedding that holds some of the columns, and gives some of every vector: the bits of the whole one."""

    _cut: ClassVar = {"weight": 1}

    def forward(self, input: Any) -> Any:
        """Vectors: input int32 or int64 [...], whole on every rank, or a DTensor -> [..., columns], in the layout asked
        for."""
        if isinstance(input, Proxy):
            return traced(self, input)
        y = super().forward(self._layouts.enter(input, Replicate()))
        return self._layouts.leave(y, Shard(y.dim() - 1), (*y.shape[:-1], self._whole_shapes["weight"][1]))


class RowwiseQEmbedding(SharedQEmbedding):
    """A QEmbedding that holds some of the rows: of each vector one rank knows the numbers, and the others add zeros,
    which is exact."""

    _cut: ClassVar = {"weight": 0, "weight_scale": 0}
    _begin: int  # the first of this rank's rows

    def forward(self, input: Any) -> Any:
        """Vectors: input int32 or int64 [...], whole on every rank, or a DTensor -> [..., embedding_dim].

        Raises ArgumentError for an index that is in no rank's rows, on the CPU.
        """
        if isinstance(input, Proxy):
            return traced(self, input)
        ids, rows = self._layouts.enter(input, Replicate()), self._whole_shapes["weight"][0]
        if isinstance(ids, Tensor) and ids.dtype in (torch.int64, torch.int32):
            if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
                raise ArgumentError(
                    "input", f"indices {int(ids.min())} to {int(ids.max())}", f"indices in [0, {rows - 1}]"
                )
        else:
            raise ArgumentError("input", describe(ids), "an int64 or int32 tensor of indices")
        mine = (ids >= self._begin) & (ids < self._begin + self.num_embeddings)
        if self.num_embeddings:
            found = super().forward(torch.where(mine, ids - self._begin, 0))
        else:
            found = torch.zeros(*ids.shape, self.embedding_dim, dtype=self.dtype, device=ids.device)
        part = torch.where(mine.unsqueeze(-1), found, torch.zeros((), dtype=found.dtype, device=found.device))
        y = summed(part, self._layouts, self._layouts.outputs)
        return self._layouts.leave(y, self._layouts.outputs, (*ids.shape, self.embedding_dim))
