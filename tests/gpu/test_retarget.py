"""Programs that were exported on a CPU and are retargeted to a GPU: the whole program on a GPU; on the simulator, which
torch does not know as a device, its layers with the constants that the program would have."""

from __future__ import annotations

import pytest
import torch
from cuda_ops import CudaOps
from qlayers import layer
from torch import nn

import pyquant
from pyquant.core.presets import W8A8, W4A8Dynamic, W4A8TwoLevelDynamic, W8A8Dynamic
from pyquant.integrations.compile import retarget
from pyquant.integrations.compile.retarget import _layer
from pyquant.ops import LinearSpec

SCHEMES = [W8A8(), W8A8Dynamic(symmetric_inputs=False), W4A8Dynamic(32), W4A8TwoLevelDynamic(64)]


@pytest.fixture
def device(there: CudaOps) -> CudaOps:
    return there


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_bits_are_those_of_the_cpu(device: CudaOps, scheme: pyquant.QScheme) -> None:
    model, x = nn.Sequential(layer(scheme, 128, 48)).eval(), torch.linspace(-2, 2, 5 * 128).reshape(5, 128)
    with torch.no_grad():
        program, want = torch.export.export(model, (x,)), model(x)
    if not device.is_simulator:
        assert torch.equal(retarget(program, "cuda").module()(x.cuda()).cpu(), want)
        return
    (call,) = (n for n in program.graph.nodes if n.target is torch.ops.pyquant.qlinear.default)
    spec = LinearSpec.from_ints(call.args[3])
    held, wanted = _layer(program, "0.storage", spec, torch.device("cuda"), "rows")
    assert torch.equal(device.qlinear(x, held.packed(wanted), None, wanted.to_ints()), want)
