"""What moves the accuracy of a model with 4-bit weights and inputs after training, one change at a time: one table."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bench.accuracy.measure import CALIBRATION, PLAIN, Rig, Size
from bench.accuracy.models import TASKS, Batch, loss_of, loss_of_logits
from bench.accuracy.train import train_float
from bench.markers import put
from pyquant import W4A4, QATRecipe, distillation, finetune, gptq_, prepare_qat_, smooth_
from pyquant.measure.timing import using_threads
from pyquant.report.render import table


@dataclass(frozen=True)
class Trial:
    """optimizer, peak (share of the float model's learning rate); teacher: share of the loss that is its; start: what
    is calibrated; learns: ranges that are learned; longer: factor on the steps; batch: factor on the batch."""

    optimizer: str
    peak: float
    teacher: float = 0.0
    start: str = "MSE"
    learns: tuple[str, ...] = ()
    longer: int = 1
    batch: int = 1

    @property
    def name(self) -> str:
        teacher = {0.0: "labels", 1.0: "teacher alone"}.get(self.teacher, f"{self.teacher:g} teacher")
        words = [{"adamw": "AdamW", "muon": "Muon"}[self.optimizer] + f" {100 * self.peak:g} %", teacher]
        words += [f"from {self.start}"] * (self.start != "MSE") + [f"learned {name}" for name in self.learns]
        words += [f"{self.longer} x the steps"] * (self.longer > 1) + [f"{self.batch} x the batch"] * (self.batch > 1)
        return ", ".join(words)

    @property
    def control(self) -> Trial:
        """What decides how the float control is trained."""
        return Trial(self.optimizer, self.peak, self.teacher, longer=self.longer, batch=self.batch)


TRIALS = (
    Trial("adamw", 0.3),
    Trial("adamw", 0.3, start="GPTQ"),
    Trial("adamw", 0.3, start="smoothing"),
    Trial("adamw", 0.3, learns=("*.input",)),
    Trial("adamw", 0.3, batch=2),
    Trial("adamw", 0.3, longer=3),
    Trial("adamw", 0.3, 1.0),
    Trial("adamw", 1.0, 0.5),
    Trial("muon", 4.0),
    Trial("muon", 4.0, 1.0),
    Trial("muon", 4.0, 0.5),
)


class Bench:
    """The starts, made once, and the floats' controls, trained once for each way to train."""

    def __init__(self, task: str, seed: int, size: Size) -> None:
        self.rig = rig = Rig(TASKS[task], seed, size, train_float(TASKS[task], seed, size.share))
        scheme = W4A4(symmetric_inputs=False)
        self.starts: dict[str, nn.Module] = {"MSE": rig.simulated(scheme), "GPTQ": rig.simulated(scheme)}
        gptq_(self.starts["GPTQ"], rig.calibration, CALIBRATION, error="kl", **PLAIN)
        smoothed = copy.deepcopy(rig.model)
        smooth_(smoothed, rig.calibration, CALIBRATION)
        self.starts["smoothing"] = rig.simulated(scheme, of=smoothed)
        self.controls: dict[Trial, float] = {}

    def rise(self, model: nn.Module) -> float:
        return self.rig.judge(model)[0] - self.rig.base[0]

    def row(self, trial: Trial) -> list[object]:
        if trial.control not in self.controls:
            self.controls[trial.control] = self.rise(self.train(copy.deepcopy(self.rig.model), trial))
        control, start = self.controls[trial.control], self.starts[trial.start]
        ends = self.rise(self.train(prepare_qat_(copy.deepcopy(start), learn_amax=trial.learns or None), trial))
        ptq = self.rise(self.starts["MSE"])  # the rise that all are measured by
        shares = (f"{(ptq - ends) / max(ptq - floor, 1e-9):.2f}" for floor in (control, 0.0))
        return [trial.name, f"{self.rise(start):.4f}", f"{ends:.4f}", f"{control:.4f}", *shares]

    def train(self, model: nn.Module, trial: Trial) -> nn.Module:
        task, rig = self.rig.task, self.rig
        steps = max(1, round(task.steps * rig.size.qat)) * trial.longer
        loss: Callable[[nn.Module, Batch], torch.Tensor] = loss_of
        if trial.teacher:
            loss = distillation(rig.model, lambda m, batch: m(batch[0]), loss_of_logits, share=trial.teacher)
        recipe = QATRecipe(bits=4, optimizer=trial.optimizer, peak=trial.peak)
        batches = task.batches("train", steps, task.batch_size * trial.batch, 3000 + rig.seed)
        finetune(model, loss, batches, lr=recipe.peak_lr(task.learning_rate), steps=steps, recipe=recipe)
        return model.eval()


@using_threads(1)  # as in measure.py: training that comes out again
def main(argv: list[str] | None = None, size: Size | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy.tried", description=__doc__)
    parser.add_argument("--task", choices=("bytemlp", "gpt3"), default="gpt3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docs", metavar="FILE", help="put the table between the markers of this Markdown file")
    args = parser.parse_args(argv)
    bench, rows = Bench(args.task, args.seed, size or Size()), []
    for i, trial in enumerate(TRIALS):
        print(f"{i + 1}/{len(TRIALS)} {trial.name}", file=sys.stderr)
        rows.append(bench.row(trial))
    header = ["", "rise before", "rise after", "float control", "recovered, of the control's", "of the float's"]
    print(shown := table(header, rows))
    if args.docs:
        put(Path(args.docs), "tried", shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
