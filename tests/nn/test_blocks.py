"""QuantBasicBlock and QuantBottleneck: other people's residual blocks, mapped, calibrated, converted, linked, saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant.errors import ArgumentError
from pyquant.nn.chain import QResidual, QResidualAdd


class BasicBlock(nn.Module):
    """Attributes and forward as torchvision's."""

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False), nn.BatchNorm2d(planes)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """Attributes and forward as torchvision's."""

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        out = planes * 4
        self.conv1, self.bn1 = nn.Conv2d(inplanes, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = nn.Conv2d(planes, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride != 1 or inplanes != out:
            self.downsample = nn.Sequential(nn.Conv2d(inplanes, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))
        return self.relu(self.bn3(self.conv3(y)) + (x if self.downsample is None else self.downsample(x)))


KINDS = {BasicBlock: (pyquant.QuantBasicBlock, 1), Bottleneck: (pyquant.QuantBottleneck, 4)}
for _kind, (_, _grown) in KINDS.items():
    for _i in (1, 2) if _grown == 1 else (1, 2, 3):
        pyquant.register_batch_norm(_kind, f"conv{_i}", f"bn{_i}")


def net(kind: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    grown = KINDS[kind][1]
    model = nn.Sequential(nn.Sequential(kind(8, 8), kind(8 * grown, 8)), nn.Sequential(kind(8 * grown, 16, 2)))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    return model.eval()


def images(seed: int) -> Tensor:
    return torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(seed)).relu()


@pytest.mark.parametrize("kind", KINDS)
def test_from_a_float_network_to_integers(kind: type[nn.Module], tmp_path: Path) -> None:
    floats, target = net(kind), KINDS[kind][0]
    x = images(99)
    with torch.no_grad():
        want = floats(x)
    model = pyquant.fold_batch_norm_(net(kind))
    quantizer = pyquant.SelectiveQuantizer(scheme=pyquant.W8A8(symmetric_inputs=False), verbose=False)
    quantizer.register_quantization_mapping({"0", "1"}, target, float_source=kind)
    quantizer.quantize_module(model)
    assert [type(block) for stage in model for block in stage] == [target] * 3
    pyquant.QuantizationCalibrator().calibrate_model(model, [images(i) for i in range(4)], "max", 4)
    pyquant.fuse_(pyquant.convert_(model))
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(QResidual) == kinds.count(QResidualAdd) == 3
    assert nn.Conv2d not in kinds
    with torch.no_grad():
        apart = model(x)
        assert 10 * (want.square().sum() / (apart - want).square().sum()).log10() > 25
        assert torch.equal(pyquant.link_(model, x)(x), apart)
    pyquant.save_pretrained(model, tmp_path)
    skeleton = pyquant.fold_batch_norm_(net(kind))
    for stage in skeleton:
        for i, block in enumerate(stage):
            stage[i] = target(block)
    with torch.no_grad():
        assert torch.equal(pyquant.load_pretrained(tmp_path, skeleton)(x), apart)


@pytest.mark.parametrize("kind", KINDS)
def test_the_float_block_computes_the_same(kind: type[nn.Module]) -> None:
    block, x = pyquant.fold_batch_norm_(net(kind))[1][0], torch.randn(2, 8 * KINDS[kind][1], 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(KINDS[kind][0](block)(x), block(x), rtol=1e-5, atol=1e-5)


def test_what_is_no_such_block_is_refused() -> None:
    folded = pyquant.fold_batch_norm_(net(Bottleneck))[0][0]
    with pytest.raises(ArgumentError, match="third convolution"):
        pyquant.QuantBasicBlock(folded)
    with pytest.raises(ArgumentError, match="BatchNorm in bn1"):
        pyquant.QuantBasicBlock(net(BasicBlock)[0][0])
    with pytest.raises(ArgumentError, match="without conv3"):
        pyquant.QuantBottleneck(pyquant.fold_batch_norm_(net(BasicBlock))[0][0])
    with pytest.raises(ArgumentError, match="block"):
        pyquant.QuantBasicBlock("layer1")
    folded.act = nn.GELU()
    with pytest.raises(ArgumentError, match="GELU"):
        pyquant.QuantBottleneck(folded)
