"""quantize_: the front door. From a float model to an integer one in one call, by a scheme, a config or a recipe."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyquant.calibrate.run import warn_of_own_data
from pyquant.core import arguments
from pyquant.core.modes import outside_inference_mode
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.nn.convert import quantize_layers_
from pyquant.nn.fates import Fate, forms_of, noted, twins_of
from pyquant.nn.match import FqnConfig
from pyquant.nn.refusals import check_not_sharded
from pyquant.nn.sites import Filter
from pyquant.nn.state import device_of
from pyquant.nn.swap import as_it_is, swap_modules
from pyquant.nn.undo import Undo, undone_on_error
from pyquant.ptq.improve.replay import BatchToInputs
from pyquant.ptq.improve.steps import Before, check_names, improve_after, improve_before
from pyquant.ptq.run import quantize_recipe_
from pyquant.recipe import Recipe, is_recipe
from pyquant.simulate.calibrate import calibrate_
from pyquant.simulate.insert import simulated
from pyquant.simulate.kinds import SIMULATED, is_simulated


def quantize_(
    model: nn.Module,
    config: QScheme
    | str
    | Callable[[], QScheme]
    | FqnConfig
    | Mapping[str | type, QScheme | None]
    | Recipe
    | os.PathLike[str],
    filter_fn: Filter | None = None,
    device: torch.device | str | None = None,
    *,
    data: Iterable[Any] | None = None,
    num_batches: int | None = None,
    improve: Sequence[str] = (),
    batch_to_inputs: BatchToInputs | None = None,
    embeddings: bool = False,
    heads: bool | None = None,
    on_indivisible: str = "per_channel",
    input_scales: Mapping[str, float | Tensor] | None = None,
    check_speed: object = None,
) -> nn.Module:
    """Replace the Linear and Conv2d layers of a model by QLinear and QConv2d, in place.

    model         nn.Module that contains nn.Linear or nn.Conv2d layers (not itself one); weights float32, float16 or
                  bfloat16.
    config        a QScheme for all, its name ('W8A8Dynamic', 'W4A16(group_size=64)') or its preset (W8A8Dynamic);
                  FqnConfig (or its mapping): names, globs, 're:' patterns, types -> scheme; or a Recipe or the path of
                  its file (.yaml, .yml, .toml, .json), which says itself what the arguments filter_fn,
                  embeddings, heads, on_indivisible and num_batches would: these and input_scales are refused then.
    filter_fn     filter_fn(module, name) -> bool: layers for which it is false are left alone; None: all.
    device        where the new layers are made and, at the end, the whole model is moved; None: stay.
    data          batches to calibrate static inputs (W8A8, W4A8, W4A8TwoLevel, W4A4) with: each a tensor, a tuple (its
                  first item is used) or a mapping of forward's keywords, or what batch_to_inputs(batch) makes of it.
                  The model runs in eval mode without gradients.
    num_batches   how many of them; None: all, and `data` has a length then.
    improve       names of improvers, which need `data` too, with their default options (their functions take more): of
                  the float model 'equalize' (equalize_), 'smooth' (smooth_), 'search_scales' (search_scales_), 'rotate'
                  and 'rotate_online' (rotate_, of classes it knows); of the codes 'gptq' (gptq_), 'learn_rounding'
                  (learn_rounding_), 'bias_correction' (bias_correction_). They act in this order. 'smooth' and
                  'search_scales' are refused together, and so are 'rotate' and 'rotate_online'. `data` must be a list
                  or a loader, no generator, as each goes through it.
    embeddings    also replace nn.Embedding by QEmbedding (int8 per row whatever the scheme; None leaves one alone).
    heads         output heads (lm_head; what get_output_embeddings() gives), and embeddings tied to one. None: left in
                  floating point, as other tools do, and the warning says so; False: the same without a word; True:
                  quantised. A name or pattern of the config that means the head decides first.
    on_indivisible  layers whose K the scheme's group size does not divide: 'per_channel' gives them one scale a
                  channel, 'skip' leaves them in floating point, 'error' raises SchemeError.
    input_scales  {layer name: real size of one input code} for static schemes, in place of data.
    check_speed   example inputs (a tensor, a tuple of arguments, a mapping of keyword arguments): the quantised model
                  runs once, its layers are timed against float ones for about two seconds, and a QuantizationWarning
                  gives the figures of those that are slower (compare_speed). The same run shows which matrices of
                  other classes are only added, which the warning then leaves out. None: convolutions of a CPU with
                  fewer than 256 weights an output channel, which integers make slower most often, are timed on one
                  image of 28 x 28 for 0.2 seconds at most, each kind once in a process, and so are weight-only Linears
                  of up to 2^20 weights, at 1 and 32 rows; of 16-bit Linears on a GPU the plan is asked, and those that
                  are slower at every number of rows are told. False: nothing is timed.
    ->            the model. The scheme's calibrator gives the ranges of weights; shared modules stay shared; hooks and
                  training flags are kept.
    Transactional: on any exception the model is as before.
    The steps one by one: insert_fake_quantize_ (or SelectiveQuantizer), QuantizationCalibrator, convert_.

    Left in floating point, each with a reason in quantization_report: what has no integer twin (convolutions that do
    not pad with zeros, classes that multiply by their own parameters, layers with a forward of their own), adapters
    (what a wrapping layer of PEFT names as its factors; weights that are trainable while most of the model is frozen),
    heads.
    One QuantizationWarning names them with their share of the bytes where they are 1 % or more and were not excluded.

    Raises ArgumentError or SchemeError naming the layer: keys that match nothing, layers named exactly that cannot be
    converted, layers that simulate already (prepare_qat_), which are for convert_, lazy layers, a missing or unused
    input scale; CalibrationError naming layers that saw no data.

    Example:
        >>> from pyquant.core.presets import W8A8Dynamic
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> type(quantize_(model, W8A8Dynamic(), filter_fn=lambda m, name: name != "2")[0]).__name__
        'QLinear'
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> quantize_(model, "W8A8", data=[torch.randn(4, 8) for _ in range(4)])[2].scheme.is_static
        True
    """
    names = check_names(improve, data)
    target = None if device is None else device_of(device)
    if isinstance(model, nn.Module):
        check_not_sharded(model)
    if check_speed is True:
        raise ArgumentError("check_speed", "True", "example inputs; None for a short look, False for none")
    layers: dict[str, Any] = {
        "filter_fn": filter_fn,
        "embeddings": embeddings,
        "heads": heads,
        "on_indivisible": on_indivisible,
        "input_scales": input_scales,
    }
    if is_recipe(config):
        for name, given in {**layers, "num_batches": num_batches}.items():
            default = inspect.signature(quantize_).parameters[name].default
            if given is not default and given != default:
                raise ArgumentError(name, arguments.shown(given), "nothing beside a recipe, which says it")
        how: dict[str, Any] = {"check_speed": check_speed, "batch_to_inputs": batch_to_inputs}
        before = as_it_is(model) if target is not None and isinstance(model, nn.Module) else []
        with outside_inference_mode(), undone_on_error(before):
            quantize_recipe_(model, config, data, improve=names, **how)  # type: ignore[arg-type]
            if target is not None:
                swap_modules(model, [], device=target, undo=before)
        return model
    layers |= {"device": device, "check_speed": check_speed}
    if data is None:
        with outside_inference_mode():  # what is made in it has no gradient, nor has what comes out of it
            return quantize_layers_(model, config, **layers)  # type: ignore[arg-type]
    if input_scales is not None:
        raise ArgumentError("input_scales", "a mapping, together with data", "one of the two")
    arguments.module("model", model)
    count = count_of(data, num_batches)
    with outside_inference_mode(), undone_on_error() as undo:
        improve_before(names, Before(model, config, data, count, undo, batch_to_inputs))  # type: ignore[arg-type]
        prepare = partial(_twins_from_data, data=data, count=count, improve=names, batch_to_inputs=batch_to_inputs)
        return quantize_layers_(model, config, prepare=prepare, **layers)  # type: ignore[arg-type]


def count_of(data: Iterable[Any], num_batches: int | None) -> int:
    arguments.iterable("data", data)
    if num_batches is not None:
        return arguments.whole("num_batches", num_batches, 1)
    try:
        count = len(data)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError("num_batches", f"None, for a {type(data).__name__} without a length", "a number") from None
    if count == 0:
        raise ArgumentError("data", f"a {type(data).__name__} of no batches", "at least one batch")
    return count


def _twins_from_data(
    model: nn.Module,
    fates: Sequence[Fate],
    *,
    data: Iterable[Any],
    count: int,
    improve: tuple[str, ...],
    batch_to_inputs: BatchToInputs | None,
) -> dict[int, nn.Module]:
    """The quantised twins of all layers, where data has a part in some: where one is static, and with improvers. They
    simulate in the model while data goes through it; afterwards it is as before."""
    is_static = any(fate.layer is not None and fate.layer.scheme.is_static for fate in fates)
    if not improve and not is_static:
        return {}
    warn_of_own_data("quantize_ calibrates")
    layers = [fate for fate in fates if fate.layer is not None and isinstance(fate.site.module, tuple(SIMULATED))]
    twins = twins_of(layers, simulated)
    undo: list[Undo] = []
    swap_modules(model, [*forms_of(fates), *twins], undo=undo)
    try:
        if is_static:
            calibrate_(model, data, count, batch_to_inputs=batch_to_inputs)
        improve_after(model, improve, data, count, batch_to_inputs)
        pairs = [(fate, twin) for fate, (_, twin) in zip(layers, twins, strict=True) if is_simulated(twin)]
        return {id(fate.site.module): noted(twin.to_quantized(), twin.note) for fate, twin in pairs}
    finally:
        for step in reversed(undo):
            step()
