"""smooth_: the spread between activation channels moves into the weights; the float function stays what it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.nn.qlinear import QLinear
from pyquant.nn.swap import Undo, undone_on_error
from pyquant.ptq.blockwise.drive import Way
from pyquant.ptq.blockwise.find import AUTO, Blocks, block_lists
from pyquant.ptq.blockwise.offload import each_on_device
from pyquant.ptq.improve import smooth_rules as rules
from pyquant.ptq.improve.replay import BatchToInputs, Replay, check_unmoved
from pyquant.simulate.kinds import is_simulated

_SMALLEST: Final = 1e-5  # a factor; below it a channel counts as unused


@dataclass
class _Pair:
    """A producer, the Linears that read it, and the largest magnitude of each channel between them."""

    producer: str
    consumers: tuple[str, ...]
    modules: tuple[nn.Module, list[nn.Linear]]
    amax: Tensor | None = None

    def observe(self, x: Tensor) -> None:
        amax = x.detach().reshape(-1, x.shape[-1]).abs().amax(0).float()
        if not bool(amax.isfinite().all()):
            raise NonFiniteError(f"input of {self.consumers[0]}", "NaN or infinity", "finite values")
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)


@torch.no_grad()
def smooth_(
    model: nn.Module,
    data: Iterable[Any],
    num_batches: int,
    alpha: float = 0.5,
    pairs: Iterable[tuple[str, Iterable[str]]] | None = None,
    *,
    batch_to_inputs: BatchToInputs | None = None,
    blocks: Blocks = AUTO,
    device: torch.device | str | None = None,
) -> dict[str, float]:
    """Move the spread between activation channels into the weights, in place, before quantisation.

    Channel j of the inputs of some Linears is divided by s[j] = amax_x[j]^alpha / amax_w[j]^(1 - alpha), folded into
    the norm or Linear that makes it; the columns j of those Linears are multiplied by it.
    model     float nn.Module.
    data      batches; num_batches of them are used, without labels.
    alpha     in [0, 1]: how much of the difficulty moves; more where activations are the harder part.
    pairs     [(producer, [consumers]), ...] by full name; None: all that the rules know: neighbours in nn.Sequential,
              nn.TransformerEncoderLayer, decoder and encoder layers of transformers, and what register_smoothing named.
    batch_to_inputs   as in pyquant.calibrate.run_calibration.
    blocks, device   with a device, each block of the model (docs/reconstruction.md) is moved there while it runs, and
              back. The number of passes does not depend on the depth in any case.
    ->        {producer: largest s / smallest s of its channels}. The parameters are changed in place.
    The function of the model is the same but for rounding. This is checked on the first batch: where the output moves,
    a pair was wrong (the producer also feeds something else), everything is undone and ArgumentError raised.
    Raises ArgumentError also for unknown names, layers that are no such pair, and a model that is quantised already;
    CalibrationError for too few batches.
    Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
    arXiv 2211.10438, equation 4.

    Example:
        >>> model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))
        >>> list(smooth_(model, [torch.randn(16, 8)], num_batches=1))
        ['0']
    """
    way = Way(blocks, device)
    return smooth_reversibly(model, data, num_batches, alpha, pairs, [], batch_to_inputs, way)


@torch.no_grad()
def smooth_reversibly(
    model: nn.Module,
    data: Iterable[Any],
    num_batches: int,
    alpha: float,
    pairs: Iterable[tuple[str, Iterable[str]]] | None,
    undo: list[Undo],
    batch_to_inputs: BatchToInputs | None = None,
    way: Way | None = None,
) -> dict[str, float]:
    """smooth_ for a caller that may still fail. undo  receives the steps that take it back."""
    arguments.number("alpha", alpha, 0, 1)
    replay = Replay(model, data, num_batches, batch_to_inputs)
    if any(is_simulated(m) or isinstance(m, QLinear) for m in model.modules()):
        raise ArgumentError("model", "a model with quantised layers", "a float model: smooth before quantising")
    groups = _find_pairs(model, pairs)
    place = None if way is None else way.place
    lists = [] if way is None or place is None else block_lists(model, way.blocks, lambda m: isinstance(m, nn.Linear))
    if place is not None and not lists:
        raise ArgumentError("device", str(place), "None: no blocks are found in this model; blocks=... names them")
    modules = [model.get_submodule(name) for names in lists for name in names]
    with ExitStack() as hooks:
        hooks.enter_context(each_on_device(modules, place))
        reference = replay.run(replay.batches[0])
        for pair in groups:
            handle = pair.modules[1][0].register_forward_pre_hook(lambda _, x, pair=pair: pair.observe(x[0]))
            hooks.callback(handle.remove)
        for batch in replay.batches:
            replay.run(batch)
    parameters = {id(p): p for pair in groups for m in (pair.modules[0], *pair.modules[1]) for p in m.parameters(False)}
    put_back: list[Undo] = [partial(p.detach().copy_, p.detach().clone()) for p in parameters.values()]
    with undone_on_error(put_back):
        spreads = {pair.producer: _fold(pair, float(alpha)) for pair in groups if pair.amax is not None}
        allowed = f"pairs whose producer feeds its consumers and nothing else; undone: {', '.join(spreads)}"
        with each_on_device(modules, place):
            check_unmoved("pairs", reference, replay.run(replay.batches[0]), allowed)
    undo += put_back
    return spreads


def _find_pairs(model: nn.Module, given: Iterable[Any] | None) -> list[_Pair]:
    modules = dict(model.named_modules())
    pair_names = []
    if given is None:
        for name, parent in modules.items():
            prefix = f"{name}." if name else ""
            for producer, consumers in rules.pairs_of(parent):
                pair_names.append((prefix + producer, tuple(prefix + c for c in consumers)))
        if not pair_names:
            got = f"a {type(model).__name__} in which no rule finds a pair"
            raise ArgumentError("model", got, "pairs=..., or register_smoothing")
    else:
        pair_names = list(rules.flatten(given))
    twice = [name for name, count in Counter(c for _, cs in pair_names for c in cs).items() if count > 1]
    if twice:
        raise ArgumentError("pairs", f"several producers for {', '.join(twice)}", "one producer for each Linear")
    return [_pair(modules, *names) for names in pair_names]


def _pair(modules: dict[str, nn.Module], producer: str, consumers: tuple[str, ...]) -> _Pair:
    for name in (producer, *consumers):
        if name not in modules:
            raise ArgumentError("pairs", repr(name), "names of modules of the model")
    if not rules.is_producer(modules[producer]):
        got = f"{producer}, a {type(modules[producer]).__name__}"
        raise ArgumentError("pairs", got, "a LayerNorm or RMSNorm with weights, or a Linear")
    linears = [m for name in consumers if type(m := modules[name]) is nn.Linear]
    width = modules[producer].weight.shape[0]  # type: ignore[union-attr,index]
    if not linears or len(linears) < len(consumers) or any(m.in_features != width for m in linears):
        raise ArgumentError("pairs", f"({producer}, {list(consumers)})", f"Linears of {width} inputs, its channels")
    return _Pair(producer, consumers, (modules[producer], linears))


def _fold(pair: _Pair, alpha: float) -> float:
    producer, linears = pair.modules
    columns = torch.stack([linear.weight.abs().amax(0).float() for linear in linears]).amax(0)
    seen = pair.amax.to(columns.device)  # type: ignore[union-attr]
    factor = seen.pow(alpha) / columns.pow(1 - alpha)
    used = (seen > 0) & (columns > 0) & factor.isfinite()
    factor = torch.where(used, factor.clamp_min(_SMALLEST), torch.ones_like(factor))
    for parameter in producer.parameters(recurse=False):  # weight [N] or [N, K], and bias [N]
        rows = factor if parameter.dim() == 1 else factor[:, None]
        parameter.copy_(parameter.float() / rows)
    for linear in linears:
        linear.weight.copy_(linear.weight.float() * factor)
    return float(factor.max() / factor.min())
