"""A small classifier in 4 bits: three ways to quantise it after training, then training under the rounding.

python examples/digits_mlp.py            handwritten digits of scikit-learn, on the CPU, under a minute; no download
"""

from __future__ import annotations

import argparse
import copy
import tempfile

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pyquant
from pyquant import W4A4, W8A8, QATRecipe, QuantizationCalibrator, SelectiveQuantizer

Batches = list[tuple[Tensor, Tensor]]


def load(seed: int = 0) -> tuple[Batches, tuple[Tensor, Tensor]]:
    """Training batches of 64, and the 540 held-out images."""
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train, test = order[:1257], order[1257:]
    return [(images[i], labels[i]) for i in train.split(64)], (images[test], labels[test])


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train_float(batches: Batches, epochs: int) -> nn.Module:
    torch.manual_seed(0)
    model = make_model()
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for batch in batches:
            optimiser.zero_grad()
            loss(model, batch).backward()
            optimiser.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, test: tuple[Tensor, Tensor]) -> str:
    model.eval()
    y = model(test[0])
    right = (y.argmax(1) == test[1]).double().mean()
    return f"accuracy {right:6.2%}, cross-entropy {F.cross_entropy(y, test[1]):.4f}"


def quantizers() -> dict[str, SelectiveQuantizer]:
    """One recipe for everything; the sensitive ends left out; the better choice for each part."""
    naive = SelectiveQuantizer("max", "max", scheme=W4A4(), mode="naive", verbose=False)
    hybrid = SelectiveQuantizer("max", "max", scheme=W4A4(), mode="hybrid", verbose=False)
    hybrid.register_skip_quantization(layer_names={"0"})
    # A zero point for inputs that are never negative, ranges by MSE, 8 bits where the pixels come in.
    selective = SelectiveQuantizer("mse", "mse", scheme=W4A4(symmetric_inputs=False), verbose=False)
    selective.register_layer_scheme({"0"}, W8A8(symmetric_inputs=False))
    return {"naive": naive, "hybrid": hybrid, "selective": selective}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the training")
    epochs = 4 if parser.parse_args(argv).quick else 40
    batches, test = load()
    model = train_float(batches, epochs)
    print(f"float                     {accuracy(model, test)}")

    for mode, quantizer in quantizers().items():
        quantised = quantizer.quantize_module(copy.deepcopy(model))
        QuantizationCalibrator().calibrate_model(quantised, batches, num_calib_batches=16)
        print(f"W4A4 {mode:<20} {accuracy(quantised, test)}")

    # Training starts from the calibrated model; a float model trained as long shows what training alone brings.
    scheme = W4A4(symmetric_inputs=False)
    trained = SelectiveQuantizer("mse", "mse", scheme=scheme, verbose=False).quantize_module(copy.deepcopy(model))
    QuantizationCalibrator().calibrate_model(trained, batches, num_calib_batches=16)
    print(f"W4A4 affine, all layers   {accuracy(trained, test)}")
    recipe = QATRecipe(bits=4, optimizer="adamw")
    steps = round(recipe.schedule * epochs * len(batches))
    pyquant.prepare_qat_(trained)
    control = copy.deepcopy(model)
    for each in (trained, control):
        pyquant.finetune(each, loss, batches, lr=recipe.peak_lr(3e-3), steps=steps, recipe=recipe)
    print(f"{f'  trained {steps} steps':<25} {accuracy(trained, test)}")
    print(f"  float, trained as long  {accuracy(control, test)}")

    integers = pyquant.convert_(trained).eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        pyquant.save_pretrained(integers, folder)
        again = pyquant.load_pretrained(folder, make_model).eval()
        same = torch.equal(again(test[0]), integers(test[0]))
    print(f"integers, saved, reloaded {accuracy(again, test)}; bits equal: {same}")


if __name__ == "__main__":
    main()
