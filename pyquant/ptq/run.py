"""A recipe, run: prepare, calibrate, convert, each on its own and all together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from pyquant.core import arguments
from pyquant.core.names import listed
from pyquant.errors import ArgumentError
from pyquant.nn.convert import Prepare, integer_twin
from pyquant.nn.fates import Fate, twins_of
from pyquant.nn.fuse import fuse_
from pyquant.nn.link import link_
from pyquant.nn.refusals import check_not_simulating
from pyquant.nn.speed import warn_of_speed
from pyquant.nn.swap import as_it_is, swap_modules
from pyquant.nn.undo import undone_on_error
from pyquant.ptq.calibrator import QuantizationCalibrator, Ranges, apply_ranges_
from pyquant.ptq.improve.steps import Before, check_names, improve_after, improve_before
from pyquant.ptq.replace import Like
from pyquant.ptq.selective import SelectiveQuantizer
from pyquant.recipe import Recipe
from pyquant.simulate.calibrate import targets_of
from pyquant.simulate.insert import convert_
from pyquant.simulate.kinds import is_simulated

RecipeLike = Recipe | str | os.PathLike[str] | Mapping[str, Any]


def recipe_of(recipe: RecipeLike) -> Recipe:
    """A recipe as it is, from its file, or from plain data."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, (str, os.PathLike)):
        return Recipe.load(recipe)
    if isinstance(recipe, Mapping):
        return Recipe.from_dict(recipe)
    raise ArgumentError("recipe", type(recipe).__name__, "a Recipe, the path of its file, or a mapping")


def prepare_(model: nn.Module, recipe: RecipeLike) -> nn.Module:
    """Put simulated quantisation into a model as a recipe says, in place.

    recipe  Recipe, path of a .yaml, .toml or .json file, or plain data.
    ->      the model; next calibrate_recipe_, then prepare_qat_ and training (which learns the ranges where the recipe
            says learn_amax, and which ptq_only refuses), or convert_.
    Transactional. Raises ArgumentError naming keys that do nothing.

    Example:
        >>> model = prepare_(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), {"layers": {"1": None}})
        >>> [type(layer).__name__ for layer in model]
        ['FakeQuantLinear', 'Linear']
    """
    return SelectiveQuantizer.from_recipe(recipe_of(recipe)).quantize_module(model)


def calibrate_recipe_(model: nn.Module, recipe: RecipeLike, data: Iterable[Any], **options: Any) -> Ranges:
    """Calibrate a prepared model with the recipe's calib_params.

    data, options  as calib_data_loader and the keywords of QuantizationCalibrator.calibrate_model.
    ->             {'layer.input': Range}.

    Example:
        >>> import torch
        >>> recipe = {"calib_params": {"num_calib_batches": 2, "histogram_calib_method": "max"}}
        >>> model = prepare_(nn.Sequential(nn.Linear(4, 2)), recipe)
        >>> calibrate_recipe_(model, recipe, [torch.ones(3, 4)] * 2)["0.input"].high.item()
        1.0
    """
    params = recipe_of(recipe).calib_params
    return QuantizationCalibrator(verbose=params.verbose).calibrate_model(
        model, data, params.histogram_calib_method, params.num_calib_batches, params.percentile, **options
    )


def _link_pairs(model: nn.Module, pairs: Iterable[tuple[str, str]]) -> None:
    try:
        link_(model, pairs=pairs)
    except ArgumentError as error:
        if error.argument != "pairs":
            raise
        raise ArgumentError("recipe.chains", error.got, error.allowed) from None


def quantize_recipe_(
    model: nn.Module,
    recipe: RecipeLike,
    data: Iterable[Any] | None = None,
    *,
    ranges: Ranges | None = None,
    improve: Sequence[str] = (),
    check_speed: object = None,
    prepare: Prepare | None = None,
    **options: Any,
) -> nn.Module:
    """From a float model to an integer one by a recipe, in place: prepare, calibrate, improve, convert, link.

    data     batches for calibration; None where nothing is static, or with
    ranges   that calibrate_recipe_ found before.
    improve, check_speed   as in quantize_; improvers use as many batches as the calibration. Where the recipe names
             improvers, `improve` is empty.
    prepare  (model, fates of its layers) -> {id of a float layer: its quantised layer}, for layers whose numbers are
             not in the model but in files; it asks for no data. None: all are made of the model's weights.
    options  as in calibrate_recipe_.
    ->       the model. With `chains: auto` activations have moved into the kernels (fuse_), and where something is
             static calibrated neighbours hand over codes (link_), with pairs these alone; for link_ it must be in
             evaluation mode. Transactional: on any exception it is as before.
    Raises ArgumentError where static tensors have neither data nor ranges, and for a model that simulates already.

    Example:
        >>> type(quantize_recipe_(nn.Sequential(nn.Linear(4, 2)), {"default": "W8A8Dynamic"})[0]).__name__
        'QLinear'
    """
    recipe = recipe_of(recipe)
    if data is not None and ranges is not None:
        raise ArgumentError("ranges", "both data and ranges", "one of the two")
    asked = check_names(improve, data)
    if asked and recipe.improve:
        raise ArgumentError(
            "improve", arguments.shown(improve), f"nothing beside the recipe's {listed(recipe.improve)}"
        )
    names, count = asked or check_names(recipe.improve, data), recipe.calib_params.num_calib_batches
    to_inputs = options.get("batch_to_inputs")
    arguments.module("model", model)
    check_not_simulating(model)  # ranges that were trained would be found anew
    undo = as_it_is(model)  # fuse_ and convert_ are steps of their own, taken back here
    with undone_on_error(undo):
        if data is not None:
            improve_before(names, Before(model, recipe.config(), data, count, undo, to_inputs))
        quantizer = SelectiveQuantizer.from_recipe(recipe)
        quantizer.prepare = prepare
        if ranges is not None:
            quantizer.like = Like(recipe.embeddings, recipe.heads, frozenset(ranges))
        undo += quantizer.quantize_reversibly(model)
        simulated = any(is_simulated(module) for module in model.modules())
        static = [target.name for target in targets_of(model, weights=False)] if simulated else []
        if ranges is not None:
            apply_ranges_(model, ranges)
        elif static and data is None:
            raise ArgumentError("data", f"None, for {listed(static)}", "batches, or a dynamic scheme")
        elif static:
            calibrate_recipe_(model, recipe, data, **options)  # type: ignore[arg-type]
        if simulated:
            if data is not None:
                improve_after(model, names, data, count, to_inputs)
            convert_(model)

        def lookup(fate: Fate) -> nn.Module:
            old = fate.site.module
            return (quantizer.made.get(id(old)) or integer_twin(fate)).train(old.training)

        swap_modules(model, twins_of(quantizer.lookups, lookup), undo=undo)
        if not isinstance(recipe.chains, str):
            _link_pairs(fuse_(model), recipe.chains)
        elif recipe.chains == "auto":
            fuse_(model)
            if static:
                link_(model)
        warn_of_speed(model, check_speed, stacklevel=3)
    return model
