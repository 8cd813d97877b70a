"""QEmbedding: an Embedding with one int8 code an element and one float32 scale a row, a quarter of the memory."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from pyquant.core import arguments
from pyquant.core.dtypes import describe
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError
from pyquant.nn import state, weights
from pyquant.nn.linear_state import LinearState, traced
from pyquant.nn.nested import each_token

ROWS: Final = TensorScheme(bits=8, granularity="per_channel")


class QEmbedding(LinearState):
    """y[..., :] = scale[i] * weight[i, :] for the indices i in x.

    num_embeddings, embedding_dim, padding_idx, device   as in torch.nn.Embedding.
    dtype   type of the result: float32, float16 or bfloat16. Follows .half(), .bfloat16().

    State: `weight` int8 [num_embeddings, embedding_dim] in [-127, 127], `weight_scale` float32 [num_embeddings], finite
    and > 0. The product is one float32 multiplication, rounded once more to `dtype`.
    Raises ArgumentError. Source: docs/numerics.md 2.3.

    Example:
        >>> QEmbedding.from_float(nn.Embedding(10, 4))(torch.tensor([1, 2])).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        for name, value in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
            arguments.whole(name, value, 0, 2**31 - 1)
        where = state.device_of(device)
        self._hold(num_embeddings, embedding_dim, padding_idx, dtype)
        self._fill(state.fresh(self.state_slots, where))

    def _hold(self, rows: int, columns: int, padding_idx: int | None, dtype: torch.dtype) -> None:
        self.num_embeddings, self.embedding_dim, self.padding_idx = rows, columns, padding_idx
        self._describe(columns, rows, False, QScheme(ROWS), None, None, dtype)

    @classmethod
    def from_float(cls, embedding: nn.Embedding) -> QEmbedding:
        """A QEmbedding with max-calibrated rows of a float Embedding, which is not changed.

        Raises ArgumentError for another module or max_norm, NonFiniteError for NaN or infinity in the weights.
        """
        if not isinstance(embedding, nn.Embedding):
            raise ArgumentError("embedding", type(embedding).__name__, "a torch.nn.Embedding")
        if embedding.max_norm is not None:
            got = f"max_norm={embedding.max_norm}"
            raise ArgumentError("embedding", got, "max_norm=None: it changes the weights in place")
        codes, scale, _ = weights.quantise_weight(embedding.weight, ROWS)
        return cls.from_codes(codes, scale, padding_idx=embedding.padding_idx, dtype=embedding.weight.dtype)

    @classmethod
    def from_codes(
        cls, codes: Tensor, weight_scale: Tensor, *, padding_idx: int | None = None, dtype: torch.dtype = torch.float32
    ) -> QEmbedding:
        """A QEmbedding from int8 codes [num_embeddings, embedding_dim] and float32 scales [num_embeddings].

        Raises ArgumentError or NonFiniteError naming what is wrong.
        """
        if not isinstance(codes, Tensor) or codes.dim() != 2:
            raise ArgumentError("codes", type(codes).__name__, "int8 [num_embeddings, embedding_dim]")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._hold(codes.shape[0], codes.shape[1], padding_idx, dtype)
        state.check("codes", codes, layer.state_slots["weight"])
        layer._fill({"weight": codes, "weight_scale": weight_scale})
        return layer

    def to_float(self, dtype: torch.dtype | None = None) -> nn.Embedding:
        """A torch.nn.Embedding with the dequantised rows, in `dtype` (None: the layer's own)."""
        embedding = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        embedding.weight = nn.Parameter(self._real(weights.float_type(dtype, self.dtype)))
        return embedding.train(self.training)

    def forward(self, input: Tensor) -> Tensor:
        """Rows of real values: input int32 or int64 of any shape -> `dtype` [*input.shape, embedding_dim].

        Raises ArgumentError for another type, and for an index outside [0, num_embeddings) on the CPU.
        """
        x = input
        if isinstance(x, Proxy):
            return traced(self, x)  # type: ignore[no-any-return]
        if not isinstance(x, Tensor) or x.dtype not in (torch.int64, torch.int32):
            raise ArgumentError("input", describe(x), "an int64 or int32 tensor of indices")
        if x.is_nested:
            return each_token(self, x)
        codes = self.codes
        if x.device != codes.device:
            raise ArgumentError("input", f"device {x.device}", f"device {codes.device}, where the layer is")
        try:
            rows = torch.embedding(codes, x)
            scale = self.weight_scale_[x]
        except (IndexError, RuntimeError) as error:
            raise ArgumentError(
                "input", str(error).splitlines()[0], f"indices in [0, {self.num_embeddings - 1}]"
            ) from None
        real: Tensor = torch.ops.pyquant.dequantize(rows, scale, None, "per_token", 0, self.dtype)
        return real

    def extra_repr(self) -> str:
        """The layer in one line, as print(model) shows it."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, int8 per row"
