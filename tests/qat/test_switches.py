"""The switches of the founding documents reach training, whichever way a model got there."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from qat_models import draw, mlp
from torch import nn

import pyquant
from pyquant.compat import super_gradients as sg
from pyquant.errors import ArgumentError
from pyquant.integrations.pytorch_quantization import QuantDescriptor, TensorQuantizer
from pyquant.ptq import QuantizationCalibrator, QuantizedMapping, SelectiveQuantizer
from pyquant.ptq.run import calibrate_recipe_, prepare_
from pyquant.qat.learned import LearnedFakeQuantize
from pyquant.qat.prepare import prepare_qat_, range_parameters
from pyquant.qat.recipe import QATRecipe, QATRecipeModificationCallback
from pyquant.recipe import Recipe, RecipeNotice

YAML = """
ptq_only: {ptq_only}
selective_quantizer_params:
  calibrator_w: "max"
  calibrator_i: "histogram"
  per_channel: True
  learn_amax: {learn}
  skip_modules:
calib_params:
  histogram_calib_method: "percentile"
  percentile: 99.99
  num_calib_batches: 4
  verbose: False
"""


def batches() -> list[torch.Tensor]:
    d = draw("switches")
    return [d.normal(16, 32) for _ in range(4)]


def learned(model: nn.Module) -> set[str]:
    return {name for name, m in model.named_modules() if isinstance(m, LearnedFakeQuantize)}


def selective(learn: bool) -> nn.Module:
    model = SelectiveQuantizer(default_learn_amax=learn, verbose=False).quantize_module(mlp())
    QuantizationCalibrator().calibrate_model(model, batches(), num_calib_batches=4)
    return prepare_qat_(model)


def by_recipe(learn: bool) -> nn.Module:
    recipe = Recipe.loads(YAML.format(ptq_only=False, learn=learn))
    model = prepare_(mlp(), recipe)
    calibrate_recipe_(model, recipe, batches())
    return prepare_qat_(model)


def by_recipe_named_again(learn: bool) -> nn.Module:
    recipe = Recipe.loads(YAML.format(ptq_only=False, learn=learn))
    model = prepare_(mlp(), recipe)
    calibrate_recipe_(model, recipe, batches())
    return prepare_qat_(model, recipe)


def from_recipe(learn: bool) -> nn.Module:
    recipe = Recipe.loads(YAML.format(ptq_only=False, learn=learn))
    model = SelectiveQuantizer.from_recipe(recipe, verbose=False).quantize_module(mlp())
    QuantizationCalibrator().calibrate_model(model, batches(), num_calib_batches=4)
    return prepare_qat_(model)


def by_super_gradients(learn: bool) -> nn.Module:
    quantizer = sg.SelectiveQuantizer(default_learn_amax=learn, verbose=False)
    return prepare_qat_(sg.ptq(mlp(), quantizer, batches(), calibration_batches=4))


def copied(learn: bool) -> nn.Module:
    model = SelectiveQuantizer(default_learn_amax=learn, verbose=False).quantize_module(mlp())
    model = copy.deepcopy(model)
    QuantizationCalibrator().calibrate_model(model, batches(), num_calib_batches=4)
    return prepare_qat_(model)


EVERY = {"0.weight_fake_quant", "0.input_fake_quant", "2.weight_fake_quant", "2.input_fake_quant"}


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("flow", [selective, by_recipe, by_recipe_named_again, from_recipe, by_super_gradients, copied])
def test_learn_amax_reaches_training(flow: Callable[[bool], nn.Module], learn: bool) -> None:
    model = flow(learn)
    assert learned(model) == (EVERY if learn else set())
    before = [p.detach().clone() for p in range_parameters(model)]
    model(batches()[0]).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    assert all((p != b).any() for p, b in zip(range_parameters(model), before, strict=True))


def test_what_the_call_says_is_stronger() -> None:
    model = SelectiveQuantizer(default_learn_amax=True, verbose=False).quantize_module(mlp())
    QuantizationCalibrator().calibrate_model(model, batches(), num_calib_batches=4)
    assert learned(prepare_qat_(copy.deepcopy(model), learn_amax=False)) == set()
    assert learned(prepare_qat_(copy.deepcopy(model), learn_amax=["2.input"])) == {"2.input_fake_quant"}


def test_dynamic_inputs_do_not_learn_but_weights_do() -> None:
    model = SelectiveQuantizer(default_learn_amax=True, verbose=False, scheme=pyquant.W8A8Dynamic())
    assert learned(prepare_qat_(model.quantize_module(mlp()))) == {"0.weight_fake_quant", "2.weight_fake_quant"}


def test_a_descriptor_learns_its_tensor() -> None:
    wrapped = QuantizedMapping(
        float_module=mlp()[0], quantized_target_class=_Same, input_quant_descriptor=QuantDescriptor(learn_amax=True)
    )
    model = SelectiveQuantizer(verbose=False).quantize_module(nn.Sequential(wrapped, nn.ReLU(), mlp()[2]))
    QuantizationCalibrator().calibrate_model(model, batches(), num_calib_batches=4)
    assert learned(prepare_qat_(model)) == {"0.fc.input_fake_quant"}


class _Same(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.fc = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


def test_a_tensor_quantizer_learns_by_itself() -> None:
    quantizer = TensorQuantizer(QuantDescriptor(learn_amax=True, amax=1.0))
    quantizer(torch.linspace(-2, 2, 101)).square().sum().backward()
    (scale,) = quantizer.parameters()
    assert scale.grad.item() != 0
    assert not list(TensorQuantizer(QuantDescriptor(amax=1.0)).parameters())


def test_ptq_only_is_not_trained() -> None:
    recipe = Recipe.loads(YAML.format(ptq_only=True, learn=False))
    for simulated in (prepare_(mlp(), recipe), SelectiveQuantizer.from_recipe(recipe).quantize_module(mlp())):
        calibrate_recipe_(simulated, recipe, batches())
        with pytest.raises(ArgumentError, match="ptq_only"):
            prepare_qat_(simulated)
    with pytest.raises(ArgumentError, match="ptq_only"):
        prepare_qat_(mlp(), recipe)
    trainable = prepare_(mlp(), Recipe.loads(YAML.format(ptq_only=False, learn=False)))
    with pytest.raises(ArgumentError, match="ptq_only"):
        prepare_qat_(trainable, recipe)
    assert isinstance(pyquant.quantize_recipe_(mlp(), recipe, batches())[0], pyquant.QLinear)


@pytest.mark.parametrize("place", ["quantization_params", "top"])
@pytest.mark.parametrize("rules", [QATRecipeModificationCallback(), QATRecipe()])
def test_ptq_only_leaves_the_training_recipe_alone(rules: Callable, place: str) -> None:
    cfg = _training("SGD") | ({"ptq_only": True} if place == "top" else {"quantization_params": {"ptq_only": True}})
    with pytest.warns(RecipeNotice, match="ptq_only"):
        assert rules(cfg) == cfg


def _training(optimizer: str | None) -> dict:
    hyper = {"max_epochs": 20, "initial_lr": 0.1, "optimizer_params": {"weight_decay": 0.0}}
    return {"training_hyperparams": hyper | ({"optimizer": optimizer} if optimizer else {}), "dataset_params": {}}


@pytest.mark.parametrize("name", ["Adam", "adamw", "RMSProp", "RMSpropTF"])
def test_adam_is_allowed_with_a_notice(name: str) -> None:
    with pytest.warns(RecipeNotice, match="SGD with momentum"):
        new = QATRecipeModificationCallback()(_training(name))
    assert new["training_hyperparams"]["optimizer"] == name
    assert new["training_hyperparams"]["max_epochs"] == 2


def test_a_recipe_of_adam_is_read_with_a_notice() -> None:
    for name in ("adam", "adamw"):
        with pytest.warns(RecipeNotice, match="SGD with momentum"):
            assert Recipe.from_dict({"qat": {"optimizer": name}}).qat.optimizer == name


def test_sgd_and_silence_are_no_reason_for_a_notice() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        QATRecipeModificationCallback()(_training("SGD"))
        QATRecipeModificationCallback()(_training(None))
        Recipe.from_dict({"qat": {"optimizer": "sgd"}})
