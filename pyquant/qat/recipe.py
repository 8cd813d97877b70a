"""From a training recipe to one for quantisation-aware training: the tutorials' rules, and better ones."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from pyquant.core import arguments
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.nn.match import FqnConfig
from pyquant.recipe import QatModification, Recipe
from pyquant.recipe.sections import ADAM, RecipeNotice, rescales
from pyquant.simulate.fake_quantize import FakeQuantize

OPTIMIZERS: Final = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "muon": "Muon"}
# Peak learning rates as shares of the training's, by the fewest bits. Muon's steps are bounded in every direction of a
# matrix, so they may be larger; its share is that of AdamW's rate.
PEAKS: Final[dict[str | None, dict[int, float]]] = {"muon": {8: 0.1, 4: 4.0}, None: {8: 0.01, 4: 0.3}}


@dataclass(frozen=True)
class QATRecipeModification(QatModification):
    """The rules of thumb of the PTQ and QAT guides, applied to a training recipe: what SuperGradients does, as coded.

    batch_size_divisor     batch sizes of training and validation are divided by it, but only where ranges are learned
                           (learn_amax): the recipe's text does not say so, the code that it describes does.
    max_epochs_divisor     epochs are divided by it, at least 1 remains.
    lr_decay_factor        learning rate, warm-up learning rate and weight decay are multiplied by it. A recipe without
                           a warm-up learning rate gets 1 % of the new learning rate.
    warmup_epochs_divisor  warm-up: the new number of epochs divided by it, at least 1.
    cosine_final_lr_ratio  the schedule becomes a cosine that ends at this share of the new learning rate.
    disable_phase_callbacks, disable_augmentations   empty the list of phase callbacks; take the transforms of
                           validation for training too.
    Averages of weights (ema) and synchronised batch norm (sync_bn) are switched off where they are on. The number of
    GPUs stays as it is: one GPU only was a limit of that framework, not a rule. Alias: QATRecipeModificationCallback.
    Raises ArgumentError for a divisor below 1, lr_decay_factor not above 0 or a cosine_final_lr_ratio below 0, and
    (called) for a missing key.
    Source: docs/qat.md 6.

    Example:
        >>> cfg = {"training_hyperparams": {"max_epochs": 100, "initial_lr": 0.1, "optimizer_params":
        ...        {"weight_decay": 1e-4}}, "dataset_params": {}}
        >>> new = QATRecipeModification()(cfg)["training_hyperparams"]
        >>> new["max_epochs"], new["initial_lr"], new["lr_mode"], new["lr_warmup_epochs"]
        (10, 0.001, 'cosine', 1)
    """

    def __post_init__(self) -> None:
        for name in ("batch_size_divisor", "max_epochs_divisor", "warmup_epochs_divisor"):
            arguments.whole(name, getattr(self, name), 1)
        arguments.number("lr_decay_factor", self.lr_decay_factor, 0, above=True)
        arguments.number("cosine_final_lr_ratio", self.cosine_final_lr_ratio, 0)

    @staticmethod
    def from_recipe(recipe: Recipe) -> QATRecipeModification:
        """The rules with the parameters in a recipe's pre_launch_callbacks_list, or the defaults.

        Example:
            >>> text = '{"pre_launch_callbacks_list": [{"QATRecipeModificationCallback": {"max_epochs_divisor": 5}}]}'
            >>> QATRecipeModification.from_recipe(Recipe.loads(text, "json")).max_epochs_divisor
            5
        """
        if not isinstance(recipe, Recipe):
            raise ArgumentError("recipe", arguments.shown(recipe), "a Recipe")
        return QATRecipeModification(**({} if recipe.callback is None else vars(recipe.callback)))

    def __call__(self, cfg: Mapping[str, Any]) -> dict[str, Any]:
        """A changed copy of a recipe.

        cfg  {"training_hyperparams": {"max_epochs", "initial_lr", "optimizer_params": {"weight_decay"}, ...},
             "dataset_params": {"train_dataloader_params": {"batch_size"}, ...}, "quantization_params":
             {"selective_quantizer_params": {"learn_amax"}, ...}}; the last also at the top level, as the YAML block of
             the guide has it. With `ptq_only: True` (at either place) nothing is trained: the copy is unchanged, and a
             RecipeNotice says so. Another tells of optimisers that rescale each gradient (Adam, RMSProp).
        """
        new, hyper, epochs, lr = _training(cfg)
        if hyper is None:
            return new
        if rescales(hyper.get("optimizer")):
            warnings.warn(f"training_hyperparams.optimizer {hyper['optimizer']!r}: {ADAM}", RecipeNotice, stacklevel=2)
        optimizer = _section(hyper, "optimizer_params", "training_hyperparams.")
        decay = _value(optimizer, "weight_decay", "training_hyperparams.optimizer_params.")
        lr *= self.lr_decay_factor
        warmup_lr = hyper.get("warmup_initial_lr")
        data = new.get("dataset_params") or {}
        if learns_amax(new):
            for loader in ("train_dataloader_params", "val_dataloader_params"):
                if "batch_size" in (data.get(loader) or {}):
                    data[loader]["batch_size"] = max(data[loader]["batch_size"] // self.batch_size_divisor, 1)
        hyper["max_epochs"] = max(int(epochs) // self.max_epochs_divisor, 1)
        hyper["initial_lr"] = lr
        hyper["warmup_initial_lr"] = lr * 0.01 if warmup_lr is None else warmup_lr * self.lr_decay_factor
        optimizer["weight_decay"] = decay * self.lr_decay_factor
        hyper |= {"lr_mode": "cosine", "cosine_final_lr_ratio": self.cosine_final_lr_ratio}
        hyper["lr_warmup_epochs"] = max(hyper["max_epochs"] // self.warmup_epochs_divisor, 1)
        for name in ("ema", "sync_bn"):
            if hyper.get(name):
                hyper[name] = False
        if self.disable_phase_callbacks and hyper.get("phase_callbacks"):
            hyper["phase_callbacks"] = []
        validation = data.get("val_dataset_params") or {}
        if self.disable_augmentations and "transforms" in validation:
            data.setdefault("train_dataset_params", {})["transforms"] = copy.deepcopy(validation["transforms"])
        return new


QATRecipeModificationCallback = QATRecipeModification


@dataclass(frozen=True)
class QATRecipe:
    """Better rules: the learning rate depends on the bits, the optimiser and the batch stay as they are.

    bits        fewest bits of any quantised tensor, 2 to 8 (fewest_bits(model or config) computes it).
    schedule    share of the training schedule: 10 %; 30 % closes some more of the gap.
    peak        peak learning rate as a share of the training's; None: 1 % at 8 bits, 30 % at 4 bits (measured there and
                taken below 6 bits), and 10 % or four times that of AdamW for 'muon'.
    warmup      share of the steps (or epochs) with a rising learning rate.
    final       the half cosine ends at this share of the peak.
    grad_clip   largest norm of all gradients together; 0 clips nothing.
    optimizer   None: the training's own; 'sgd' (momentum 0.9), 'adam', 'adamw' or 'muon', which with
                distillation recovers most at 4 bits (docs/accuracy.md).
    Raises ArgumentError. Source: docs/qat.md 6.

    Example:
        >>> recipe = QATRecipe(bits=4)
        >>> recipe.peak_lr(0.1), recipe.lr_factor(0, 100), recipe.lr_factor(9, 100), round(recipe.lr_factor(99, 100), 4)
        (0.03, 0.1, 1.0, 0.0103)
    """

    bits: int = 8
    schedule: float = 0.1
    peak: float | None = None
    warmup: float = 0.1
    final: float = 0.01
    grad_clip: float = 1.0
    optimizer: str | None = None

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in range(2, 9):
            raise ArgumentError("bits", repr(self.bits), "2 to 8")
        for name in ("schedule", "final"):
            arguments.number(name, getattr(self, name), 0, above=True)
        arguments.number("grad_clip", self.grad_clip, 0)
        if self.peak is not None:
            arguments.number("peak", self.peak, 0, above=True)
        if not arguments.number("warmup", self.warmup, 0) < 1:
            raise ArgumentError("warmup", repr(self.warmup), "a number in [0, 1)")
        if self.optimizer not in (None, *OPTIMIZERS):
            raise ArgumentError("optimizer", repr(self.optimizer), "None, " + ", ".join(map(repr, OPTIMIZERS)))

    def peak_lr(self, training_lr: float) -> float:
        """Peak learning rate for a model that was trained with `training_lr`."""
        arguments.number("training_lr", training_lr, 0)
        shares = PEAKS.get(self.optimizer, PEAKS[None])
        return training_lr * (shares[4 if self.bits < 6 else 8] if self.peak is None else self.peak)

    def lr_factor(self, step: int, steps: int) -> float:
        """Learning rate of a step (0 to steps - 1) as a share of the peak: linear warm-up, then half a cosine."""
        arguments.whole("step", step, 0)
        arguments.whole("steps", steps, 0)
        rising = int(steps * self.warmup)
        if step < rising:
            return (step + 1) / rising
        at = min((step - rising) / max(steps - rising, 1), 1.0)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * at))

    def __call__(self, cfg: Mapping[str, Any]) -> dict[str, Any]:
        """A changed copy of a recipe of the form that QATRecipeModification takes; unchanged with ptq_only."""
        new, hyper, epochs, lr = _training(cfg)
        if hyper is None:
            return new
        hyper["initial_lr"] = self.peak_lr(lr)
        hyper["max_epochs"] = max(round(epochs * self.schedule), 1)
        hyper["warmup_initial_lr"] = hyper["initial_lr"] * 0.01
        hyper["lr_warmup_epochs"] = max(round(hyper["max_epochs"] * self.warmup), 1) if self.warmup else 0
        hyper |= {"lr_mode": "cosine", "cosine_final_lr_ratio": self.final, "clip_grad_norm": self.grad_clip or None}
        if self.optimizer is not None:
            hyper["optimizer"] = OPTIMIZERS[self.optimizer]
            parameters = dict(hyper.get("optimizer_params") or {})
            parameters.pop("momentum", None)
            hyper["optimizer_params"] = parameters | ({} if rescales(self.optimizer) else {"momentum": 0.9})
        return new


def fewest_bits(of: nn.Module | FqnConfig | QScheme | Mapping[Any, QScheme | None]) -> int:
    """The fewest bits of any quantised tensor of a prepared model or of a config: 2 to 8; ArgumentError where there
    is none.

    Example:
        >>> from pyquant.core.presets import W4A8, W8A8
        >>> fewest_bits({"fc1": W4A8(), "_default": W8A8()})
        4
    """
    if isinstance(of, nn.Module):
        bits = [m.scheme.bits for m in of.modules() if isinstance(m, FakeQuantize)]
    else:
        schemes = [of] if isinstance(of, QScheme) else (of.entries if isinstance(of, FqnConfig) else of).values()
        tensors = [t for s in schemes if s is not None for t in (s.weights, s.inputs, s.outputs) if t is not None]
        bits = [t.bits for t in tensors if t.bits != 16]
    if not bits:
        raise ArgumentError("of", type(of).__name__, "a prepared model, or a config with 4- or 8-bit layers")
    return min(bits)


def learns_amax(cfg: Mapping[str, Any]) -> bool:
    """Whether a recipe learns its ranges (selective_quantizer_params.learn_amax, at either place)."""
    places = (cfg.get("quantization_params") or {}, cfg)
    return any((place.get("selective_quantizer_params") or {}).get("learn_amax") for place in places)


def _training(cfg: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None, float, float]:
    """A copy of a recipe, its training_hyperparams, epochs and learning rate; with ptq_only None and a notice that
    its training stays as it is."""
    new = copy.deepcopy(dict(cfg))
    if any(place.get("ptq_only") for place in (new.get("quantization_params") or {}, new)):
        notice = "ptq_only: True, so nothing is trained after calibration, and the training recipe is left as it is"
        warnings.warn(notice, RecipeNotice, stacklevel=3)
        return new, None, 0, 0
    where = "training_hyperparams."
    hyper = _section(new, "training_hyperparams")
    return new, hyper, _value(hyper, "max_epochs", where), _value(hyper, "initial_lr", where)


def _section(cfg: dict[str, Any], name: str, where: str = "") -> dict[str, Any]:
    if not isinstance(cfg.get(name), Mapping):
        raise ArgumentError("cfg", f"no mapping '{where}{name}'", "a recipe with that section")
    cfg[name] = dict(cfg[name])
    section: dict[str, Any] = cfg[name]
    return section


def _value(section: Mapping[str, Any], name: str, where: str) -> float:
    value = section.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentError("cfg", f"{where}{name} = {value!r}", "a recipe that has this number")
    return value
