"""QEmbedding: an Embedding with one int8 code an element and one float32 scale a row, a quarter of the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from pyquant import ops
from pyquant.core import arguments
from pyquant.core.dtypes import FLOATS, describe
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.nn import foreign_saves, state, traced, weights
from pyquant.nn.weight_view import Form, QWeight, weight_of

ROWS = TensorScheme(bits=8, granularity="per_channel")


class QEmbedding(nn.Module):
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

    weight_scale: Tensor

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
        if dtype not in FLOATS:
            raise ArgumentError("dtype", dtype, "torch.float32, torch.float16 or torch.bfloat16")
        where = state.device_of(device)
        self.num_embeddings, self.embedding_dim, self.padding_idx, self.dtype = (
            num_embeddings, embedding_dim, padding_idx, dtype,
        )  # fmt: skip
        self.state_slots = {
            "weight": state.Slot(torch.int8, (num_embeddings, embedding_dim), ROWS.code_range),
            "weight_scale": state.Slot(torch.float32, (num_embeddings,)),
        }
        # the buffer that state_dict calls `weight`; the attribute of that name shows the numbers it stands for
        self._buffers["weight"] = torch.zeros(num_embeddings, embedding_dim, dtype=torch.int8, device=where)
        self.register_buffer("weight_scale", torch.ones(num_embeddings, device=where, dtype=torch.float32))
        self._parameters["stand_in"] = state.stand_in(dtype, where)

    @classmethod
    def from_float(cls, embedding: nn.Embedding) -> QEmbedding:
        """A QEmbedding with max-calibrated rows of a float Embedding, which is not changed.

        Raises ArgumentError for another module or max_norm, NonFiniteError for NaN or infinity in the weights.
        """
        if not isinstance(embedding, nn.Embedding):
            raise ArgumentError("embedding", type(embedding).__name__, "a torch.nn.Embedding")
        if embedding.max_norm is not None:
            raise ArgumentError(
                "embedding", f"max_norm={embedding.max_norm}", "max_norm=None: it changes the weights in place"
            )
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
        layer = cls(codes.shape[0], codes.shape[1], padding_idx, device="meta", dtype=dtype)
        for name, tensor in (("weight", codes), ("weight_scale", weight_scale)):
            argument = "codes" if name == "weight" else name
            layer._buffers[name] = state.check(argument, tensor, layer.state_slots[name]).detach().contiguous()
        layer._parameters["stand_in"] = state.stand_in(dtype, codes.device)
        return layer

    @property
    def codes(self) -> Tensor:
        """The codes, int8 [num_embeddings, embedding_dim]."""
        return cast(Tensor, self._buffers["weight"])

    @property
    def weight(self) -> Tensor:
        """The table as nn.Embedding would show it: `dtype`, shape and device; dequantised when computed with."""
        foreign_saves.refuse_resizing()
        return weight_of(self.codes, self.weight_scale, None, self._form, self.num_embeddings, self.dtype)

    @property
    def _form(self) -> Form:
        return Form(self.embedding_dim, ROWS)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            if isinstance(value, QWeight) and value.form == self._form:
                self._buffers["weight_scale"], value = value.scale_, value.storage_
            self._buffers[name] = state.check(name, value, self.state_slots[name]).detach()
            return
        super().__setattr__(name, value)

    def to_float(self, dtype: torch.dtype | None = None) -> nn.Embedding:
        """A torch.nn.Embedding with the dequantised rows, in `dtype` (None: the layer's own)."""
        real = ops.dequantize(self.codes, self.weight_scale, None, "per_channel", 0, torch.float32)
        embedding = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        embedding.weight = nn.Parameter(real.to(weights.float_type(dtype, self.dtype)))
        return embedding.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Rows of real values: x int32 or int64 of any shape -> `dtype` [*x.shape, embedding_dim].

        Raises ArgumentError for another type, and for an index outside [0, num_embeddings) on the CPU.
        """
        if isinstance(x, Proxy):
            return traced.node(self, x)  # type: ignore[return-value]
        if not isinstance(x, Tensor) or x.dtype not in (torch.int64, torch.int32):
            got = describe(x) if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError("x", got, "an int64 or int32 tensor of indices")
        codes = self.codes
        if x.device != codes.device:
            raise ArgumentError("x", f"device {x.device}", f"device {codes.device}, where the layer is")
        try:
            rows = torch.embedding(codes, x)
            scale = self.weight_scale[x]
        except (IndexError, RuntimeError) as error:
            raise ArgumentError("x", str(error).splitlines()[0], f"indices in [0, {self.num_embeddings - 1}]") from None
        real: Tensor = torch.ops.pyquant.dequantize(rows, scale, None, "per_token", 0, self.dtype)
        return real

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        foreign_saves.refuse(prefix)
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        del destination[prefix + "stand_in"]
        if not keep_vars:
            destination[prefix + "weight"] = foreign_saves.as_codes(destination[prefix + "weight"])

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        for name, slot in self.state_slots.items():
            if prefix + name in state_dict:
                try:
                    state.check(name, state_dict[prefix + name], slot)
                except (ArgumentError, NonFiniteError) as error:
                    error_msgs.append(f"{prefix or 'QEmbedding'}: {error}")
                    return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )  # type: ignore[no-untyped-call]
        if prefix + "stand_in" in missing_keys:
            missing_keys.remove(prefix + "stand_in")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QEmbedding:
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.codes.device))
        for name in self.state_slots:
            self._buffers[name] = state.same_type(fn, cast(Tensor, self._buffers[name]))
        if probe.dtype in FLOATS:
            self.dtype = probe.dtype
        self._parameters["stand_in"] = state.stand_in(self.dtype, self.codes.device)
        return self

    def extra_repr(self) -> str:
        """The layer in one line, as print(model) shows it."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, int8 per row"
