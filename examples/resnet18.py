"""ResNet-18 in integers: fold, replace blocks, calibrate, convert, link; then where the chain of codes breaks, and why.

Post-training quantisation of the whole network on one core, without data or downloads: weights are random and images
are drawn from a fixed seed, so the figures compare the integer model with the float one and say nothing of accuracy on
real pictures. Residual sums happen inside the kernels: each BasicBlock becomes a QuantBasicBlock with a quantised
identity branch. Two layers stay in floating point, as one would leave a sensitive layer and the classifier.

    python examples/resnet18.py --width 64 --size 32
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn

import pyquant

SKIP = ("layer4.0.conv1", "linear")
QuantBasicBlock = pyquant.QuantBasicBlock  # its second convolution adds the identity and clips


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside an identity."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU()
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """The variant for small images: a 3 x 3 stem and no pooling before the first block."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        channels = width
        for stage in range(4):
            out, stride = width * 2**stage, 1 if stage == 0 else 2
            blocks = [BasicBlock(channels, out, stride), BasicBlock(out, out, 1)]
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
            channels = out
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.layer4(self.layer3(self.layer2(self.layer1(y))))
        return self.linear(y.mean((2, 3)))


for parent in (BasicBlock, ResNet18):
    pyquant.register_batch_norm(parent, "conv1", "bn1")
pyquant.register_batch_norm(BasicBlock, "conv2", "bn2")
pyquant.register_fusion(ResNet18, "conv1", "relu")


def images(count: int, size: int, seed: int) -> Tensor:
    """Smooth random images [count, 3, size, size], channels last."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, max(size // 4, 1), max(size // 4, 1), generator=generator)
    x = nn.functional.interpolate(coarse, (size, size), mode="bilinear", align_corners=False)
    return x.to(memory_format=torch.channels_last)


def float_model(width: int, size: int) -> ResNet18:
    """A network whose BatchNorms have seen images."""
    torch.manual_seed(0)
    model = ResNet18(width).to(memory_format=torch.channels_last).train()
    with torch.no_grad():
        for seed in range(3):
            model(images(8, size, seed))
    return model.eval()


def quantise(model: ResNet18, size: int) -> nn.Module:
    """The integer model, layers not yet linked; `model` is not changed."""
    model = pyquant.fold_batch_norm_(copy.deepcopy(model))
    scheme = pyquant.W8A8(symmetric_inputs=False)  # a ReLU's output has no negative codes to waste
    quantizer = pyquant.SelectiveQuantizer(scheme=scheme, verbose=False)
    quantizer.register_quantization_mapping(layer_names={BasicBlock}, quantized_target_class=QuantBasicBlock)
    quantizer.register_skip_quantization(layer_names=set(SKIP))
    quantizer.quantize_module(model)
    batches = [images(8, size, seed) for seed in range(10, 14)]
    calibrator = pyquant.QuantizationCalibrator()
    calibrator.calibrate_model(model, method="max", calib_data_loader=batches, num_calib_batches=4)
    return pyquant.fuse_(pyquant.convert_(model))


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs the example. -> its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage (the paper's: 64)")
    parser.add_argument("--size", type=int, default=32, help="height and width of the images")
    options = parser.parse_args(arguments)
    floats = float_model(options.width, options.size)
    model, x = quantise(floats, options.size), images(16, options.size, seed=99)
    with torch.no_grad():
        wanted, apart = floats(x), model(x)
        before = sum(record.extra_bytes for record in pyquant.chain_report(model, x))
        pyquant.link_(model, x)
        y = model(x)
    report = pyquant.chain_report(model, x)
    print(f"{'layer':20} {'state':8} {'extra bytes':>11}  reason")
    for record in report:
        print(f"{record.name:20} {record.state:8} {record.extra_bytes:11}  {record.reason}")
    signal = wanted - wanted.mean(0)  # what tells one image from another
    noise = (y - wanted).double().square().sum() / signal.double().square().sum()
    figures = {
        "linked": sum(record.state == "linked" for record in report),
        "breaks": sum(record.state == "broken" for record in report),
        "extra bytes before linking": before,
        "extra bytes after linking": sum(record.extra_bytes for record in report),
        "linked equals unlinked": float(torch.equal(y, apart)),
        "SQNR dB": -10 * float(noise.log10()),
        "same class as float": float((y.argmax(1) == wanted.argmax(1)).float().mean()),
    }
    print(*(f"{name}: {value:.6g}" for name, value in figures.items()), sep="\n")
    return figures


if __name__ == "__main__":
    main()
