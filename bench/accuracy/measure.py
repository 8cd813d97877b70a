"""What quantisation costs one model: everything that is done to the model of one task and seed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from torch import nn, no_grad

from bench.accuracy.models import TASKS, Batch, Block, Task, loss_of, loss_of_logits
from bench.accuracy.train import Schedule, train, train_float
from pyquant import (
    W4A4,
    W4A8,
    W4A16,
    W8A8,
    QATRecipe,
    QScheme,
    W4A8TwoLevel,
    bias_correction_,
    distillation,
    finetune,
    gptq_,
    insert_fake_quantize_,
    prepare_qat_,
    register_smoothing,
    smooth_,
)
from pyquant.measure.timing import using_threads
from pyquant.simulate.calibrate import calibrate_
from pyquant.simulate.kinds import is_simulated

CALIBRATION = 8  # batches
# plain GPTQ: what the other options change is in reconstruction.py
PLAIN: Final[dict[str, Any]] = {"act_order": False, "correct_targets": False}
OUTLIERS, GAIN = (3, 17, 40), 50.0
# The tutorials' rule is 1 % of the initial learning rate, with SGD; the initial one of SGD on these models is 0.2.
RECIPES: Final[dict[str, Callable[[Task], Schedule]]] = {
    "SGD 1 %": lambda task: Schedule("sgd", 0.002),
    "AdamW 30 %": lambda task: Schedule("adamw", 0.3 * task.learning_rate),
}
BEST: Final = "Muon, half distilled"  # pyquant's own loop, with QATRecipe(bits=4, optimizer="muon")

register_smoothing(Block, "norm1", ["qkv"])
register_smoothing(Block, "norm2", ["fc1"])


@dataclass(frozen=True)
class Figures:
    """rise: cross-entropy minus the float model's, nats. accuracy: minus the float model's, points."""

    rise: float
    accuracy: float


@dataclass(frozen=True)
class SeedResult:
    """Everything of one task and seed. base: (cross-entropy, accuracy in %) of the float model."""

    task: str
    seed: int
    base: tuple[float, float]
    figures: dict[str, Figures]


@dataclass(frozen=True)
class Size:
    """How much is done. share: of the float schedule; test: of the held-out batches; qat: of the float schedule."""

    share: float = 1.0
    test: float = 1.0
    qat: float = 0.1


QUICK = Size(share=0.1, test=0.25, qat=0.02)


# one thread: sums of float products depend on their number, so training would end elsewhere on another machine; the
# processor is filled by --jobs, a process each
@using_threads(1)
def measure(name: str, seed: int, size: Size) -> SeedResult:
    """Train the float model of a task and quantise it in every way."""
    task = TASKS[name]
    return Rig(task, seed, size, train_float(task, seed, size.share)).run()


class Rig:
    """A float model, the held-out data it is judged on, and what is done to copies of it."""

    def __init__(self, task: Task, seed: int, size: Size, model: nn.Module) -> None:
        self.task, self.seed, self.size, self.model = task, seed, size, model
        self.test = list(
            task.batches("test", max(1, round(task.test_batches * size.test)), task.batch_size, 1000 + seed)
        )
        self.calibration = list(task.batches("train", CALIBRATION, task.batch_size, 2000 + seed))
        self.base = self.judge(model)
        self.figures: dict[str, Figures] = {}

    def run(self) -> SeedResult:
        """All rows. -> the result, plain numbers only."""
        self.rounding()
        self.activations()
        if self.task.name == "gpt3":
            self.outliers()
        if self.task.name != "digits":
            self.groups()
            self.training()
        return SeedResult(self.task.name, self.seed, self.base, self.figures)

    # ---- what is measured

    def rounding(self) -> None:
        """8 bits; 4-bit weights alone, with scales by max and MSE, and with what makes up for the rounding."""
        self.note("W8A8", self.simulated(W8A8(), "max"))
        self.note("W4 max", self.simulated(W4A16(None), "max"))
        by_mse = self.simulated(W4A16(None))
        self.note("W4 MSE", by_mse)
        corrected = copy.deepcopy(by_mse)
        bias_correction_(corrected, self.calibration, CALIBRATION)
        self.note("W4 MSE, bias correction", corrected)
        gptq_(by_mse, self.calibration, CALIBRATION, error="kl", **PLAIN)
        self.note("W4 GPTQ", by_mse)
        bias_correction_(by_mse, self.calibration, CALIBRATION)
        self.note("W4 GPTQ, bias correction", by_mse)

    def activations(self) -> None:
        """Rounded inputs, weights in floating point: 4 bits with and without a zero point; 8 bits by entropy."""
        for name, scheme in (("A4 signed", W4A4()), ("A4 affine", W4A4(symmetric_inputs=False))):
            both = self.simulated(scheme)
            self.note(f"W4{name}", both)
            self.note(name, weights_off(both))
        self.note("A8 entropy", weights_off(self.simulated(W8A8(), "max", "entropy")))
        self.note("W4A8", self.simulated(W4A8(None)))
        both = self.simulated(W4A4(symmetric_inputs=False))
        gptq_(both, self.calibration, CALIBRATION, error="kl", **PLAIN)
        self.note("W4A4 affine, GPTQ", both)

    def groups(self) -> None:
        """4-bit weights with a float scale for 32 codes, and with a whole step of the channel's scale instead."""
        for name, scheme in (("W4A8, groups of 32", W4A8(32)), ("W4A8, groups of 32 of two levels", W4A8TwoLevel(32))):
            rounded = self.simulated(scheme)
            self.note(name, rounded)
            gptq_(rounded, self.calibration, CALIBRATION, error="kl", **PLAIN)
            self.note(f"{name}, GPTQ", rounded)

    def outliers(self) -> None:
        """The same function with outliers in its activations, as it is and after smoothing."""
        model = inject_outliers(copy.deepcopy(self.model))
        self.note("outliers, W8A8", self.simulated(W8A8(), "max", of=model))
        smooth_(model, self.calibration, CALIBRATION)
        self.note("outliers, W8A8 smoothed", self.simulated(W8A8(), "max", of=model))

    def training(self) -> None:
        """Quantisation-aware training for a tenth of the schedule, from the calibrated model, and a float control."""
        ways: dict[str, Callable[[nn.Module], nn.Module]] = {
            name: partial(self.trained, schedule=recipe(self.task)) for name, recipe in RECIPES.items()
        }
        for name, trained in (ways | {BEST: self.distilled}).items():
            self.note(f"float control, {name}", trained(copy.deepcopy(self.model)))
            for label, scheme in (("W4A8", W4A8(None)), ("W4A4 affine", W4A4(symmetric_inputs=False))):
                self.note(f"{label}, QAT {name}", trained(prepare_qat_(self.simulated(scheme))))
        learns = prepare_qat_(self.simulated(W4A4(symmetric_inputs=False)), learn_amax=True)
        learned = self.trained(learns, RECIPES["AdamW 30 %"](self.task))
        self.note("W4A4 affine, QAT AdamW 30 %, learned ranges", learned)

    # ---- how

    def simulated(
        self, scheme: QScheme, weights: str = "mse", inputs: str = "mse", of: nn.Module | None = None
    ) -> nn.Module:
        """A copy of the model with simulated layers, calibrated."""
        given = None if scheme.inputs is None else replace(scheme.inputs, calibrator=inputs)
        scheme = replace(scheme, weights=replace(scheme.weights, calibrator=weights), inputs=given)
        model = copy.deepcopy(self.model if of is None else of)
        insert_fake_quantize_(model, {"_default": scheme, **dict.fromkeys(self.task.left_alone)})
        return calibrate_(model, self.calibration, CALIBRATION)

    def trained(self, model: nn.Module, schedule: Schedule) -> nn.Module:
        return train(model, *self._lesson(), schedule)

    def distilled(self, model: nn.Module) -> nn.Module:
        """Trained by finetune, with Muon, half of the loss from the float model; that of the control too."""
        batches, steps = self._lesson()
        loss = distillation(self.model, lambda m, batch: m(batch[0]), loss_of_logits)
        recipe = QATRecipe(bits=4, optimizer="muon")
        finetune(model, loss, batches, lr=recipe.peak_lr(self.task.learning_rate), steps=steps, recipe=recipe)
        return model.eval()

    def _lesson(self) -> tuple[Iterator[Batch], int]:
        """The batches of a training after the float schedule, the same ones for every recipe, and how many."""
        steps = max(1, round(self.task.steps * self.size.qat))
        return self.task.batches("train", steps, self.task.batch_size, 3000 + self.seed), steps

    def note(self, what: str, model: nn.Module) -> None:
        loss, accuracy = self.judge(model)
        self.figures[what] = Figures(loss - self.base[0], accuracy - self.base[1])

    @no_grad()
    def judge(self, model: nn.Module) -> tuple[float, float]:
        """(cross-entropy in nats, accuracy in %) on the held-out batches."""
        model.eval()
        loss = sum(float(loss_of(model, batch)) for batch in self.test)
        right = sum(_right(model, batch) for batch in self.test)
        return loss / len(self.test), 100 * right / len(self.test)


@no_grad()
def inject_outliers(model: nn.Module, gain: float = GAIN) -> nn.Module:
    """Three channels of every norm `gain` times as large, columns that read them as much smaller: the same function,
    in the form that large language models grow by themselves."""
    for block in model.blocks:  # type: ignore[union-attr]
        for norm, linear in ((block.norm1, block.qkv), (block.norm2, block.fc1)):
            for channel in OUTLIERS:
                norm.weight[channel] *= gain
                norm.bias[channel] *= gain
                linear.weight[:, channel] /= gain
    return model


def weights_off(model: nn.Module) -> nn.Module:
    """Weights in floating point again, inputs as they are."""
    for layer in _layers(model):
        layer.weight_fake_quant.mode = "off"  # type: ignore[union-attr]
    return model


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if is_simulated(module))


def _right(model: nn.Module, batch: Batch) -> float:
    return float((model(batch[0]).argmax(-1) == batch[1]).double().mean())


def gathered(results: list[SeedResult]) -> Mapping[str, list[Mapping[str, Figures]]]:
    """{task: the figures of each seed}."""
    found: dict[str, list[Mapping[str, Figures]]] = {}
    for result in results:
        found.setdefault(result.task, []).append(result.figures)
    return found
