"""Norm or gate before the quantiser, on the CPU: bits, gradients, accuracy, what a row may see of others."""

from __future__ import annotations

from typing import Any

import accept
import laws
import pytest
import torch
from problems import BASE_SEED, Draw

from pyquant import numerics, ops

OPS = {name: getattr(ops, f"{name}_quantize") for name in laws.PRODUCERS}
IMPLEMENTATIONS = {"specification": numerics, "ops": ops}


@pytest.mark.parametrize("name", laws.PRODUCERS)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_bits_equal_the_float64_steps(name: str, impl: str) -> None:
    for seed in range(BASE_SEED, BASE_SEED + 15):
        laws.producer(IMPLEMENTATIONS[impl], name, seed)


@pytest.mark.parametrize("name", laws.PRODUCERS)
@pytest.mark.parametrize(("rows", "k"), [(0, 8), (3, 0), (0, 0), (1, 1), (70, 513)])
def test_zero_sizes_and_many_rows_equal_the_specification(name: str, rows: int, k: int) -> None:
    call = laws.producer_call(name, BASE_SEED, rows, k)
    want = getattr(numerics, f"{name}_quantize")(**call)
    for g, w in zip(OPS[name](**call), want, strict=True):
        (accept.t1 if w.is_floating_point() else accept.t0)(g, w, what=f"{rows}x{k}", waiver="zero sizes")


@pytest.mark.parametrize("name", laws.PRODUCERS)
def test_leading_dimensions_and_strides_do_not_matter(name: str) -> None:
    call = laws.producer_call(name, BASE_SEED, 6, 96)
    want = OPS[name](**call)
    for batched in ("x", "residual", "up"):
        if batched not in call:
            continue
        wide = torch.full((6, call[batched].shape[1] + 5), torch.nan, dtype=call[batched].dtype)
        wide[:, 2:-3] = call[batched]
        got = OPS[name](**call | {batched: wide[:, 2:-3]})
        for g, w in zip(got, want, strict=True):
            (accept.t1 if w.is_floating_point() else accept.t0)(g, w, what=batched)
    cube = {k: v.reshape(2, 3, -1) if k in ("x", "residual", "up") else v for k, v in call.items()}
    for g, w in zip(OPS[name](**cube), want, strict=True):
        (accept.t1 if w.is_floating_point() else accept.t0)(g.reshape(w.shape), w, what="three dimensions")


@pytest.mark.parametrize("name", laws.PRODUCERS)
def test_a_poisoned_row_poisons_only_itself(name: str) -> None:
    call = laws.producer_call(name, BASE_SEED, 5, 300)
    call["x"] = Draw(BASE_SEED, "clean").normal(*call["x"].shape).to(call["x"].dtype)
    clean = OPS[name](**call)
    for value in (torch.nan, torch.inf, -torch.inf):
        bad = call["x"].clone()
        bad[3, 7] = value
        got = OPS[name](**call | {"x": bad})
        # silu(-inf) is -0, and only times a finite number: that row is finite, and right to be
        assert got[1][3].isnan() or (name in ("silu_mul", "activation_mul") and value == -torch.inf)
        for g, w in zip(got, clean, strict=True):
            rest = [0, 1, 2, 4]
            (accept.t1 if w.is_floating_point() else accept.t0)(g[rest], w[rest], what=str(value), waiver="few rows")


def test_the_add_forms_are_the_plain_ones_on_the_sum() -> None:
    draw = Draw(BASE_SEED, "sum")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x, residual = draw.normal(9, 130).to(dtype), draw.normal(9, 130).to(dtype)
        for add_form, plain in (
            (ops.add_rms_norm_quantize, ops.rms_norm_quantize),
            (ops.add_layer_norm_quantize, ops.layer_norm_quantize),
        ):
            *got, total = add_form(x, residual)
            accept.t1(total, x + residual)
            for g, w in zip(got, plain(x + residual), strict=True):
                (accept.t1 if w.is_floating_point() else accept.t0)(g, w, waiver="zero points")


@pytest.mark.parametrize("k", [64, 4096, 20000])
def test_codes_stand_for_the_true_norm(k: int) -> None:
    """Against float64: half a step of the codes and little more, so the order of the sum costs no accuracy."""
    draw = Draw(BASE_SEED, "accuracy", k)
    x, w, b = draw.normal(4, k).double() + 2.0, draw.normal(k).double(), draw.normal(k).double()
    x, w, b = (t.float().double() for t in (x, w, b))
    centred = x - x.mean(-1, keepdim=True)
    exact = {
        "layer_norm": centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w + b,
        "rms_norm": x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w,
        "silu_mul": torch.nn.functional.silu(x) * x.flip(0),
        "activation_mul": torch.nn.functional.gelu(x) * x.flip(0),
    }
    got = {
        "layer_norm": ops.layer_norm_quantize(x.float(), w.float(), b.float()),
        "rms_norm": ops.rms_norm_quantize(x.float(), w.float()),
        "silu_mul": ops.silu_mul_quantize(torch.cat([x, x.flip(0)], -1).float()),
        "activation_mul": ops.activation_mul_quantize(x.float(), x.flip(0).float(), "gelu"),
    }
    for name, (q, scale, _) in got.items():
        error = (q.double() * scale.double().unsqueeze(-1) - exact[name]).abs().amax(-1)
        assert bool((error <= scale.double() * 0.501).all()), name


def _gelu_gate(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ops.activation_mul_quantize(x, x, "gelu")


def check_overflow(impl: Any) -> None:
    for op in (impl.rms_norm_quantize, impl.layer_norm_quantize):
        q, scale, _ = op(torch.tensor([[1e30, -1e30, 5.0, 7.0], [1.0, 2.0, 3.0, 4.0]]))
        assert scale[0].isnan()
        assert scale[1].isfinite()
        assert not q[0].any()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_sum_beyond_float32_is_poisoned_and_not_made_zero(impl: str) -> None:
    check_overflow(IMPLEMENTATIONS[impl])


def test_the_specified_sum_has_one_order() -> None:
    for seed in range(BASE_SEED, BASE_SEED + 3):
        laws.sums(numerics, seed)


def test_gradients_flow_through_the_sum_and_nothing_else() -> None:
    x, residual = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    for op in (ops.add_rms_norm_quantize, ops.add_layer_norm_quantize):
        codes, scale, zero_point, total = op(x, residual)
        assert not any(t.requires_grad for t in (codes, scale, zero_point))
        weights = torch.randn(3, 8)
        for gradient in torch.autograd.grad((total * weights).sum(), (x, residual)):
            accept.t1(gradient, weights)
    for op in (ops.rms_norm_quantize, ops.layer_norm_quantize, ops.silu_mul_quantize, _gelu_gate):
        scale = op(x)[1]
        with pytest.raises(RuntimeError, match="does not require grad"):
            scale.sum().backward()


@pytest.mark.parametrize("name", laws.PRODUCERS)
def test_a_compiled_graph_keeps_the_op_whole(name: str) -> None:
    call = laws.producer_call(name, BASE_SEED, 4, 64)
    traced = torch.compile(OPS[name], backend="eager", fullgraph=True)
    for g, w in zip(traced(**call), OPS[name](**call), strict=True):
        (accept.t1 if w.is_floating_point() else accept.t0)(g, w, waiver="compared with itself")
