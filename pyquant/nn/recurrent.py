"""Recurrent: nn.LSTM and nn.GRU made of Linears: the inputs of all steps in one product, the state step by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from pyquant.nn.attention import linear_of
from pyquant.nn.linear_state import traced
from pyquant.ops.transforms import autocast


class Recurrent(nn.Module):
    """What nn.LSTM or nn.GRU computes, from children ih_l0, hh_l0 (hr_l0 with proj_size), ... (nn.Linear).

    Made by from_float; the Linears share the module's parameters. The inputs of all steps go through ih in one product,
    the state through hh once a step. forward takes and gives what nn.LSTM's and nn.GRU's do: batch_first, unbatched
    inputs, PackedSequence, initial states, several layers, both directions, proj_size, dropout between layers.
    """

    def __init__(self, module: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.mode, self.bias = module.mode, module.bias
        self.input_size, self.hidden_size, self.proj_size = module.input_size, module.hidden_size, module.proj_size
        self.num_layers, self.bidirectional = module.num_layers, module.bidirectional
        self.batch_first, self.dropout = module.batch_first, module.dropout

    @classmethod
    def from_float(cls, module: nn.LSTM | nn.GRU) -> Recurrent:
        """The same recurrence around the parameters of a module (shared, not copied)."""
        new = cls(module)
        for suffix in new._suffixes():
            for kind in ("ih", "hh", "hr"):
                weight = getattr(module, f"weight_{kind}{suffix}", None)
                if weight is not None:
                    new.add_module(f"{kind}{suffix}", linear_of(weight, getattr(module, f"bias_{kind}{suffix}", None)))
        return new.train(module.training)

    def into_float(self, module: nn.LSTM | nn.GRU) -> None:
        """Put the numbers of the Linears, floats, into a module whose parameters are None."""
        for name in module._parameters:
            what, _, linear = name.partition("_")
            module._parameters[name] = self.get_submodule(linear)._parameters[what]
        module._init_flat_weights()

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        """Arguments and result of nn.LSTM.forward or nn.GRU.forward."""
        if isinstance(input, Proxy):
            return traced(self, input, hx)  # type: ignore[no-any-return]
        if isinstance(input, PackedSequence):
            return self._packed(input, hx)
        is_batched = input.dim() == 3
        x = input if is_batched else input.unsqueeze(1)
        if is_batched and self.batch_first:
            x = x.transpose(0, 1)
        states = self._states(hx, x, is_batched)
        y, last = self._run(x, states, None)
        if not is_batched:
            y, last = y.squeeze(1), tuple(s.squeeze(1) for s in last)
        elif self.batch_first:
            y = y.transpose(0, 1)
        return y, last if self.mode == "LSTM" else last[0]

    def _packed(self, packed: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
        x, lengths = pad_packed_sequence(packed)
        y, last = self._run(x, self._states(hx, x, True), lengths)
        result = pack_padded_sequence(y, lengths, enforce_sorted=packed.sorted_indices is None)
        return result, last if self.mode == "LSTM" else last[0]

    def _states(self, hx: Any, x: Tensor, is_batched: bool) -> tuple[Tensor, ...]:
        """The initial states [layers * directions, B, H]: one of them for GRU, two for LSTM."""
        count = self.num_layers * (1 + self.bidirectional)
        out = self.proj_size or self.hidden_size
        sizes = (out, self.hidden_size) if self.mode == "LSTM" else (out,)
        if hx is None:
            return tuple(x.new_zeros(count, x.shape[1], size) for size in sizes)
        given = tuple(hx) if self.mode == "LSTM" else (hx,)
        given = given if is_batched else tuple(s.unsqueeze(1) for s in given)
        for state, size in zip(given, sizes, strict=True):
            if state.shape != (count, x.shape[1], size):
                raise RuntimeError(f"Expected hidden size {(count, x.shape[1], size)}, got {list(state.shape)}")
        return given

    def _run(self, x: Tensor, states: tuple[Tensor, ...], lengths: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """All layers over x [L, B, K], within autocast as torch's: LSTM narrows its operands, GRU does not on CPUs.
        lengths: of the sequences, [B]; None: all L."""
        if self.mode == "GRU" and x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return self._layers(x, states, lengths)
        return self._layers(autocast(x), tuple(autocast(state) for state in states), lengths)

    def _layers(
        self, x: Tensor, states: tuple[Tensor, ...], lengths: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        last: list[tuple[Tensor, ...]] = []
        running = None  # bool [steps, B, 1]: whether a sequence still has input at a step
        if lengths is not None:
            steps = torch.arange(x.shape[0], device=lengths.device)
            running = (steps[:, None] < lengths[None, :]).to(x.device)[..., None]
        directions = 1 + self.bidirectional
        for layer in range(self.num_layers):
            if layer and self.dropout:
                x = F.dropout(x, self.dropout, self.training)
            ways = []
            for direction in range(directions):
                index = layer * directions + direction
                suffix = f"_l{layer}" + "_reverse" * direction
                start = tuple(state[index] for state in states)
                y, end = self._direction(x, start, suffix, bool(direction), running)
                ways.append(y)
                last.append(end)
            x = ways[0] if directions == 1 else torch.cat(ways, -1)
        return x, tuple(torch.stack(parts) for parts in zip(*last, strict=True))

    def _direction(
        self, x: Tensor, state: tuple[Tensor, ...], suffix: str, is_reversed: bool, running: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One layer in one direction: y [L, B, H] and the last states."""
        hh = getattr(self, f"hh{suffix}")
        hr = getattr(self, f"hr{suffix}", None)
        step = _lstm_step if self.mode == "LSTM" else _gru_step
        gates = getattr(self, f"ih{suffix}")(x).unbind(0)  # one product for all steps
        outputs: list[Tensor] = [state[0]] * len(gates)
        for t in reversed(range(len(gates))) if is_reversed else range(len(gates)):
            new = step(gates[t], hh(state[0]), state)
            if hr is not None:
                new = (hr(new[0]), *new[1:])
            if running is not None:  # sequences that have ended keep their state, and give zeros
                on = running[t]
                new = tuple(torch.where(on, a, b) for a, b in zip(new, state, strict=True))
                outputs[t] = new[0] * on
            else:
                outputs[t] = new[0]
            state = new
        return torch.stack(outputs), state

    def _suffixes(self) -> list[str]:
        ways = ("", "_reverse") if self.bidirectional else ("",)
        return [f"_l{layer}{way}" for layer in range(self.num_layers) for way in ways]

    def flatten_parameters(self) -> None:
        """Nothing to do: there is no buffer that cuDNN would want in one piece."""

    def extra_repr(self) -> str:
        """The module in one line, as print(model) shows it."""
        return f"{self.mode}({self.input_size}, {self.hidden_size}, num_layers={self.num_layers})"


def _lstm_step(gates: Tensor, from_state: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    i, f, g, o = (gates + from_state).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru_step(gates: Tensor, from_state: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    reset, update, new = gates.chunk(3, -1)
    reset_h, update_h, new_h = from_state.chunk(3, -1)
    new = (new + (reset + reset_h).sigmoid() * new_h).tanh()
    return (torch.lerp(new, state[0], (update + update_h).sigmoid()),)
