"""Recipes: the printed block, identity of load and dump, strictness, and what follows for layers."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from torch import nn

import pyquant
from pyquant.errors import ArgumentError
from pyquant.recipe import CalibrationParams, LayerRule, QatModification, Recipe, RecipeNotice, SelectiveParams

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

# As the guide prints it: an empty skip_modules, and the callback's parameters next to its name.
PRINTED = """
ptq_only: False
selective_quantizer_params:
  calibrator_w: "max"
  calibrator_i: "histogram"
  per_channel: True
  learn_amax: False
  skip_modules:

calib_params:
  histogram_calib_method: "percentile"
  percentile: 99.99
  num_calib_batches: 16
  verbose: False
"""
CALLBACK = """
pre_launch_callbacks_list:
- QATRecipeModificationCallback:
{indent}batch_size_divisor: 4
{indent}max_epochs_divisor: 10
{indent}lr_decay_factor: 0.01
{indent}warmup_epochs_divisor: 10
{indent}cosine_final_lr_ratio: 0.01
{indent}disable_phase_callbacks: True
"""
FULL = r"""
pyquant_recipe: 1
ptq_only: true
selective_quantizer_params: {calibrator_w: mse, calibrator_i: histogram, per_channel: false, learn_amax: true,
                             skip_modules: [head, "re:.*gate"]}
calib_params: {histogram_calib_method: entropy, percentile: 99.9, num_calib_batches: 4, verbose: true}
pre_launch_callbacks_list:
  - QATRecipeModificationCallback: {batch_size_divisor: 3}
default: {scheme: W8A8, symmetric_inputs: false, inputs: {percentile: 99.5}}
layers:
  "re:blocks\\.[0-3]\\.fc1": {scheme: W4A8, group_size: 32, inputs: {calibrator: max}, reason: "wide, \"odd\" \u00e9"}
  "blocks.5.fc2": {scheme: FP16, reason: sensitive}
  "type:Bilinear":
  blocks.6.fc1: {inputs: {calibrator: mse}, weights: {narrow_range: false}}
chains: [[blocks.0.fc1, blocks.0.fc2]]
residuals: float
search: {formats: [fp16, int8], metric: sqnr, algorithm: greedy, max_drop: 0.5, never_slower_margin: 0}
qat: {optimizer: adam, momentum: 0.5, grad_clip: 0, amp: bf16, start_from: float}
provenance: {gpu: "some GPU", torch: "2.13"}
"""


def test_the_printed_block_is_read_as_printed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recipe = Recipe.loads(PRINTED)
    assert recipe.ptq_only is False
    assert recipe.selective_quantizer_params == SelectiveParams("max", "histogram", True, False, None)
    assert recipe.calib_params == CalibrationParams("percentile", 99.99, 16, False)
    (scheme,) = recipe.config().entries.values()
    assert (scheme.weights.calibrator, scheme.inputs.calibrator) == ("max", "percentile")


@pytest.mark.parametrize(("indent", "warned"), [("  ", True), ("    ", False)])
def test_callback_parameters_beside_and_below_the_name(indent: str, warned: bool) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        recipe = Recipe.loads(PRINTED + CALLBACK.format(indent=indent))
    assert recipe.callback == QatModification(batch_size_divisor=4)
    assert [w.category for w in seen] == ([RecipeNotice] if warned else [])
    assert not warned or "next to QATRecipeModificationCallback" in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what is written back is what is meant
        assert Recipe.loads(recipe.dumps()) == recipe


@pytest.mark.parametrize("form", ["yaml", "toml", "json"])
@pytest.mark.parametrize("text", [PRINTED, FULL, "{}"])
def test_load_dump_load_is_the_identity(text: str, form: str, tmp_path: Path) -> None:
    if form == "toml":
        pytest.importorskip("tomllib", reason="needs Python 3.11")
    recipe = Recipe.loads(text)
    again = Recipe.loads(recipe.dumps(form), form)
    assert again == recipe
    assert again.dumps(form) == recipe.dumps(form)
    assert list(again.layers) == list(recipe.layers)  # their order decides
    (tmp_path / f"r.{form}").write_text(recipe.dumps(form), encoding="utf-8")
    assert Recipe.load(tmp_path / f"r.{form}") == recipe


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"ptq_olny": True}, "'ptq_olny'; allowed"),
        ({"ptq_only": "yes"}, "ptq_only: 'yes'"),
        ({"pyquant_recipe": 2}, "newer"),
        ({"pyquant_recipe": True}, "pyquant_recipe"),
        ({"selective_quantizer_params": {"calibrator": "max"}}, "unknown key 'calibrator'; allowed: "),
        ({"selective_quantizer_params": {"calibrator_w": "maximum"}}, "calibrator_w: 'maximum'"),
        ({"selective_quantizer_params": {"skip_modules": "head"}}, "skip_modules: str 'head'"),
        ({"selective_quantizer_params": {"per_channel": 1}}, "per_channel: 1"),
        ({"calib_params": {"percentile": 0}}, "percentile: 0"),
        ({"calib_params": {"percentile": 100.5}}, "percentile: 100.5"),
        ({"calib_params": {"num_calib_batches": 0}}, "num_calib_batches: 0"),
        ({"calib_params": {"num_calib_batches": 2.5}}, "num_calib_batches: 2.5"),
        ({"calib_params": {"method": "max"}}, "'method'"),
        ({"calib_params": 7}, "calib_params: int 7"),
        ({"pre_launch_callbacks_list": {}}, "a list with one entry"),
        ({"pre_launch_callbacks_list": [{"OtherCallback": {}}]}, "OtherCallback"),
        ({"pre_launch_callbacks_list": [{"QATRecipeModificationCallback": {"lr": 1}}]}, "'lr'"),
        ({"pre_launch_callbacks_list": [{"QATRecipeModificationCallback": None, "batchsize": 1}]}, "'batchsize'"),
        (
            {"pre_launch_callbacks_list": [{"QATRecipeModificationCallback": {}, "batch_size_divisor": 1}]},
            "both below and next to",
        ),
        ({"default": "W9A9"}, "W9A9"),
        ({"default": {"reason": "none"}}, "no scheme"),
        ({"layers": {"a": {"scheme": "W4A8", "groupsize": 3}}}, "groupsize"),
        ({"layers": {"a": {"scheme": "W8A8", "inputs": {"calibrater": "max"}}}}, "calibrater"),
        ({"layers": {"a": {"scheme": "W4A16", "inputs": {"calibrator": "max"}}}}, "W4A16"),
        ({"layers": {"a": {"scheme": "float", "inputs": {"calibrator": "max"}}}}, "stays in floating point"),
        ({"layers": {"a": {"scheme": "W8A8", "weights": {"symmetric": False}}}}, "weights.symmetric"),
        ({"layers": {"a": {"group_size": 3}}}, "'group_size'"),
        ({"layers": {"re:(": None}}, "re:("),
        ({"layers": {"type:os": None}}, "type:os"),
        ({"layers": {"type:functional": None}}, "type:functional"),
        ({"layers": {"_default": None}}, "'_default'"),
        ({"layers": {3: None}}, "key 3"),
        ({"layers": {"head": "W8A8"}, "selective_quantizer_params": {"skip_modules": ["head"]}}, "skip_modules"),
        ({"layers": {"a": {"inputs": {"calibrator": "max"}}}, "default": None}, "the default is null"),
        ({"chains": "on"}, "chains: 'on'"),
        ({"chains": [["a"]]}, "chains[0]"),
        ({"residuals": "drop"}, "residuals: 'drop'"),
        ({"search": {"formats": ["fp8"]}}, "formats[0]: 'fp8'"),
        ({"qat": {"optimiser": "sgd"}}, 'did you mean "optimizer"?'),
        ({"provenance": {"gpu": "a\nb"}}, "one line"),
    ],
)
def test_errors_name_the_key(data: dict, told: str) -> None:
    with pytest.raises(ArgumentError) as error:
        Recipe.from_dict(data, "some.yaml")
    assert told in str(error.value)
    assert "some.yaml" in str(error.value) or "recipe" in str(error.value)


def test_fields_take_what_files_hold() -> None:
    recipe = Recipe(default="W8A8Dynamic", layers={"head": None, "fc": {"scheme": "W4A8", "group_size": 32}})
    told = {"default": "W8A8Dynamic", "layers": {"head": None, "fc": "W4A8(group_size=32)"}}
    assert recipe == Recipe.from_dict(told)
    assert recipe == Recipe(default=recipe.default, layers=dict(recipe.layers))
    assert Recipe(default=None).default_scheme() is None
    assert Recipe(calib_params={"num_calib_batches": 3}).calib_params.num_calib_batches == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"default": pyquant.W8A8()}, "got recipe.default: a QScheme .W8A8.; allowed: a preset's text"),
        ({"layers": {"fc": pyquant.W8A8()}}, "got recipe.layers.'fc'.: a QScheme"),
        ({"default": 8}, "got recipe.default: int 8"),
        ({"heads": "some"}, "got recipe.heads: 'some'"),
        ({"calib_params": {"batches": 3}}, "got recipe.calib_params: "),
        ({"improve": ("gptq", "luck")}, "got recipe.improve.1.: 'luck'"),
    ],
)
def test_wrong_fields_are_refused_where_they_are_given(given: dict, told: str) -> None:
    with pytest.raises(pyquant.ArgumentError, match=told):
        Recipe(**given)


def test_which_rule_decides() -> None:
    recipe = Recipe.loads(FULL)
    rules = recipe.config()
    linear = nn.Linear(2, 2)

    def scheme(name: str, module: nn.Module = linear) -> object:
        return rules.decide(name, module).scheme

    assert scheme("head") is None
    assert scheme("x.gate") is None
    first = scheme("blocks.0.fc1")
    assert (first.weights.bits, first.weights.group_size, first.weights.calibrator) == (4, 32, "mse")
    assert first.inputs.calibrator == "max"  # what a layer says about itself stands
    assert scheme("blocks.5.fc2") == pyquant.FP16()
    assert scheme("other", nn.Bilinear(2, 2, 2)) is None
    rest = scheme("other")
    assert (rest.inputs.symmetric, rest.inputs.calibrator, rest.inputs.percentile) == (False, "entropy", 99.5)
    assert (rest.weights.granularity, rest.weights.calibrator) == ("per_tensor", "mse")
    changed = scheme("blocks.6.fc1")  # names no scheme: the default's, with two changes
    assert changed.inputs.symmetric is False
    assert (changed.inputs.calibrator, changed.weights.narrow_range) == ("mse", False)


def test_histogram_stands_for_the_method_of_the_recipe() -> None:
    recipe = Recipe.from_dict(
        {
            "calib_params": {"histogram_calib_method": "mse"},
            "layers": {"a": {"inputs": {"calibrator": "max"}}, "b": {"inputs": {"calibrator": "histogram"}}},
        }
    )
    found = {key: scheme.inputs.calibrator for key, scheme in recipe.config().entries.items()}
    assert found == {"a": "max", "b": "mse", "_default": "mse"}


def test_a_bare_off_is_read_as_the_word() -> None:
    recipe = Recipe.loads("chains: off\nqat: {amp: off}")
    assert (recipe.chains, recipe.qat.amp) == ("off", "off")
    assert Recipe.loads(recipe.dumps()) == recipe


def test_null_and_float_leave_alone() -> None:
    recipe = Recipe.from_dict({"layers": {"a": None, "b": "float"}, "default": None})
    assert recipe.layers["a"] == recipe.layers["b"] == LayerRule("float")
    assert recipe.config().entries == {"a": None, "b": None}
    assert Recipe.from_dict({"default": None}).config().entries == {"_default": None}


def test_a_recipe_quantises_through_the_one_call() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    recipe = Recipe.from_dict({"default": "W8A8Dynamic", "layers": {"1": "W4A16(group_size=4)"}})
    pyquant.quantize_(model, recipe.config())
    assert [str(layer.scheme) for layer in model] == ["W8A8Dynamic", "W4A16(group_size=4)"]


def test_a_key_that_is_no_text_is_named_and_is_not_the_text_that_it_looks_like() -> None:
    for key in (0, None, True, 1.5):
        with pytest.raises(ArgumentError, match="inputs"):
            Recipe.from_dict({"layers": {"a": {"inputs": {key: 8, "calibrator": "max"}}}})
    rule = {"inputs": {"calibrator": "max"}}
    for key in (1, True):  # also where a rule was read before that looks alike as JSON
        with pytest.raises(ArgumentError, match=r"layers\['b'\]"):
            Recipe.from_dict({"layers": {"a": rule, "b": {key: 1, **rule}}})
