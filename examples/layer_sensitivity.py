"""Which layer of a small language model suffers by 4 bits: every sensitivity metric beside what is measured.

python examples/layer_sensitivity.py      the standard library's sources, on the CPU, some minutes; no download
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from pathlib import Path
from types import ModuleType

import torch

import pyquant
from pyquant.mixed_precision.choices.switchable import SwitchableModel
from pyquant.mixed_precision.loss.evaluate import LossOfOutputs

METRICS = ("kl", "fisher", "noise", "hessian", "sqnr", "error")
FORMATS = ("float", "int8", "int4")


def byte_transformer() -> ModuleType:
    """The model, its text and its training, from the script beside this one."""
    spec = importlib.util.spec_from_file_location("byte_transformer", Path(__file__).with_name("byte_transformer.py"))
    if spec is None or spec.loader is None:
        raise FileNotFoundError("byte_transformer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ranks(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).argsort().argsort().double()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fiftieth of the training")
    steps, count = (24, 8) if parser.parse_args(argv).quick else (1200, 60)
    bytes_ = byte_transformer()
    train, held_out = bytes_.text()
    torch.manual_seed(0)
    model = bytes_.ByteTransformer()
    recipe = pyquant.QATRecipe(optimizer="adamw", bits=4)
    pyquant.finetune(model, bytes_.loss, bytes_.batches(train, steps, 0), lr=3e-3, steps=steps, recipe=recipe)

    calibration, scored = list(bytes_.batches(train, 8, 2)), list(bytes_.batches(held_out, 8, 1))
    switchable = SwitchableModel(model.eval(), FORMATS, calibration, num_batches=8)
    reports = {m: pyquant.sensitivity(switchable, metric=m, batches=scored) for m in METRICS}
    by_kl = reports["kl"].loss
    groups = reports["kl"].groups
    print(f"{'int4':<14}" + "".join(f"{m:>10}" for m in METRICS))
    for g, group in enumerate(groups):
        print(f"{group.name:<14}" + "".join(f"{reports[m].loss[g][2]:>10.2g}" for m in METRICS))
    ratios = [reports["fisher"].loss[g][f] / by_kl[g][f] for g in range(len(groups)) for f in (1, 2)]
    print(f"fisher / kl    smallest {min(ratios):.2f}, largest {max(ratios):.2f}")

    measured = LossOfOutputs(switchable, "kl", scored)
    draw = random.Random(0)
    configs = [tuple(draw.randrange(3) for _ in groups) for _ in range(count)]
    losses = [measured(config) for config in configs]
    print(f"\nsums of single losses beside {count} random configurations")
    for name, report in reports.items():
        sums = [sum(report.loss[g][f] for g, f in enumerate(config)) for config in configs]
        spearman = torch.corrcoef(torch.stack([ranks(sums), ranks(losses)]))[0, 1]
        told = f"; sum / measured: median {sorted(s / v for s, v in zip(sums, losses, strict=True))[count // 2]:.2f}"
        passes = f"{report.cost.forward_passes} forward, {report.cost.backward_passes} backward passes"
        print(f"{name:<10} Spearman {spearman:.3f}{told if report.unit == 'nats per row' else ''} ({passes})")


if __name__ == "__main__":
    main()
