"""What never changes a bit: batch, order of rows, threads, instruction set, repetition, compilation (C10, C18, C19)."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import accept
import problems
import pytest
import torch

from pyquant import ops

LAYERS = [(8, 0, 200, 136), (4, 32, 256, 70), (8, 0, 1536, 384), (4, 128, 384, 1536)]


def layer(bits: int, group: int, k: int, n: int, **kwargs: object) -> tuple[torch.Tensor, list[int]]:
    draw = problems.Draw(problems.BASE_SEED, "invariance", bits, group, k, n)
    codes = problems.codes(draw, "s4" if bits == 4 else "s8", "uniform", n, k)
    spec = ops.LinearSpec(
        n, k, bits, group, has_bias=True, layout=ops.layout_for(torch.device("cpu")), **kwargs
    ).to_ints()
    scale = problems.scales(draw, n, k // group) if group else problems.scales(draw, n)
    return ops.pack_linear(ops.pack_int4(codes) if bits == 4 else codes, scale, spec, bias=draw.normal(n)), list(spec)


@pytest.mark.parametrize(("bits", "group", "k", "n"), LAYERS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_row_alone_equals_the_row_in_any_batch(bits: int, group: int, k: int, n: int, symmetric: bool) -> None:
    packed, spec = layer(
        bits, group, k, n, x_symmetric=symmetric, x_qmin=-127 if symmetric else -128, activation="gelu"
    )
    x = torch.randn(67, k, generator=torch.Generator().manual_seed(1))
    whole = ops.qlinear(x, packed, spec=spec)
    for rows in (slice(0, 1), slice(3, 5), slice(10, 14), slice(60, 67), slice(0, 33)):
        accept.t1(ops.qlinear(x[rows], packed, spec=spec), whole[rows], what=str(rows))
    accept.t1(ops.qlinear(x[5], packed, spec=spec), whole[5], what="one dimension")
    order = torch.randperm(67, generator=torch.Generator().manual_seed(2))
    accept.t1(ops.qlinear(x[order], packed, spec=spec), whole[order], what="permuted")


@pytest.mark.parametrize(("bits", "group", "k", "n"), LAYERS)
def test_threads_and_repetition_change_nothing(bits: int, group: int, k: int, n: int, threads) -> None:
    packed, spec = layer(bits, group, k, n, activation="silu")
    for m in (1, 5, 130):
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
        threads(1)
        want = ops.qlinear(x, packed, spec=spec)
        for count in (1, 2, 4, 8):
            threads(count)
            for _ in range(10):
                accept.t1(ops.qlinear(x, packed, spec=spec), want, what=f"{count} threads, M = {m}")


def test_a_poisoned_row_poisons_only_itself() -> None:
    packed, spec = layer(8, 0, 200, 136)
    x = torch.randn(9, 200)
    want = ops.qlinear(x, packed, spec=spec)
    for value in (float("nan"), float("inf"), -float("inf")):
        bad = x.clone()
        bad[4, 199] = value
        got = ops.qlinear(bad, packed, spec=spec)
        assert got[4].isnan().all()
        rest = [0, 1, 2, 3, 5, 6, 7, 8]
        accept.t1(got[rest], want[rest])


def test_concurrent_callers_get_the_same_bits() -> None:
    packed, spec = layer(8, 0, 200, 136)
    x = torch.randn(17, 200)
    want = ops.qlinear(x, packed, spec=spec)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(200):
            if not torch.equal(ops.qlinear(x, packed, spec=spec), want):
                wrong.append(seed)

    callers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in callers:
        t.start()
    for t in callers:
        t.join()
    assert not wrong


PROGRAM = """
import hashlib, sys, torch
from pyquant import ops
from pyquant.core.patches import Patches
digest = hashlib.sha256()
generator = torch.Generator().manual_seed(11)
cases = ((1, 70, 129, 8, 0), (5, 64, 200, 8, 0), (130, 33, 96, 4, 32), (3, 17, 100, 4, 4), (66, 130, 1000, 8, 0))
for m, n, k, bits, group in cases:
    for activation in ("none", "gelu", "silu", "gelu_tanh"):
        codes = torch.randint(-8, 8, (n, k), generator=generator, dtype=torch.int8)
        layout = ops.layout_for(torch.device("cpu"))
        spec = ops.LinearSpec(n, k, bits, group, activation=activation, layout=layout).to_ints()
        scale = torch.rand(*((n, k // group) if group else (n,)), generator=generator) + 0.1
        packed = ops.pack_linear(ops.pack_int4(codes) if bits == 4 else codes, scale, spec)
        y = ops.qlinear(torch.randn(m, k, generator=generator), packed, spec=spec)
        digest.update(y.numpy().tobytes())
convolutions = ((8, 0, 3, 70, 1), (8, 4, 20, 130, 1), (4, 20, 20, 5, 1), (4, 0, 16, 64, 1))
in_groups = ((8, 0, 1, 70, 70), (8, 0, 1, 32, 16), (4, 3, 1, 9, 9), (8, 12, 4, 64, 16), (4, 0, 3, 40, 5))
for bits, group, channels, n, groups in convolutions + in_groups:
    codes = torch.randint(-7, 8, (n, 6 * channels), generator=generator, dtype=torch.int8)
    scale = torch.rand(*((n, 6 * channels // group) if group else (n,)), generator=generator) + 0.1
    window = Patches((3, 2), (1, 2), (2, 1, 0, 1), (2, 1), groups).to_ints()
    for words in ({}, {"x_symmetric": False, "x_qmin": -128}, {"input": "static"}):
        spec = ops.LinearSpec(n, 6 * channels, bits, group, layout=layout, **words).to_ints()
        x_scale = torch.tensor([0.02]) if "input" in words else None
        packed = ops.pack_linear(ops.pack_int4(codes) if bits == 4 else codes, scale, spec, x_scale=x_scale)
        x = torch.randn(2, groups * channels, 9, 11, generator=generator)
        for image in (x, x.to(memory_format=torch.channels_last)):
            y = ops.qconv2d(image, packed, None, spec, window)
            digest.update(y.contiguous().numpy().tobytes())
for rows, k, group in ((3, 100, 25), (5, 64, 32), (2, 1300, 13), (7, 33, 3)):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x, grad = (torch.randn(rows, k, generator=generator).to(dtype) for _ in range(2))
        for granularity, size in (("per_tensor", 0), ("per_channel", 0), ("per_group", group)):
            _, scale, zero = ops.fake_quantize_dynamic(x * 0.5, granularity, size, False, -128, 127)
            for zero_point in (None, zero):
                given = (scale, zero_point, granularity, size, -128, 127)
                y, mask = ops.fake_quantize(x, *given)
                results = [y, mask, ops.fake_quantize_backward(grad, mask)]
                results += ops.fake_quantize_dynamic(x, granularity, size)
                for result in (*results, *ops.fake_quantize_lsq_backward(grad, x, *given)):
                    digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())
print(digest.hexdigest(), ops.native_available())
"""


def run(**environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    ).stdout.split()[0]


def test_every_instruction_set_and_the_fallback_give_the_same_bits() -> None:
    want = run()
    names = ("scalar", "avx2", "avx512_vnni", "avx512_bf16", "amx_int8")
    got = {name: run(PYQUANT_CPU_ISA=name) for name in names}
    got["fallback"] = run(PYQUANT_DISABLE_NATIVE="1")
    assert set(got.values()) == {want}, got


def test_compiled_layers_with_dynamic_rows_equal_eager_ones() -> None:
    packed, spec = layer(8, 0, 200, 136, activation="relu")

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.pyquant.qlinear.default(x * 2, packed, None, spec, None) + 1

    import torch._dynamo.testing

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for m in (2, 3, 5, 8, 13, 16, 17, 31, 33, 64, 65, 100, 128, 129, 200, 255):
        x = torch.randn(m, 200, generator=torch.Generator().manual_seed(m))
        accept.t1(compiled(x), function(x), what=f"M = {m}")
    assert counter.frame_count <= 2


def test_export_round_trip() -> None:
    packed, spec = layer(8, 0, 200, 136)

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("packed", packed)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.pyquant.qlinear.default(x, self.packed, None, spec, None)

    x = torch.randn(6, 200)
    program = torch.export.export(Module(), (x,), dynamic_shapes={"x": {0: torch.export.Dim("m", min=2)}})
    for m in (2, 6, 50):
        x = torch.randn(m, 200)
        accept.t1(program.module()(x), Module()(x))


@pytest.mark.parametrize("name", ["float_linear", "weight_only_linear"])
@pytest.mark.parametrize("activation", ["none", "relu", "clamp", "gelu", "gelu_tanh", "silu"])
def test_gradients_equal_torchs_own(name: str, activation: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 12, generator=generator, requires_grad=True)
    bias = torch.randn(7, generator=generator, requires_grad=True)
    residual = torch.randn(5, 7, generator=generator, requires_grad=True)
    w = torch.randn(7, 12, generator=generator)
    codes, scale = (
        torch.randint(-127, 128, (7, 12), generator=generator, dtype=torch.int8),
        torch.rand(7, generator=generator) * 0.01,
    )
    real = w if name == "float_linear" else codes.float() * scale[:, None]
    pre = torch.nn.functional.linear(x, real, bias)
    smooth = {
        "none": lambda t: t,
        "relu": torch.relu,
        "clamp": lambda t: t.clamp(-0.5, 0.7),
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
        "silu": torch.nn.functional.silu,
    }[activation]
    want = torch.autograd.grad((smooth(pre) + residual).square().sum(), (x, bias, residual))
    common = {"bias": bias, "residual": residual, "activation": activation, "clamp_min": -0.5, "clamp_max": 0.7}
    y = (
        ops.float_linear(x, w, **common)
        if name == "float_linear"
        else ops.weight_only_linear(x, codes, scale, **common)
    )
    got = torch.autograd.grad(y.square().sum(), (x, bias, residual))
    for g, v in zip(got, want, strict=True):
        assert (g - v).abs().max() <= 1e-4 * v.abs().max()
