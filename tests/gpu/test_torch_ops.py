"""torch.ops.pyquant on CUDA tensors against the CPU, bit for bit: the bindings, which only a GPU can run."""

from __future__ import annotations

import sys
from pathlib import Path

import accept
import problems
import pytest
import torch
from torch import nn

import pyquant
from pyquant import ops

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
from test_exact import random_layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device: CUDA tensors cannot be made"),
]


def cuda(value: object) -> object:
    return value.cuda() if isinstance(value, torch.Tensor) else value


def compare(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    rule = accept.t1 if want.is_floating_point() else accept.t0
    rule(got.cpu(), want, what=what, waiver="activations and clamps may make results constant")


@pytest.mark.parametrize("start", range(0, 400, 50))
def test_fused_layers_equal_the_cpu(start: int) -> None:
    for index in range(start, start + 50):
        x, operands, spec, codes, reference = random_layer(index)
        w_scale = operands.pop("w_scale")
        w = ops.pack_int4(codes) if spec.w_bits == 4 else codes
        packed = ops.pack_linear(w, w_scale, spec.to_ints(), **operands)
        want = ops.qlinear(x, packed, reference["residual"], spec.to_ints())
        rows = ops.LinearSpec.from_ints(spec.to_ints())
        on_gpu = ops.LinearSpec(**(vars(rows) | {"layout": "rows"})).to_ints()
        there = ops.pack_linear(w.cuda(), w_scale.cuda(), on_gpu, **{k: cuda(v) for k, v in operands.items()})
        assert torch.equal(ops.unpack_linear(there, on_gpu).cpu(), w)
        compare(ops.qlinear(x.cuda(), there, cuda(reference["residual"]), on_gpu), want, f"random_layer({index})")


@pytest.mark.parametrize("epilogue", ["accumulator", "float", "codes"])
def test_plain_products_equal_the_cpu(epilogue: str) -> None:
    for index in range(300):
        problem = problems.gemm_problem(index, epilogue=epilogue)
        op = getattr(ops, problem.op)
        compare(op(**{k: cuda(v) for k, v in problem.call.items()}), op(**problem.call), problem.repeat)


@pytest.mark.parametrize("dtype", problems.FLOATS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_quantisers_equal_the_cpu(dtype: torch.dtype, symmetric: bool) -> None:
    qmin, qmax = (-127, 127) if symmetric else (-128, 127)
    for values in problems.VALUES:
        x = values.tensor(33, 80, dtype)
        want = ops.quantize_dynamic(x, "per_token", 0, symmetric, qmin, qmax)
        for g, w in zip(ops.quantize_dynamic(x.cuda(), "per_token", 0, symmetric, qmin, qmax), want, strict=True):
            compare(g, w, values.name)


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
