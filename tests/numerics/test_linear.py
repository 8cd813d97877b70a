"""Whole layers: the fused integer Linear equals its parts; float layers stay within their bound."""

from __future__ import annotations

import accept
import brute
import laws
import problems
import pytest
import torch

from pyquant import numerics


def test_fused_layer_equals_its_parts():
    for seed in range(problems.BASE_SEED, problems.BASE_SEED + 300):
        laws.linear(numerics, seed)


def test_codes_as_input_give_what_their_floats_give():
    draw = problems.Draw(1, "codes in")
    x, w = draw.normal(4, 32), draw.codes(-127, 127, 6, 32).to(torch.int8)
    scale, zero_point = torch.tensor([0.02]), torch.tensor([-5], dtype=torch.int32)
    layer = {"x_scale": scale, "x_zero_point": zero_point, "x_qmin": -128, "x_qmax": 127}
    want = numerics.qlinear_reference(x, w, torch.ones(6), **layer)
    q = brute.quantize(x, scale, zero_point, "per_tensor", 0, -128, 127)
    accept.t1(numerics.qlinear_reference(q, w, torch.ones(6), **layer), want)
    unsigned = (q.to(torch.int32) + 128).to(torch.uint8)
    layer["x_zero_point"] = zero_point + 128
    accept.t1(numerics.qlinear_reference(unsigned, w, torch.ones(6), **layer), want)


@pytest.mark.parametrize("dtype", problems.FLOATS)
@pytest.mark.parametrize("w_bits", [8, 4, 16])
@pytest.mark.parametrize("grouped", [False, True])
def test_float_layers_stay_within_the_bound(dtype, w_bits, grouped):
    for seed in range(12):
        draw = problems.Draw(seed, "float layer", w_bits)
        m, n, k = draw.integer(1, 40), draw.integer(1, 40), 8 * draw.integer(1, 40)
        x, bias = draw.normal(m, k).to(dtype), draw.normal(n)
        if w_bits == 16:
            w = draw.normal(n, k).to(dtype)
            real = w
            got = numerics.float_linear(x, w, bias)
        else:
            group = 8 if grouped else 0
            half = 2 ** (w_bits - 1)
            codes = draw.codes(-half, half - 1, n, k).to(torch.int8)
            shape = (n, k // group) if group else (n,)
            scale, zero_point = problems.scales(draw, *shape), draw.codes(-3, 3, *shape)
            packed = problems._pack(codes) if w_bits == 4 else codes
            got = numerics.weight_only_linear(x, packed, scale, zero_point, bias, w_bits=w_bits, group_size=group)
            index, _ = brute.blocks((n, k), "per_group" if group else "per_channel", group)
            steps = codes.numpy().astype("int64") - zero_point.numpy().reshape(-1)[index]
            real = torch.from_numpy(steps * brute.wide(scale).reshape(-1)[index])
        exact = x.double() @ real.double().T + bias.double()
        magnitude = x.double().abs() @ real.double().abs().T + bias.double().abs()
        peer = torch.nn.functional.linear(x, real.to(dtype), bias.to(dtype))
        accept.t3(got, exact, magnitude, k, peer, c=2, what=f"seed={seed} [{m}, {n}, {k}]")


def test_autocast_does_not_narrow_a_float_layer():
    draw = problems.Draw(1, "autocast")
    x, w = draw.normal(8, 64), draw.normal(8, 64)
    want = numerics.float_linear(x, w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        accept.t1(numerics.float_linear(x, w), want)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
def test_empty(shape):
    x, w = torch.zeros(shape), torch.zeros(5, shape[1])
    bias = torch.arange(5.0)
    assert numerics.float_linear(x, w, bias).tolist() == [bias.tolist()] * shape[0]
    got = numerics.qlinear_reference(x, w.to(torch.int8), torch.ones(5), bias=bias)
    assert got.tolist() == [bias.tolist()] * shape[0]
