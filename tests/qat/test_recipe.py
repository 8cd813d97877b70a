"""The tutorials' rules with their defaults, and QATRecipe's."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
from qat_models import mlp, prepared

from pyquant import ArgumentError, QATRecipe, QATRecipeModification, QATRecipeModificationCallback, Recipe
from pyquant.core.presets import FP16, W4A4, W4A8, W8A8, W8A8Dynamic
from pyquant.qat.recipe import fewest_bits


def recipe(**changes: object) -> dict:
    cfg = {
        "training_hyperparams": {
            "max_epochs": 250,
            "initial_lr": 0.1,
            "warmup_initial_lr": 0.05,
            "lr_mode": "step",
            "lr_warmup_epochs": 3,
            "optimizer": "SGD",
            "optimizer_params": {"weight_decay": 1e-4, "momentum": 0.9},
            "ema": True,
            "sync_bn": True,
            "phase_callbacks": ["log images"],
            "loss": "ce",
        },
        "dataset_params": {
            "train_dataloader_params": {"batch_size": 65, "shuffle": True},
            "val_dataloader_params": {"batch_size": 200},
            "train_dataset_params": {"transforms": ["flip"]},
            "val_dataset_params": {"transforms": ["crop"]},
        },
        "quantization_params": {"ptq_only": False, "selective_quantizer_params": {"learn_amax": False}},
        "multi_gpu": "DDP",
        "num_gpus": 8,
    }
    cfg["training_hyperparams"].update(changes)
    return cfg


def test_defaults_of_the_documents() -> None:
    assert QATRecipeModificationCallback is QATRecipeModification
    assert dataclasses.asdict(QATRecipeModification()) == {
        "batch_size_divisor": 2,
        "max_epochs_divisor": 10,
        "lr_decay_factor": 0.01,
        "warmup_epochs_divisor": 10,
        "cosine_final_lr_ratio": 0.01,
        "disable_phase_callbacks": True,
        "disable_augmentations": False,
    }


def test_the_rules() -> None:
    cfg = recipe()
    before = copy.deepcopy(cfg)
    new = QATRecipeModification()(cfg)
    assert cfg == before  # a changed copy
    expected = copy.deepcopy(before)
    expected["training_hyperparams"] |= {
        "max_epochs": 25,
        "initial_lr": 0.1 * 0.01,
        "warmup_initial_lr": 0.05 * 0.01,
        "lr_mode": "cosine",
        "cosine_final_lr_ratio": 0.01,
        "lr_warmup_epochs": 2,
        "ema": False,
        "sync_bn": False,
        "phase_callbacks": [],
    }
    expected["training_hyperparams"]["optimizer_params"] = {"weight_decay": 1e-4 * 0.01, "momentum": 0.9}
    assert new == expected  # and nothing else: the batch stays (no learned ranges), and so do the GPUs


@pytest.mark.parametrize("place", ["quantization_params", "top level"])
def test_batches_are_halved_only_where_ranges_are_learned(place: str) -> None:
    cfg = recipe()
    block = {"selective_quantizer_params": {"learn_amax": True}}
    if place == "top level":
        cfg |= block
        del cfg["quantization_params"]
    else:
        cfg["quantization_params"] = block
    data = QATRecipeModification()(cfg)["dataset_params"]
    assert data["train_dataloader_params"] == {"batch_size": 32, "shuffle": True}
    assert data["val_dataloader_params"] == {"batch_size": 100}
    cfg["dataset_params"]["train_dataloader_params"]["batch_size"] = 1
    assert QATRecipeModification()(cfg)["dataset_params"]["train_dataloader_params"]["batch_size"] == 1


def test_smallest_values_and_options() -> None:
    new = QATRecipeModification(disable_phase_callbacks=False, disable_augmentations=True)(
        recipe(max_epochs=5, warmup_initial_lr=None)
    )
    hyper = new["training_hyperparams"]
    assert hyper["max_epochs"] == 1
    assert hyper["lr_warmup_epochs"] == 1
    assert hyper["warmup_initial_lr"] == pytest.approx(0.1 * 0.01 * 0.01)
    assert hyper["phase_callbacks"] == ["log images"]
    assert new["dataset_params"]["train_dataset_params"]["transforms"] == ["crop"]
    other = QATRecipeModification(max_epochs_divisor=5, warmup_epochs_divisor=4, lr_decay_factor=0.1)(recipe())
    assert other["training_hyperparams"]["max_epochs"] == 50
    assert other["training_hyperparams"]["lr_warmup_epochs"] == 12
    assert other["training_hyperparams"]["initial_lr"] == pytest.approx(0.01)


def test_what_is_missing_or_wrong_is_named() -> None:
    for name in ("max_epochs", "initial_lr", "optimizer_params"):
        cfg = recipe()
        del cfg["training_hyperparams"][name]
        with pytest.raises(ArgumentError, match=name):
            QATRecipeModification()(cfg)
    with pytest.raises(ArgumentError, match="weight_decay"):
        QATRecipeModification()(recipe(optimizer_params={}))
    with pytest.raises(ArgumentError, match="training_hyperparams"):
        QATRecipeModification()({})
    for wrong in ({"batch_size_divisor": 0}, {"max_epochs_divisor": 2.5}, {"lr_decay_factor": 0}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            QATRecipeModification(**wrong)


def test_the_better_rule() -> None:
    assert QATRecipe().peak_lr(0.1) == pytest.approx(0.001)
    assert QATRecipe(bits=4).peak_lr(0.1) == pytest.approx(0.03)
    assert QATRecipe(peak=0.1).peak_lr(0.1) == pytest.approx(0.01)
    assert QATRecipe(bits=4, optimizer="muon").peak_lr(0.001) == pytest.approx(0.004)
    assert QATRecipe(optimizer="muon").peak_lr(0.001) == pytest.approx(0.0001)
    assert QATRecipe(peak=0.1, optimizer="muon").peak_lr(0.001) == pytest.approx(0.0001)
    new = QATRecipe(bits=4, optimizer="adamw")(recipe())["training_hyperparams"]
    assert (new["max_epochs"], new["initial_lr"], new["lr_warmup_epochs"]) == (25, pytest.approx(0.03), 2)
    assert (new["lr_mode"], new["cosine_final_lr_ratio"], new["clip_grad_norm"]) == ("cosine", 0.01, 1.0)
    assert new["optimizer"] == "AdamW"
    assert new["optimizer_params"] == {"weight_decay": 1e-4}
    assert QATRecipe(optimizer="sgd")(recipe())["training_hyperparams"]["optimizer_params"]["momentum"] == 0.9
    muon = QATRecipe(bits=4, optimizer="muon")(recipe())["training_hyperparams"]
    assert (muon["optimizer"], muon["initial_lr"]) == ("Muon", pytest.approx(0.4))
    assert muon["optimizer_params"] == {"weight_decay": 1e-4, "momentum": 0.9}
    assert QATRecipe()(recipe())["dataset_params"] == recipe()["dataset_params"]
    for wrong in ({"bits": 16}, {"warmup": 1.0}, {"optimizer": "rmsprop"}, {"schedule": 0}, {"peak": -1}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            QATRecipe(**wrong)


@pytest.mark.parametrize("steps", [1, 2, 7, 100, 1000])
def test_the_schedule(steps: int) -> None:
    factors = [QATRecipe().lr_factor(i, steps) for i in range(steps)]
    rising = steps // 10
    assert all(0 < f <= 1 for f in factors)
    assert factors[:rising] == pytest.approx([(i + 1) / rising for i in range(rising)])
    falling = factors[rising:]
    assert falling[0] == 1.0
    assert falling == sorted(falling, reverse=True)
    expected = [0.01 + 0.99 * (1 + math.cos(math.pi * i / len(falling))) / 2 for i in range(len(falling))]
    assert falling == pytest.approx(expected)
    assert QATRecipe(warmup=0).lr_factor(0, steps) == 1.0


def test_fewest_bits() -> None:
    assert fewest_bits(W8A8()) == 8
    assert fewest_bits({"a": W8A8(), "b": W4A8(), "c": None, "d": FP16()}) == 4
    assert fewest_bits(prepared(mlp(), {"0": W4A4(), "2": W8A8Dynamic()})) == 4
    assert fewest_bits(prepared(mlp(), W8A8Dynamic())) == 8
    with pytest.raises(ArgumentError, match="of"):
        fewest_bits({"a": FP16()})


def test_the_callback_of_a_recipe_has_its_parameters() -> None:
    saved = Recipe.from_dict(
        {"pre_launch_callbacks_list": [{"QATRecipeModificationCallback": {"lr_decay_factor": 0.5}}]}
    )
    found = QATRecipeModification.from_recipe(Recipe.loads(saved.dumps("json"), "json"))
    assert found == QATRecipeModification(lr_decay_factor=0.5)
    assert QATRecipeModification.from_recipe(Recipe()) == QATRecipeModification()
    assert found(recipe())["training_hyperparams"] != QATRecipeModification()(recipe())["training_hyperparams"]
    with pytest.raises(ArgumentError, match="a Recipe"):
        QATRecipeModification.from_recipe({})
