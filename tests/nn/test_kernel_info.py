"""What a layer says of its kernel on a GPU that is not there."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")

from pyquant import QLinear, scheme_from_name
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
