"""Banks of experts of which every rank holds some, whole (expert parallel)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from pyquant.core import arguments
from pyquant.core.dtypes import describe
from pyquant.errors import ArgumentError
from pyquant.integrations.distributed.layouts import Layouts
from pyquant.integrations.distributed.sums import share_of
from pyquant.nn.expert_rows import Split, added, weights_here
from pyquant.nn.experts import QExperts, check_routing
from pyquant.nn.kernel_info import KernelInfo

Self = TypeVar("Self", bound="SharedQExperts")


class SharedQExperts(QExperts):
    """A QExperts that holds some of the experts, under the numbers that they have in the whole bank.

    Each rank multiplies the slots whose expert it holds. What experts give for a slot has one rank; the others add -0.0
    to it, which is exact, and after that the results of a token are added in the order of its slots: the bits of the
    whole bank, in every scheme.
    """

    _layouts: Layouts
    _begin: int
    _end: int
    _elsewhere: dict[int, nn.Module]  # the other experts, on the meta device: what they are, without numbers
    _names: tuple[str, ...]  # of all children, in the order of the whole bank

    @classmethod
    def take(cls, bank: QExperts, layouts: Layouts, source: int | None) -> None:
        """Make a whole bank a share of itself, in place. source: whose numbers all take; None: each its own."""
        names = tuple(bank._modules)
        if source is not None:
            for e in range(bank.num_experts):
                expert, to = cast(nn.Module, bank._modules[str(e)]), owner(e, bank.num_experts, layouts.world)
                _send(expert, source, to, layouts)
        begin, end = (place * bank.num_experts // layouts.world for place in (layouts.rank, layouts.rank + 1))
        elsewhere = [e for e in range(bank.num_experts) if not begin <= e < end]
        others = {e: cast(nn.Module, bank._modules.pop(str(e))).to("meta") for e in elsewhere}
        bank.__class__ = cls
        bank.__dict__.update(_layouts=layouts, _begin=begin, _end=end, _elsewhere=others, _names=names)
        bank.share = f"experts {begin} to {end} of {bank.num_experts} over {layouts.world} ranks"

    def gather(self) -> None:
        """Make the share the whole bank that it is of, in place; every rank must."""
        layouts, held = self._layouts, cast(dict[str, nn.Module], dict(self._modules))
        first = next(iter((*self.parameters(), *self.buffers())), None)
        device = first.device if first is not None else torch.device(layouts.mesh.device_type)
        for e in range(self.num_experts):
            expert = self._elsewhere[e].to_empty(device=device) if e in self._elsewhere else held[str(e)]
            state, source = _state(expert), owner(e, self.num_experts, layouts.world)
            for tensor in state.values():
                dist.broadcast(tensor, group=layouts.group, group_src=source)
            if e in self._elsewhere:
                expert.load_state_dict(state)
            held[str(e)] = expert
        self._modules.clear()
        self._modules.update({name: held[name] for name in self._names})
        self.__class__ = QExperts  # type: ignore[assignment]
        for name in ("_layouts", "_begin", "_end", "_elsewhere", "_names", "share"):
            self.__dict__.pop(name)

    @property
    def here(self) -> range:
        """The numbers of the experts that this rank holds."""
        return range(self._begin, self._end)

    def expert(self, index: int) -> tuple[nn.Module, nn.Module]:
        """The two layers of one expert that is here. Raises ArgumentError for others."""
        arguments.whole("index", index, 0, self.num_experts - 1)
        if index not in self.here:
            allowed = f"{self._begin} to {self._end - 1}: gather_quantized_ makes the whole bank"
            raise ArgumentError("index", f"{index}, which another rank holds", allowed)
        return super().expert(index)

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Any:
        """The experts of all ranks, as QExperts.forward.

        Each argument in the layout of input_layouts, or a DTensor; routings name experts by their numbers in the whole
        bank. ->  [T, H] in the layout of output_layouts. Every rank must call.
        """
        layouts = self._layouts
        x = self._rows(layouts.enter(hidden_states, Replicate()))
        if not self.rule.is_routed:
            return self._even(x)
        ids, weights = layouts.enter(top_k_index, Replicate()), layouts.enter(top_k_weights, Replicate())
        check_routing(x, ids, weights)
        weights = weights_here(weights, (ids >= 0) & (ids < self.num_experts))
        z, whole = self._of_slots(x, ids), (x.shape[0], self.hidden_size)
        # Ranks add up the columns, or the tokens, that they are to give.
        gives = 0 if isinstance(layouts.outputs, Shard) and layouts.outputs.dim % 2 == 0 else 1
        z = self._sum(z.view(*ids.shape, z.shape[1]), Shard(0) if gives == 0 else Shard(2))
        weights = share_of(weights, layouts, Shard(0), 2) if gives == 0 else weights
        slots = torch.arange(weights.numel(), device=x.device)
        return layouts.leave(added(z.flatten(0, 1), slots, weights).to(x.dtype), Shard(gives), whole)

    def _of_slots(self, x: Tensor, ids: Tensor) -> Tensor:
        """[T * k, H]: what the experts here give for each slot; where its expert is elsewhere, what adds nothing."""
        mine = (ids >= self._begin) & (ids < self._end)
        y, order = self._slots(x, torch.where(mine, ids - self._begin, -1))
        y = self._in_graph(y, x)
        z = y.new_zeros(ids.numel(), y.shape[1]).index_copy(0, order[: y.shape[0]], y)
        nothing = torch.full(ids.shape, -0.0, dtype=y.dtype, device=y.device)
        if self._layouts.rank == 0:  # of an expert on no rank the sum is 0, and not the sum of nothing
            nothing = torch.where((ids >= 0) & (ids < self.num_experts), nothing, 0.0)
        return torch.where(mine.view(-1, 1), z, nothing.view(-1, 1))

    def _even(self, x: Tensor) -> Any:
        """Rows that are sorted by expert, as many for each."""
        layouts, each = self._layouts, x.shape[0] // self.num_experts
        if x.shape[0] % self.num_experts:
            raise ArgumentError("hidden_states", describe(x), f"as many rows for {self.num_experts}")
        mine = slice(self._begin * each, self._end * each)
        split = Split.even(len(self.here) * each, len(self.here), x.device)
        y = self._in_graph(self._narrowed(x[mine], partial(self._layers, split=split)), x)
        before, after = mine.start, x.shape[0] - mine.stop
        z = torch.cat([y.new_full((before, y.shape[1]), -0.0), y, y.new_full((after, y.shape[1]), -0.0)])
        return layouts.leave(self._sum(z, layouts.outputs), layouts.outputs, z.shape)

    def _in_graph(self, y: Tensor, x: Tensor) -> Tensor:
        """Results as part of the graph of x, be it that no expert here had a token: ranks exchange gradients, and one
        that had none to ask for would leave the others waiting."""
        if not torch.is_grad_enabled():
            return y
        if x.requires_grad:
            return torch.cat([y, x[:0, :1].to(y.dtype).expand(0, y.shape[1])])
        layers = (self, *self._elsewhere.values())
        if not y.requires_grad and any(p.requires_grad for layer in layers for p in layer.parameters()):
            return y.detach().requires_grad_()
        return y

    def _sum(self, parts: Tensor, outputs: Placement) -> Tensor:
        """The sum over the ranks, of which each gets what `outputs` says."""
        placed = DTensor.from_local(parts, self._layouts.mesh, [Partial()], run_check=False)
        return placed.redistribute(placements=[outputs]).to_local()

    def kernel_info(self, rows: int = 1) -> dict[str, KernelInfo]:
        """As QExperts.kernel_info, for the share of the rows that the experts here have."""
        arguments.whole("rows", rows, 0)
        return super().kernel_info(-(-rows * len(self.here) // self.num_experts))

    def extra_repr(self) -> str:
        """The share in one line, as print(model) shows it."""
        return f"{super().extra_repr()}, {self.share}"

    # ---- the state: names of the whole bank, for the experts that are here

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        unexpected, others = rest[-2], tuple(f"{prefix}{e}." for e in self._elsewhere)
        unexpected[:] = [key for key in unexpected if not key.startswith(others)]

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for expert in self._elsewhere.values():  # their type alone: they stay without numbers
            expert._apply(lambda t: torch.empty_like(t, dtype=fn(torch.empty(0, dtype=t.dtype, device="cpu")).dtype))
        return self


def owner(expert: int, experts: int, world: int) -> int:
    """The rank that holds an expert, where each rank holds as many, or one less.

    Example:
        >>> [owner(e, 5, 2) for e in range(5)]
        [0, 0, 1, 1, 1]
    """
    return next(rank for rank in range(world) if expert < (rank + 1) * experts // world)


def _state(expert: nn.Module) -> dict[str, Tensor]:
    return {name: t.as_subclass(Tensor).detach().contiguous() for name, t in expert.state_dict().items()}


def _send(expert: nn.Module, source: int, to: int, layouts: Layouts) -> None:
    """Give the rank that will hold an expert the numbers that another rank has."""
    if layouts.rank == source != to:
        for tensor in _state(expert).values():
            dist.send(tensor, group=layouts.group, group_dst=to)
    elif layouts.rank == to != source:
        state = {name: torch.empty_like(tensor) for name, tensor in _state(expert).items()}
        for tensor in state.values():
            dist.recv(tensor, group=layouts.group, group_src=source)
        expert.load_state_dict(state)
