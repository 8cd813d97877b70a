"""smooth_: the spread between activation channels moves into the weights; the float function stays what it was."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.nn.flow import watch_input
from pyquant.nn.qlinear import QLinear
from pyquant.nn.undo import Undo, undone_on_error
from pyquant.ptq.blockwise.drive import Way
from pyquant.ptq.blockwise.find import AUTO, Blocks, block_lists
from pyquant.ptq.blockwise.offload import Place
from pyquant.ptq.improve.pairs import factor_of, find_pairs, scale_by
from pyquant.ptq.improve.replay import BatchToInputs, Replay, check_unmoved
from pyquant.ptq.improve.writable import check_writable
from pyquant.simulate.kinds import is_simulated


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
    In a model with experts the factors are powers of two: every product keeps its bits, and no token is routed anew.
    alpha     in [0, 1]: how much of the difficulty moves; more where activations are the harder part.
    pairs     [(producer, [consumers]), ...] by full name; None: all that the rules know: neighbours in nn.Sequential,
              nn.TransformerEncoderLayer, blocks of transformers (docs/reconstruction.md names the families; those of
              Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE with router and experts), and what register_smoothing named.
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
    check_writable(model)
    groups = find_pairs(model, pairs)
    place = Place() if way is None else way.place
    lists = (
        []
        if way is None or place.device is None
        else block_lists(model, way.blocks, lambda m: isinstance(m, nn.Linear))
    )
    if place.device is not None and not lists:
        raise ArgumentError(
            "device", str(place.device), "None: no blocks are found in this model; blocks=... names them"
        )
    modules = [model.get_submodule(name) for names in lists for name in names]
    with ExitStack() as hooks:
        hooks.enter_context(place.holds_each(modules))
        reference = replay.run(replay.batches[0])
        for pair in groups:
            handle = watch_input(pair.modules[1][0], pair.observe)
            hooks.callback(handle.remove)
        for batch in replay.batches:
            replay.run(batch)
    changed = {id(t): t for pair in groups for t in pair.tensors()}
    put_back: list[Undo] = [partial(t.detach().copy_, t.detach().clone()) for t in changed.values()]
    with undone_on_error(put_back):
        spreads = {
            pair.producer: scale_by(pair, factor_of(pair, float(alpha))) for pair in groups if pair.amax is not None
        }
        allowed = f"pairs whose producer feeds its consumers and nothing else; undone: {', '.join(spreads)}"
        with place.holds_each(modules):
            check_unmoved("pairs", reference, replay.run(replay.batches[0]), allowed)
    undo += put_back
    return spreads
