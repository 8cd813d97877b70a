"""LearnedPrecision: bit widths that training chooses, layer by layer, under a limit of size or latency."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from operator import methodcaller
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.core.names import listed
from pyquant.core.presets import W4A4, W4A8, W8A8, W4A4Dynamic, W4A8Dynamic, W8A8Dynamic
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, QuantizationWarning
from pyquant.nn.fates import Fate, fate_of, said_by, twin_of, twins_of
from pyquant.nn.indivisible import CHOICES
from pyquant.nn.match import FqnConfig
from pyquant.nn.sites import Filter, find_sites
from pyquant.nn.swap import as_it_is, swap_modules
from pyquant.nn.undo import Undo, undone_on_error
from pyquant.qat.learned_bits import LEVELS, LearnedBitsLinear
from pyquant.qat.prepare import prepare_qat_
from pyquant.simulate.kinds import is_simulated

Costs = Mapping[str, Mapping[int, float]]


class LayerCosts(Protocol):
    """What a table of measured latencies gives: times of each layer by bits, of weights or of the larger of both."""

    def layer_costs(self, *, inputs: bool) -> Costs: ...


class LearnedPrecision:
    """Learns how many bits each Linear of a model needs while it trains, and leaves 4, 8 or 16 of them.

    Weights (and, with learn_inputs, activations) are rounded with a learned step d within a learned limit x_max; the
    bits follow: b = ceil(log2(x_max / d + 1)) + 1, with a straight-through ceil. A penalty on the cost that the bits
    imply pushes them down until the target is met; the loss of the task holds them up where they matter. To choose bits
    pyquant.search is the advised way: it needs no training run, and in trials on small nets what was learned here lost
    no less than giving 8 bits to the smallest layers first.

    model         float model; its nn.Linear layers are replaced in place, around the same parameters.
    target        cost to reach, as a share of the cost with 16 bits everywhere, in (0, 1).
    cost          'size' (bytes of the weights; of the activations of one sample too, where they are learned), a
                  LatencyTable with formats of 4, 8 and 16 bits, or latencies {layer name: {4: time, 8: time, 16: time}}
                  as measured: of the layer with that many bits (of weights and learned inputs, the larger). In between,
                  time is taken as linear in the bits.
    steps         optimiser steps of the whole run; `phases` are the shares of 'warm-up' (bits stay at start_bits) and
                  of 'bits' (they move). Then they are frozen, and the rest is fine-tuning of the final schemes.
    filter_fn     fn(module, name) -> bool, which layers take part.
    start_bits    where the bits begin, 4 to 16.
    learn_inputs  learn the bits of activations too; otherwise inputs have 8 bits.
    dynamic       final schemes with inputs quantised per token; False: static ones, whose inputs need a calibration, so
                  at the freeze the model is left in floating point, with `config()` to prepare it by.
    strength      of the penalty: strength * max(cost / target - 1, 0) at the end of the phase; it rises to this.
    bit_lr        how many bits a step may move them, about; d and x_max have an optimiser of their own (Adam).

    Make the optimiser of the weights before: afterwards model.parameters() holds d and x_max too.
    In the loop: `loss = task + learned.penalty(); loss.backward(); optimizer.step(); learned.step()`. `phase` is
    'warm-up', 'bits' or 'fine-tune'; from then on the model is prepared by prepare_qat_ with the schemes of config().
    To resume: make it anew, load_state_dict, then the model's state, then that of the weights' optimiser.
    Raises ArgumentError, also where even 4 bits everywhere do not meet the target.
    Source: Schaefer et al. 2024, arXiv:2206.07741; Uhlich et al. 2020, arXiv:1905.11452.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> learned = LearnedPrecision(model, target=0.5, steps=10)
        >>> learned.phase, learned.bits()
        ('warm-up', {'0': (8, 8), '2': (8, 8)})
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        target: float,
        steps: int,
        cost: str | Costs | LayerCosts = "size",
        phases: tuple[float, float] = (0.1, 0.6),
        filter_fn: Filter | None = None,
        start_bits: int = 8,
        learn_inputs: bool = False,
        dynamic: bool = True,
        strength: float = 1.0,
        bit_lr: float = 0.05,
    ) -> None:
        self.model, self.target = arguments.module("model", model), arguments.number("target", target)
        self.strength = arguments.number("strength", strength)
        self._learn_inputs = arguments.flag("learn_inputs", learn_inputs)
        self._dynamic = arguments.flag("dynamic", dynamic)
        arguments.number("bit_lr", bit_lr, 0)
        self._check(steps, phases, start_bits)
        self._ends = (round(steps * phases[0]), round(steps * (phases[0] + phases[1])))
        self._done = 0
        self.layers = self._insert(filter_fn, start_bits)
        self._costs = _cost_tables(cost, self.layers, learn_inputs)
        least, self._full = (sum(table[bits] for table in self._costs.values()) for bits in (4, 16))
        if least > self.target * self._full:
            raise ArgumentError("target", target, f"above {least / self._full:.3f}, the cost with 4 bits everywhere")
        swap_modules(model, self._sites)
        parameters = [p for layer in self.layers.values() for p in layer.bit_parameters()]
        self._optimizer = torch.optim.Adam(parameters, lr=bit_lr)
        self._final: dict[str, tuple[int, int]] | None = None
        self._enter("warm-up" if self._ends[0] else "bits")

    def _check(self, steps: int, phases: tuple[float, float], start_bits: int) -> None:
        if any(is_simulated(m) for m in self.model.modules()):
            raise ArgumentError("model", "a model with fake quantisation", "a float model")
        if not 0 < self.target < 1:
            raise ArgumentError("target", self.target, "a number in (0, 1): a share of the cost with 16 bits")
        arguments.whole("steps", steps, 1)
        shares = "(share of warm-up, share of bits > 0), together at most 1"
        if not isinstance(phases, (tuple, list)) or len(phases) != 2:
            raise ArgumentError("phases", arguments.shown(phases), shares)
        first, second = (arguments.number("phases", share, 0) for share in phases)
        if second == 0 or first + second > 1:
            raise ArgumentError("phases", phases, shares)
        arguments.whole("start_bits", start_bits, 4, 16)

    def _insert(self, filter_fn: Filter | None, start_bits: int) -> dict[str, LearnedBitsLinear]:
        rules = FqnConfig({"_default": W8A8Dynamic()})
        sites = find_sites(self.model, (nn.Linear,))
        fates = [fate_of(site, said_by(rules, site, filter_fn), CHOICES[0], {}) for site in sites]
        left = [f"{fate.site.names[0]} ({fate.note})" for fate in fates if fate.layer is None and not fate.is_wish]
        if left:
            text = f"LearnedPrecision: layers that stay in floating point and learn no bits: {listed(left)}"
            warnings.warn(text, QuantizationWarning, stacklevel=4)

        def make(fate: Fate) -> nn.Module:
            linear: Any = fate.site.module
            return LearnedBitsLinear.of(linear, start_bits, self._learn_inputs, self._dynamic)

        self._sites = twins_of(fates, make)
        if not self._sites:
            got = f"a {type(self.model).__name__} without layers that take part"
            raise ArgumentError("model", got, "nn.Linear layers")
        return {names[0]: cast(LearnedBitsLinear, layer) for names, layer in self._sites}

    def cost(self) -> Tensor:
        """What the bits cost now, as a share of 16 bits everywhere; differentiable."""
        parts = [_interpolate(layer.layer_bits(), self._costs[name]) for name, layer in self.layers.items()]
        return torch.stack([part.to(parts[0].device) for part in parts]).sum() / self._full

    def penalty(self) -> Tensor:
        """To be added to the loss of the task; 0 outside of the phase 'bits'."""
        if self.phase != "bits":
            return torch.zeros((), dtype=torch.float32, device="cpu")
        # It rises: a weak penalty moves those layers only whose bits the task hardly misses; the others come later.
        rise = (self._done - self._ends[0] + 1) / (self._ends[1] - self._ends[0])
        return self.strength * rise * (self.cost() / self.target - 1).clamp_min(0)

    def step(self) -> None:
        """After the optimiser's step: move the bits, and go on to the next phase when it is time."""
        if self.phase == "bits":
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._done += 1
        if self.phase == "warm-up" and self._done >= self._ends[0]:
            self._enter("bits")
        if self.phase == "bits" and self._done >= self._ends[1]:
            self.freeze()

    def _enter(self, phase: str) -> None:
        self.phase = phase
        for parameter in (p for layer in self.layers.values() for p in layer.bit_parameters()):
            parameter.requires_grad_(phase == "bits")

    def bits(self) -> dict[str, tuple[int, int]]:
        """(bits of weights, bits of inputs) of every layer: as learned so far, final ones after the freeze."""
        if self._final is not None:
            return dict(self._final)
        return {name: layer.bits_now() for name, layer in self.layers.items()}

    def freeze(self) -> None:
        """End the phase 'bits': 4, 8 or 16 for every layer within the target, and the model prepared with them.

        Every layer begins with 4 bits; those that want more most get more, as long as the cost allows; what is left of
        it then gives 8 to layers that wanted fewer.
        """
        if self.phase == "fine-tune":
            return
        self._prepare(self._snapped())

    def _prepare(self, final: dict[str, tuple[int, int]]) -> None:
        floats = [(names, twin_of(layer, names[0], methodcaller("to_float"))) for names, layer in self._sites]
        undo: list[Undo] = [*as_it_is(self.model), partial(setattr, self, "_final", self._final)]
        with undone_on_error(undo):
            self._final = final
            swap_modules(self.model, floats)
            if self._dynamic and any(scheme is not None for scheme in self.config().entries.values()):
                prepare_qat_(self.model, self.config())
        self.phase = "fine-tune"

    def state_dict(self) -> dict[str, Any]:
        """How far it is, beside what model.state_dict() has: the phase, the final bits, the optimiser of the bits."""
        final = None if self._final is None else {name: list(bits) for name, bits in self._final.items()}
        state = {"layers": list(self.layers), "ends": list(self._ends), "done": self._done, "final": final}
        return {**state, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another LearnedPrecision of the same arguments was, before model.load_state_dict() and the
        making of anything that holds parameters: after the freeze the model is prepared, with other layers.

        Raises ArgumentError for the state of other layers or phases, and for one from before this one's freeze.
        """
        arguments.mapping("state", state, "what state_dict gave")
        for key, here in (("layers", list(self.layers)), ("ends", list(self._ends))):
            if state.get(key) != here:
                raise ArgumentError("state", f"{key} {arguments.shown(state.get(key))}", f"{arguments.shown(here)}")
        done = arguments.whole("state", state.get("done"), 0)
        final = state.get("final")
        if final is None and self._final is not None:
            raise ArgumentError("state", "bits that are not final yet", "a new LearnedPrecision to load it into")
        self._optimizer.load_state_dict(dict(arguments.mapping("state", state.get("optimizer"), "an optimizer")))
        self._done = done
        if final is None:
            self._enter("bits" if done >= self._ends[0] else "warm-up")
        elif self._final is None:
            self._prepare({name: (int(weight), int(inputs)) for name, (weight, inputs) in final.items()})

    def _snapped(self) -> dict[str, tuple[int, int]]:
        bits_by_layer = {name: layer.wanted_bits() for name, layer in self.layers.items()}
        # The step may have become finer than 16 bits, and 8 bits may be 8.000001 by a rounding error: layer_bits knows.
        enough = {name: min(float(layer.layer_bits().detach()), LEVELS[-1]) for name, layer in self.layers.items()}
        level = dict.fromkeys(bits_by_layer, LEVELS[0])
        self._raise(level, bits_by_layer, lambda name: enough[name] > level[name])
        # What is left goes to layers that asked for less: 4 bits always lose something. 16 instead of 8 would gain
        # nothing that the task has noticed, and cost a layer its integers.
        asked = dict(level)
        self._raise(level, bits_by_layer, lambda name: level[name] == LEVELS[0])
        if not self._learn_inputs:
            return {name: (bits, 16 if bits == 16 else 8) for name, bits in level.items()}
        now = {name: layer.bits_now() for name, layer in self.layers.items()}
        return {
            name: _pair(*(min(_up(bits), level[name]) for bits in pair)) if level[name] == asked[name] else (8, 8)
            for name, pair in now.items()
        }

    def _raise(self, level: dict[str, int], wanted: Mapping[str, float], may: Callable[[str], bool]) -> None:
        """Double the bits of the layer that wants most beyond what it has, of those that may, within the target."""
        budget = self.target * self._full * (1 + 1e-9)
        while True:
            spent = sum(self._costs[name][bits] for name, bits in level.items())
            upgrades = [
                (wanted[name] - bits, name, 2 * bits)
                for name, bits in level.items()
                if may(name) and spent - self._costs[name][bits] + self._costs[name][2 * bits] <= budget
            ]
            if not upgrades:
                return
            _, name, bits = max(upgrades)
            level[name] = bits

    def config(self) -> FqnConfig:
        """The schemes, for quantize_ and prepare_qat_; layers that keep 16 bits stay in floating point (None).

        Raises ArgumentError before the freeze.
        """
        if self._final is None:
            raise ArgumentError("phase", repr(self.phase), "'fine-tune': bits are final after freeze()")
        return FqnConfig({name: _scheme(*bits, dynamic=self._dynamic) for name, bits in self._final.items()})


def _scheme(weight: int, inputs: int, *, dynamic: bool) -> QScheme | None:
    if weight == 16:
        return None
    if weight == 8:
        return W8A8Dynamic() if dynamic else W8A8()
    if inputs == 4:
        return W4A4Dynamic() if dynamic else W4A4()
    return W4A8Dynamic(None) if dynamic else W4A8(None)


def _pair(weight: int, inputs: int) -> tuple[int, int]:
    """The nearest pair that has a scheme: 16 bits of either are 16 of both, 4-bit inputs need 4-bit weights."""
    return (16, 16) if 16 in (weight, inputs) else (weight, max(inputs, weight))


def _up(bits: int) -> int:
    return next((level for level in LEVELS if bits <= level), LEVELS[-1])


def _cost_tables(
    cost: str | Costs | LayerCosts, layers: Mapping[str, LearnedBitsLinear], inputs: bool
) -> dict[str, dict[int, float]]:
    if cost == "size":
        sizes = {name: layer.weight.numel() + inputs * layer.in_features for name, layer in layers.items()}
        return {name: {bits: elements * bits / 8 for bits in LEVELS} for name, elements in sizes.items()}
    if not isinstance(cost, (str, Mapping)) and hasattr(cost, "layer_costs"):
        cost = cost.layer_costs(inputs=inputs)
    if not isinstance(cost, Mapping):
        allowed = "'size', a LatencyTable, or {layer name: {4: time, 8: time, 16: time}}"
        raise ArgumentError("cost", repr(cost)[:80], allowed)
    tables: dict[str, dict[int, float]] = {}
    for name in layers:
        table = cost.get(name)
        good = isinstance(table, Mapping) and all(
            isinstance(table.get(bits), (int, float)) and 0 < table[bits] < math.inf for bits in LEVELS
        )
        if not good or table is None:
            raise ArgumentError("cost", f"{table!r} for layer '{name}'"[:120], "times above 0 for 4, 8 and 16 bits")
        tables[name] = {bits: float(table[bits]) for bits in LEVELS}
    return tables


def _interpolate(bits: Tensor, table: Mapping[int, float]) -> Tensor:
    """Cost at a real number of bits, linear between 4, 8 and 16; outside as at the ends."""
    low, middle, high = (table[level] for level in LEVELS)
    bits = bits.clamp(4.0, 16.0)
    return torch.where(bits <= 8, low + (bits - 4) / 4 * (middle - low), middle + (bits - 8) / 8 * (high - middle))
