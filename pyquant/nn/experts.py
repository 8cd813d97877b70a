"""QExperts: the experts of a mixture, which transformers holds in 3-D parameters, as layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from pyquant.calibrate.padding import left_out, now
from pyquant.core import arguments
from pyquant.core.dtypes import FLOATS, describe
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.nn import expert_graph, expert_rows
from pyquant.nn.attention import linear_of
from pyquant.nn.expert_info import explain
from pyquant.nn.expert_rows import Sorted, Split, added, chosen, is_one_call, must_not_wait
from pyquant.nn.expert_rules import ExpertsRule, halves, rule_of
from pyquant.nn.kernel_info import KernelInfo
from pyquant.nn.linear_call import LinearCall, needs_derivative
from pyquant.nn.linear_state import LinearState
from pyquant.ops import one_launch
from pyquant.ops.transforms import autocast

Bank = TypeVar("Bank", bound="QExperts")
Result = TypeVar("Result")


class Expert(nn.Module):
    """One expert of a QExperts: two layers, under the names that the bank's parameters had."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


class QExperts(nn.Module):
    """What a bank of experts computes, from children '0', '1', ... with two layers each: nn.Linear, QLinear once
    quantize_ has been there.

    Made by from_float; the Linears share the memory of the module's parameters. forward takes and gives what the
    module's does. Rows are sorted by expert, every expert multiplies its own, and the results of a token are added in
    the order of its k experts, in float32, rounded once: docs/experts.md. The router is not part of it.
    """

    rule: ExpertsRule
    num_experts: int
    hidden_size: int
    tokens_seen: list[int] | None = None  # by each expert in the last calibration of static inputs
    share: str = ""  # which of the experts are here, where each of several processes holds some

    @classmethod
    def from_float(cls, module: nn.Module) -> QExperts:
        """The same experts around the parameters of a module (views of them; nothing is copied).

        Raises ArgumentError for a module without a rule (register_experts).
        """
        rule = rule_of(module) if isinstance(module, nn.Module) else None
        if rule is None:
            raise ArgumentError("module", type(module).__name__, "a bank of experts with a rule; use register_experts")
        new = cls()
        up, down = (cast(Tensor, module._parameters[name]) for name in (rule.up, rule.down))
        new.rule, new.num_experts = rule, up.shape[0]
        new.hidden_size = up.shape[1 if rule.is_transposed else 2]
        for name, child in module._modules.items():
            new.add_module(name, child)
        new.__dict__["_self_of_gate"] = _without_tensors(module, new._modules)
        biases = [module._parameters[name] if name else None for name in (rule.up_bias, rule.down_bias)]
        for e in range(new.num_experts):
            layers: dict[str, nn.Module] = {}
            for name, weight, bias in zip((rule.up, rule.down), (up, down), biases, strict=True):
                matrix = weight[e].t() if rule.is_transposed else weight[e]
                layers[name] = linear_of(matrix, None if bias is None else bias[e])
            new.add_module(str(e), Expert(layers))
        return new.train(module.training)

    def _settle_layers(self, undo: list[Callable[[], Any]]) -> None:
        """Tell the layers how many share their rows, which decides how their weights lie on a GPU; pack those anew that
        lie there already. undo: receives the steps that take it back."""
        for layer in (layer for pair in self.experts() for layer in pair):
            if not isinstance(layer, LinearState) or layer._experts == len(self.here):
                continue
            undo.append(partial(layer.__dict__.update, dict(layer.__dict__) | {"_experts": layer._experts}))
            layer._experts = len(self.here)
            if layer._is_packed and one_launch.is_on_gpu(layer.storage):
                undo.append(partial(layer._buffers.update, dict(layer._buffers)))
                layer._fill(layer._state(), waits=layer._waits)

    def _apply(self: Bank, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Bank:
        self._settle_layers([])  # before they are packed for another device
        return super()._apply(fn, recurse)

    def _into_float(self, module: nn.Module) -> None:
        """Put the numbers of the layers, float Linears, into a module whose parameters are None."""
        if self.share:
            raise UnsupportedError(f"a float bank of {self.share}: gather_quantized_ makes the whole bank first")
        rule = self.rule
        for place, (name, bias) in enumerate(((rule.up, rule.up_bias), (rule.down, rule.down_bias))):
            linears = [cast(nn.Linear, layers[place]) for layers in self.experts()]
            weights = [linear.weight.t() if rule.is_transposed else linear.weight for linear in linears]
            module._parameters[name] = _stacked(weights)
            if bias:
                module._parameters[bias] = _stacked([linear.bias for linear in linears])
        for name in module._modules:
            module._modules[name] = self._modules[name]

    @property
    def here(self) -> range:
        """The numbers of the experts that this process holds: all, where no other holds some."""
        return range(self.num_experts)

    def experts(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        """The two layers of every expert that is here, in order."""
        return (self.expert(e) for e in self.here)

    def expert(self, index: int) -> tuple[nn.Module, nn.Module]:
        """The two layers of one expert: (gate and) up, down. Raises ArgumentError for an expert that is not there."""
        arguments.whole("index", index, 0, self.num_experts - 1)
        held = cast(nn.Module, self._modules[str(index)])._modules
        return cast(nn.Module, held[self.rule.up]), cast(nn.Module, held[self.rule.down])

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        """The experts.

        hidden_states  float [T, H]; [E * T, H], sorted by expert, where the rule is not routed.
        top_k_index    int [T, k]: the experts of each token. Others than 0 to E - 1 add nothing (they live elsewhere).
        top_k_weights  float [T, k]: what their results are multiplied by.
        ->             [T, H] in the type of hidden_states.
        Raises ArgumentError naming what is wrong.
        """
        if not self.rule.is_routed:
            rows = self._rows(hidden_states).shape[0]
            if rows % max(self.num_experts, 1):
                raise ArgumentError("hidden_states", describe(hidden_states), f"as many rows for {self.num_experts}")
            split = Split.even(rows, self.num_experts, hidden_states.device)
            return self._narrowed(hidden_states, partial(self._layers, split=split))
        x = self._rows(hidden_states)
        check_routing(x, top_k_index, top_k_weights)
        ids, weights = cast(Tensor, top_k_index), cast(Tensor, top_k_weights)
        y, order = self._slots(x, ids)
        return added(y, order, weights).to(x.dtype)

    def _narrowed(self, x: Tensor, products: Callable[[Tensor], Result]) -> Result:
        """products(x); within autocast of rows that are narrowed once, where every layer would do so by itself: one
        call can then serve all. Not where somebody asks for derivatives, which would add up in the narrow type."""
        is_on = torch.is_autocast_enabled(x.device.type) and not needs_derivative(x, None)
        if not is_on or not all(isinstance(layer, LinearCall) for layers in self._pairs() for layer in layers):
            return products(x)
        narrow = autocast(x)
        with torch.autocast(x.device.type, enabled=False):
            return products(narrow)

    def _slots(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """What experts give for the slots (token, j) of a routing, which are counted row by row.

        ids  int [T, k]: others than 0, 1, ... for the experts that are here mean experts elsewhere.
        ->   [S, H], and int64 [T * k], whose first S say of which slots; of others nobody here knows the result.
        """
        return self._narrowed(x, partial(self._slots_of, ids))

    def _slots_of(self, ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        # By the device: kernels multiply the rows of all experts at once, and learn there whose they are.
        pairs = self._pairs()
        is_told = is_one_call(pairs[0], x, ids.numel(), chooses_rows=True) and is_one_call(pairs[1], x, ids.numel())
        if not is_told and must_not_wait(x):  # every expert takes every token: more work, and no count of rows to know
            y = chosen((self._alone(e, x) for e in range(len(self.here))), ids, x)
            return y, torch.arange(ids.numel(), device=x.device)
        slots = Sorted.of(ids, len(self.here))
        in_graph = torch.compiler.is_compiling() and all(expert_graph.are_nodes(layers, x) for layers in pairs)
        split = Split(slots.ends, None) if is_told or in_graph else slots.split()
        # Where nobody knows how many slots have their expert here, all have a row.
        rows = slots.tokens(ids.shape[1], None if split.counts is None else sum(split.counts))
        if not torch.compiler.is_compiling() and now().masks:
            with left_out(now().routed(rows, x.shape[0])):
                y = self._layers(x, split, rows, pairs)
        else:
            y = self._layers(x, split, rows, pairs)
        if is_told and self.rule.after:
            places = torch.arange(y.shape[0], device=y.device)
            y = y.masked_fill((places >= slots.ends[-1]).unsqueeze(1), 0)
        return y, slots.order

    def _pairs(self) -> tuple[Sequence[nn.Module], Sequence[nn.Module]]:
        """The first layers of all experts, and the second ones."""
        held: list[Any] = [self._modules[str(e)] for e in self.here]
        up, down = self.rule.up, self.rule.down
        return [one._modules[up] for one in held], [one._modules[down] for one in held]

    def _layers(
        self,
        x: Tensor,
        split: Split,
        rows: Tensor | None = None,
        pairs: tuple[Sequence[nn.Module], Sequence[nn.Module]] | None = None,
    ) -> Tensor:
        """Rows (None: all) of x, sorted by expert, through the two layers of their expert; pairs: _pairs()."""
        ups, downs = pairs or self._pairs()
        in_graph = split.counts is None and torch.compiler.is_compiling()
        multiply: Callable[..., Tensor] = expert_graph.multiply if in_graph else expert_rows.multiply
        y = multiply(ups, x, split, rows)
        y = (self.rule.gate or halves)(self.__dict__["_self_of_gate"], y)
        y = multiply(downs, y, split)
        return cast(nn.Module, self._modules[self.rule.after])(y) if self.rule.after else y

    def _alone(self, place: int, x: Tensor) -> Tensor:
        """All rows of x through one of the experts that are here."""
        counts = [x.shape[0] if e == place else 0 for e in range(len(self.here))]
        ends = torch.arange(len(counts), dtype=torch.int32, device=x.device).ge(place).int() * x.shape[0]
        return self._layers(x, Split(ends, counts))

    def _rows(self, x: object) -> Tensor:
        if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.dim() != 2 or x.shape[1] != self.hidden_size:
            got = describe(x) if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentError("hidden_states", got, f"float [tokens, {self.hidden_size}]")
        return x

    def kernel_info(self, rows: int = 1) -> dict[str, KernelInfo]:
        """How the rows of all experts would be multiplied, {name of a layer: its kernels}; `reason` says how many calls
        serve all experts, and why not one.

        rows  tokens times the experts of each, taken as spread evenly.
        Raises ArgumentError for rows that are not a whole number >= 0.
        """
        arguments.whole("rows", rows, 0)
        names = (self.rule.up, self.rule.down)
        ups, downs = self._pairs()
        return {names[0]: explain(ups, rows, chooses_rows=True), names[1]: explain(downs, rows)}

    def extra_repr(self) -> str:
        """The bank in one line, as print(model) shows it."""
        return f"num_experts={self.num_experts}, hidden_size={self.hidden_size}"


def bank_of(layers: Sequence[tuple[nn.Module, nn.Module]], rule: ExpertsRule) -> QExperts:
    """A bank of layers that are there: (up, down) of each expert. The gate of the rule gets an empty module."""
    new = QExperts()
    new.rule, new.num_experts = rule, len(layers)
    new.hidden_size = cast(int, layers[0][0].in_features)
    new.__dict__["_self_of_gate"] = nn.Module()
    for e, pair in enumerate(layers):
        new.add_module(str(e), Expert(dict(zip((rule.up, rule.down), pair, strict=True))))
    new._settle_layers([])
    return new.eval()


def _without_tensors(module: nn.Module, children: dict[str, nn.Module | None]) -> nn.Module:
    """What the gate of the module's class gets as `self`: class and attributes of the module, and the children of the
    bank, which move with it; no parameters."""
    new = type(module).__new__(type(module))
    new.__dict__.update(module.__dict__)
    new.__dict__.update(_parameters=dict.fromkeys(module._parameters), _modules=children)
    return new


def check_routing(x: Tensor, ids: object, weights: object) -> None:
    """Raise ArgumentError for what is no routing of the tokens x."""
    is_whole = isinstance(ids, Tensor) and ids.dtype in (torch.int64, torch.int32)
    if not isinstance(ids, Tensor) or not is_whole or ids.dim() != 2 or ids.shape[0] != x.shape[0]:
        got = describe(ids) if isinstance(ids, Tensor) else type(ids).__name__
        raise ArgumentError("top_k_index", got, f"int64 or int32 [{x.shape[0]}, k]")
    if not isinstance(weights, Tensor) or weights.dtype not in FLOATS or weights.shape != ids.shape:
        got = describe(weights) if isinstance(weights, Tensor) else type(weights).__name__
        raise ArgumentError("top_k_weights", got, f"float {list(ids.shape)}")


def _stacked(tensors: list[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.stack([t.detach() for t in tensors]), any(t.requires_grad for t in tensors))
