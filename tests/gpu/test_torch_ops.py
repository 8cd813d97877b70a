"""What only a GPU can show of the bindings: streams, graphs and modules that move. Results: test_bindings.py."""

from __future__ import annotations

import accept
import pytest
import torch
from torch import nn

import pyquant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device: CUDA tensors cannot be made"),
]


def compare(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    rule = accept.t1 if want.is_floating_point() else accept.t0
    rule(got.cpu(), want, what=what, waiver="activations and clamps may make results constant")


def test_a_side_stream_is_honoured() -> None:
    layer = pyquant.QLinear.from_float(nn.Linear(512, 256), pyquant.W8A8Dynamic()).cuda()
    x = torch.randn(64, 512)
    want = layer(x.cuda()).cpu()
    stream = torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(stream):
            late = torch.zeros(64, 512, device="cuda")
            torch.cuda._sleep(1_000_000)  # the copy below ends long after the launch has been asked for
            late.copy_(x.cuda(), non_blocking=True)
            got = layer(late)
        stream.synchronize()
        compare(got, want, "side stream")


def test_a_captured_graph_replays_with_new_inputs() -> None:
    layer = pyquant.QLinear.from_float(nn.Linear(512, 256), pyquant.W8A8Dynamic()).cuda()
    static = torch.randn(16, 512, device="cuda")
    layer(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(static)
    for seed in range(20):
        static.copy_(torch.randn(16, 512, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        compare(y, layer(static).cpu(), f"replay {seed}")


def test_a_module_moves_there_and_back_and_names_its_kernel() -> None:
    layer = pyquant.QLinear.from_float(nn.Linear(300, 77), pyquant.W8A8Dynamic())
    x = torch.randn(5, 300)
    want, state = layer(x), {k: v.clone() for k, v in layer.state_dict().items()}
    layer.cuda()
    compare(layer(x.cuda()), want, "moved")
    assert layer.kernel_info(5).kernel.startswith("gemm_")
    for name, value in layer.cpu().state_dict().items():
        assert torch.equal(value, state[name])
