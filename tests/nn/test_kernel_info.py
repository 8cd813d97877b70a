"""What a layer says of its kernel on a GPU that is not there."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")

from pyquant import QConv2d, QLinear, scheme_from_name
from pyquant.nn import kernel_info
from pyquant.ops import plan

H200 = plan.Device(90, 132, 232448, 62914560, 4814, "NVIDIA H200", 1980)


@pytest.mark.parametrize(("scheme", "word"), [("W4A16(group_size=128)", "w4a16"), ("W8A16", "w8a16")])
def test_weight_only_layers_name_the_row_that_runs_them(
    scheme: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan.Device, "of", lambda device: H200)
    monkeypatch.setattr(plan, "routed", partial(plan.routed, only_compiled=False))
    layer = QLinear.from_float(nn.Linear(4096, 512, dtype=torch.bfloat16), scheme_from_name(scheme))

    def told(m: int, of: QLinear = layer) -> kernel_info.KernelInfo:
        return kernel_info._weight_only_on_cuda(of, m, torch.device("cuda"))

    assert "decode" in told(1).kernel
    assert word in told(1).kernel
    assert not told(1).is_exact
    assert "us by the cost model" in told(1).reason
    assert told(8192).kernel == "torch matmul", "dequantised for the framework, whose product is quicker"
    assert told(1, layer.to(torch.float32)).kernel == "torch matmul", "no row takes float32 activations"


def test_convolutions_name_the_row_that_reads_their_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """M counts pixels of the result."""
    monkeypatch.setattr(plan.Device, "of", lambda device: H200)
    for name in ("routed", "select"):
        monkeypatch.setattr(plan, name, partial(getattr(plan, name), only_compiled=False))

    def told(conv: nn.Conv2d, m: int = 3136) -> kernel_info.KernelInfo:
        layer = QConv2d.from_float(conv, scheme_from_name("W8A8Dynamic"))
        return kernel_info._on_cuda(layer, m, torch.device("cuda"))

    assert "s8s8_conv" in told(nn.Conv2d(64, 64, 3, padding=1)).kernel
    assert "conv" not in told(nn.Conv2d(3, 64, 7, 2)).kernel, "three channels: rows of patches"
    assert "conv" not in told(nn.Conv2d(64, 64, 1)).kernel, "a product of matrices"
    assert told(nn.Conv2d(64, 64, 3, groups=64)).kernel == "grouped_conv"
    assert told(nn.Conv2d(64, 64, 3, padding=1), 0).kernel != "none"
    assert all(told(nn.Conv2d(64, 64, kernel)).is_exact for kernel in (1, 3))
