"""Every configuration of small trained models, measured once: the tables that the search is tested and compared on.

python -m bench.search_tables --out tests/mixed_precision/solve/fixtures/tables.npz [--weights folder of trained models]

Four models (two MLPs, a transformer, the same transformer with outliers), each in six groups, each group in float, W8A8
or W4A4: 729 configurations, KL(float | quantised) per output row on held-out inputs, real integer layers. Two kinds of
costs: bit operations, and a made-up latency with launches and conversions between formats.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.accuracy.models import TASKS, Block, Task, mlp
from bench.accuracy.train import train_float
from pyquant import W4A4, W8A8, QScheme, convert_, insert_fake_quantize_
from pyquant.simulate.calibrate import calibrate_

FORMATS = ("fp32", "int8", "int4")
WIDTH_OF = (16, 8, 4)
CALIBRATION = 8  # batches
OUTLIERS, GAIN = (3, 17, 40), 12.0
DIGITS = replace(TASKS["digits"], make=lambda: mlp(64, 256, 128, 128, 64, 64, 10), steps=600)
# Made-up but shaped like a GPU's: a launch per kernel, a rate per format, bytes moved where formats meet.
LAUNCH_US, MACS_PER_US, CONVERT_BYTES_PER_US = 3.0, (4e6, 8e6, 14e6), 2e5

Stage = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A model cut into six stages: stages()[i](model, x) runs group i of one of its copies."""

    task: Task
    outliers: bool = False

    @property
    def is_transformer(self) -> bool:
        return self.task.name == "gpt3"

    def stages(self) -> tuple[Stage, ...]:
        if self.is_transformer:
            return tuple(half(i, part) for i in range(3) for part in ("attention", "mlp"))
        return tuple(linear(i, relu=i < 5) for i in range(6))

    def enter(self, model: nn.Module, inputs: Tensor) -> Tensor:
        if self.is_transformer:
            return model.embed(inputs) + model.place.weight[: inputs.shape[1]]
        return model.embed(inputs).flatten(1) if self.task.name == "bytemlp" else inputs

    def leave(self, model: nn.Module, x: Tensor) -> Tensor:
        x = model.head(model.norm(x)) if self.is_transformer else x
        return x.flatten(0, -2).float().log_softmax(-1)

    def shapes(self, model: nn.Module) -> list[list[tuple[int, int]]]:
        if self.is_transformer:
            return [
                [(m.in_features, m.out_features) for m in pair]
                for block in model.blocks
                for pair in ((block.qkv, block.out), (block.fc1, block.fc2))
            ]
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        return [[(m.in_features, m.out_features)] for m in linears]


def linear(index: int, relu: bool) -> Stage:
    """One Linear of an MLP, with the ReLU behind it."""

    def run(model: nn.Module, x: Tensor) -> Tensor:
        y = (model.layers if hasattr(model, "layers") else model)[2 * index](x)
        return F.relu(y) if relu else y

    return run


def half(index: int, part: str) -> Stage:
    """The attention or the MLP of a transformer block, with its residual connection."""

    def run(model: nn.Module, x: Tensor) -> Tensor:
        block: Block = model.blocks[index]
        if part == "mlp":
            return x + block.fc2(F.gelu(block.fc1(block.norm2(x))))
        q, k, v = (t.unflatten(-1, (block.heads, -1)).transpose(1, 2) for t in block.qkv(block.norm1(x)).chunk(3, -1))
        return x + block.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    return run


def inject_outliers(model: nn.Module) -> nn.Module:
    """The same function with three channels of every norm twelve times as large."""
    for block in model.blocks:
        for norm, reader in ((block.norm1, block.qkv), (block.norm2, block.fc1)):
            for channel in OUTLIERS:
                norm.weight[channel] *= GAIN
                norm.bias[channel] *= GAIN
                reader.weight[:, channel] /= GAIN
    return model


def quantised(model: nn.Module, scheme: QScheme, task: Task, seed: int) -> nn.Module:
    """A copy of the model with real integer layers, ranges by MSE (8-bit weights by their maximum)."""
    weights = replace(scheme.weights, calibrator="max" if scheme.weights.bits == 8 else "mse")
    scheme = replace(scheme, weights=weights, inputs=replace(scheme.inputs, calibrator="mse"))
    model = copy.deepcopy(model)
    insert_fake_quantize_(model, {"_default": scheme, **dict.fromkeys(task.left_alone)})
    data = list(task.batches("train", CALIBRATION, task.batch_size, 2000 + seed))
    return convert_(calibrate_(model, data, CALIBRATION))


@torch.no_grad()
def all_losses(case: Case, models: Sequence[nn.Module], batches: Sequence[Tensor]) -> np.ndarray:
    """KL of all 3^6 configurations, float64 [3, 3, 3, 3, 3, 3]. Every prefix runs once."""
    total = np.zeros((len(models),) * 6)
    stages = case.stages()
    for inputs in batches:
        x = case.enter(models[0], inputs)
        target = x
        for stage in stages:
            target = stage(models[0], target)
        target = case.leave(models[0], target)

        def visit(x: Tensor, config: tuple[int, ...], target: Tensor = target) -> None:
            if len(config) == 6:
                found = case.leave(models[0], x)
                total[config] += F.kl_div(found, target, log_target=True, reduction="batchmean").item()
                return
            for i, model in enumerate(models):
                visit(stages[len(config)](model, x), (*config, i))

        visit(x, ())
    return total / len(batches)


def costs(shapes: list[list[tuple[int, int]]], rows: int = 2048) -> dict[str, np.ndarray]:
    """'bops' [6, 3] (relative to all float), and 'latency' [6, 3] with 'pairs' [5, 3, 3], in microseconds."""
    macs = np.array([sum(k * n for k, n in layers) for layers in shapes], dtype=float)
    bops = macs[:, None] * np.array([b * b for b in WIDTH_OF]) / (macs.sum() * 256)
    latency = np.array(
        [[LAUNCH_US * len(layers) + rows * m / rate for rate in MACS_PER_US] for layers, m in zip(shapes, macs)]
    )
    pairs = np.zeros((5, 3, 3))
    for g, a, b in itertools.product(range(5), range(3), range(3)):
        moved = shapes[g][-1][1] * rows * (WIDTH_OF[a] + WIDTH_OF[b]) / 8
        pairs[g, a, b] = 0.0 if a == b else 1.0 + moved / CONVERT_BYTES_PER_US
    return {"bops": bops, "latency": latency, "pairs": pairs}


def load_or_train(task: Task, seed: int, weights: Path | None) -> nn.Module:
    """The trained float model; the folder keeps what was trained."""
    path = None if weights is None else weights / f"{task.name}.{seed}.pt"
    if path is not None and path.exists() and task is not DIGITS:
        model = task.make()
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    return train_float(task, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    # one thread: sums of float products depend on their number, and losses have to come out again to the last bit
    torch.set_num_threads(1)
    cases = {
        "digits": Case(DIGITS),
        "bytemlp": Case(TASKS["bytemlp"]),
        "gpt3": Case(TASKS["gpt3"]),
        "gpt3x": Case(TASKS["gpt3"], outliers=True),
    }
    arrays: dict[str, np.ndarray] = {}
    for name, case in cases.items():
        for seed in range(options.seeds):
            model = load_or_train(case.task, seed, options.weights)
            if case.outliers:
                with torch.no_grad():
                    inject_outliers(model)
            for field, values in costs(case.shapes(model)).items():
                arrays[f"{name}.{field}"] = values
            size = {"gpt3": 32, "bytemlp": 2048, "digits": 2048}[case.task.name]
            batches = [b[0] for b in case.task.batches("test", 2, size, 1000 + seed)]
            for kind, symmetric in (("affine", False), ("signed", True)):
                eight = quantised(model, W8A8(), case.task, seed)
                four = quantised(model, W4A4(symmetric_inputs=symmetric), case.task, seed)
                table = all_losses(case, [model, eight, four], batches).astype(np.float32)
                arrays[f"{name}.{seed}.{kind}"] = table
                print(name, seed, kind, "uniform", [float(table[(i,) * 6]) for i in range(3)], flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(options.out, **arrays)


if __name__ == "__main__":
    main()
