"""Fake quantisation on the CPU: bits, codes of op quantize, gradients, kept buffers, threads, compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accept
import fake_laws
import laws
import problems
import pytest
import torch
from problems import BASE_SEED, Draw

from pyquant import numerics, ops
from pyquant.errors import ArgumentError, NonFiniteError

GRANULARITIES = laws.GRANULARITIES


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_bits_equal_the_float64_steps(granularity: str) -> None:
    for values in problems.VALUES:
        fake_laws.catalogue(ops, values, granularity, BASE_SEED)
    for seed in range(BASE_SEED, BASE_SEED + 10):
        fake_laws.normal(ops, granularity, seed)
        fake_laws.backward(ops, granularity, seed)


def same(got: Any, want: Any, what: str) -> None:
    """Bit for bit, whatever the types."""
    for g, w in zip(got, want, strict=True):
        rule = accept.t1 if w.is_floating_point() else accept.t0
        rule(g, w, what=what, waiver="compared with the specification")


def compare(x: torch.Tensor, grad: torch.Tensor, arguments: tuple[Any, ...], what: str) -> None:
    """Every op against the specification."""
    y, mask = ops.fake_quantize(x, *arguments)
    same((y, mask), numerics.fake_quantize(x, *arguments), what)
    same((ops.fake_quantize_backward(grad, mask),), (numerics.fake_quantize_backward(grad, mask),), what)
    same(
        ops.fake_quantize_lsq_backward(grad, x, *arguments),
        numerics.fake_quantize_lsq_backward(grad, x, *arguments),
        what,
    )
    granularity, group, qmin, qmax = arguments[2:]
    for symmetric in (True, False):
        dynamic = (granularity, group, symmetric, qmin, qmax)
        same(ops.fake_quantize_dynamic(x, *dynamic), numerics.fake_quantize_dynamic(x, *dynamic), what)


@pytest.mark.parametrize("dtype", problems.FLOATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_sizes_equal_the_specification(dtype: torch.dtype, granularity: str) -> None:
    """Rows of every length of a vector and its tail, so that rows share bytes of the mask in every way."""
    draw = Draw(BASE_SEED, "sizes", granularity, str(dtype))
    for rows, cols in (
        (0, 5),
        (4, 0),
        (1, 1),
        (7, 1),
        (5, 3),
        (3, 15),
        (3, 17),
        (9, 31),
        (5, 33),
        (3, 63),
        (2, 65),
        (6, 100),
        (3, 127),
        (2, 1023),
        (3, 1025),
        (2, 4099),
        (33, 64),
        (4, 96),
    ):
        x, grad = draw.normal(rows, cols).to(dtype), draw.normal(rows, cols).to(dtype)
        group = fake_laws.group_of(granularity, cols, draw) if cols else int(granularity == "per_group")
        compare(x, grad, fake_laws.given(draw, x, granularity, group), f"[{rows}, {cols}] group={group} {dtype}")


def test_a_million_codes_are_those_of_op_quantize() -> None:
    draw = Draw(BASE_SEED, "million")
    x = draw.normal(1024, 1024)
    x[::7] = (x[::7] * 50).round() / 50 + 0.005  # ties of the scale below
    x[3, :100], x[4, ::2], x[5, 1], x[6, 2] = torch.nan, torch.inf, -torch.inf, 2.0**-140
    for scale, zero_point in ((torch.tensor([0.01]), None), (torch.tensor([0.02]), torch.tensor([17]).int())):
        for dtype in problems.FLOATS:
            data = x.to(dtype)
            codes = ops.quantize(data, scale, zero_point)
            y, mask = ops.fake_quantize(data, scale, zero_point)
            same((y,), (ops.dequantize(codes, scale, zero_point, out_dtype=dtype),), str(dtype))
            keep = numerics.unpack_mask(mask, tuple(x.shape))
            assert bool(keep[(codes > -127) & (codes < 127) & ~data.isnan()].all())
            real = codes.double() if zero_point is None else codes.double() - zero_point.double()
            clipped = (data.double() / scale.double() - real).abs() > 0.51
            assert int(clipped.sum()) > 100
            assert not bool(keep[clipped | data.isnan()].any())
    for granularity, group in (("per_channel", 0), ("per_group", 32), ("per_tensor", 0)):
        for symmetric, qmin, qmax in laws.RANGES:
            codes, scale, zero_point = ops.quantize_dynamic(x, granularity, group, symmetric, qmin, qmax)
            got = ops.fake_quantize_dynamic(x, granularity, group, symmetric, qmin, qmax)
            want = ops.dequantize(codes, scale, zero_point, granularity, group)
            same(got, (want, scale, zero_point), f"{granularity} {qmin}..{qmax}")


def test_the_number_of_threads_changes_no_bit(threads: Callable[[int], None]) -> None:
    draw = Draw(BASE_SEED, "threads")
    cases = [
        ((701, 333), "per_tensor", 0),
        ((701, 333), "per_channel", 0),
        ((300, 800), "per_group", 25),
        ((3, 80000), "per_channel", 0),
        ((200001,), "per_tensor", 0),
    ]
    for shape, granularity, group in cases:
        x, grad = draw.normal(*shape), draw.normal(*shape)
        arguments = fake_laws.given(draw, x, granularity, group)

        def everything(x: torch.Tensor = x, grad: torch.Tensor = grad, a: tuple[Any, ...] = arguments) -> list[Any]:
            y, mask = ops.fake_quantize(x, *a)
            dynamic = ops.fake_quantize_dynamic(x, a[2], a[3], False, -128, 127)
            return [
                y,
                mask,
                *dynamic,
                ops.fake_quantize_backward(grad, mask),
                *ops.fake_quantize_lsq_backward(grad, x, *a),
            ]

        threads(1)
        one = everything()
        for count in (2, 3, 5):
            threads(count)
            same(everything(), one, f"{count} threads, {shape} {granularity}")


def test_a_tensor_that_no_cache_holds_has_the_same_codes(threads: Callable[[int], None]) -> None:
    """Above 32 MiB the result is written past the caches: another loop, which must leave no element out."""
    x = Draw(BASE_SEED, "large").normal(2112, 4096)
    scale = x.abs().amax(-1) / 150
    for granularity, s in (("per_channel", scale), ("per_tensor", scale[:1])):
        threads(3)
        y, mask = ops.fake_quantize(x, s, None, granularity)
        own, own_scale, _ = ops.fake_quantize_dynamic(x, granularity)
        assert torch.equal(y, ops.dequantize(ops.quantize(x, s, None, granularity), s, None, granularity))
        kept = ops.fake_quantize_backward(torch.ones(()).expand(x.shape), mask)
        steps = x.abs() / (s if granularity == "per_tensor" else s.unsqueeze(-1))
        assert int((kept != (steps < 127.5)).sum()) < 10  # x / s is not quite x * (1 / s)
        codes, again, _ = ops.quantize_dynamic(x, granularity)
        assert torch.equal(own_scale, again)
        assert torch.equal(own, ops.dequantize(codes, again, None, granularity))


def buffers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full(x.shape, 99.0, dtype=x.dtype), torch.full(((x.numel() + 7) // 8,), 255, dtype=torch.uint8)


def test_kept_buffers_receive_the_same_bits() -> None:
    draw = Draw(BASE_SEED, "kept")
    for granularity in GRANULARITIES:
        for dtype in problems.FLOATS:
            x = draw.normal(6, 84).to(dtype)
            for data in (x, draw.normal(6, 90).to(dtype)[:, 3:87], draw.normal(84, 6).to(dtype).t()):
                group = 7 if granularity == "per_group" else 0
                arguments = fake_laws.given(draw, data, granularity, group)
                y, mask = buffers(data)
                ops.fake_quantize_out(data, *arguments, y, mask)
                same((y, mask), ops.fake_quantize(data, *arguments), f"{granularity} {dtype}")
                dynamic = (granularity, group, False, -8, 7)
                want = ops.fake_quantize_dynamic(data, *dynamic)
                y, scale, zero_point = torch.empty_like(want[0]), torch.empty_like(want[1]), torch.empty_like(want[2])
                ops.fake_quantize_dynamic_out(data, *dynamic, y, scale, zero_point)
                same((y, scale, zero_point), want, f"{granularity} {dtype}")
                grad = draw.normal(6, 84).to(dtype)
                want_grad = ops.fake_quantize_backward(grad, mask)
                ops.fake_quantize_backward_(grad, mask)
                same((grad,), (want_grad,), f"in place {dtype}")
    x = draw.normal(5, 40)
    y, mask = buffers(x)
    want = ops.fake_quantize(x, torch.tensor([0.01]))
    ops.fake_quantize_out(x, torch.tensor([0.01]), None, "per_tensor", 0, -127, 127, x, mask)
    same((x, mask), want, "y is x")


def test_buffers_that_do_not_fit_are_refused_by_name() -> None:
    x = torch.randn(4, 6)
    y, mask = buffers(x)
    scale, zero_point = torch.empty(4), torch.empty(4, dtype=torch.int32)
    given = (torch.ones(1), None, "per_tensor", 0, -127, 127)
    own = ("per_channel", 0, True, -127, 127)
    grad = torch.randn(4, 6)
    for call, argument in (
        (lambda: ops.fake_quantize_out(x, *given, y[:2], mask), "y"),
        (lambda: ops.fake_quantize_out(x, *given, y.half(), mask), "y"),
        (lambda: ops.fake_quantize_out(x, *given, torch.empty(6, 4).t(), mask), "y"),
        (lambda: ops.fake_quantize_out(x, *given, y, mask[:2]), "mask"),
        (lambda: ops.fake_quantize_out(x, *given, y, mask.to(torch.int8)), "mask"),
        (lambda: ops.fake_quantize_out(x, *given, y, torch.empty(6, dtype=torch.uint8)[::2]), "mask"),
        (lambda: ops.fake_quantize_out(x, torch.zeros(1), *given[1:], y, mask), "scale"),
        (lambda: ops.fake_quantize_dynamic_out(x, *own, y.double(), scale, zero_point), "y"),
        (lambda: ops.fake_quantize_dynamic_out(x, *own, y, scale[:3], zero_point), "scale"),
        (lambda: ops.fake_quantize_dynamic_out(x, *own, y, torch.empty(8)[::2], zero_point), "scale"),
        (lambda: ops.fake_quantize_dynamic_out(x, *own, y, scale, zero_point.long()), "zero_point"),
        (lambda: ops.fake_quantize_dynamic_out(x, "per_channel", 0, True, 0, 127, y, scale, zero_point), "qmin"),
        (lambda: ops.fake_quantize_backward(grad, mask[:2]), "mask"),
        (lambda: ops.fake_quantize_backward(grad.double(), mask), "grad"),
        (lambda: ops.fake_quantize_backward_(torch.randn(6, 4).t(), mask), "grad"),
        (lambda: ops.fake_quantize_lsq_backward(grad[:2], x, *given), "grad"),
        (lambda: ops.fake_quantize_lsq_backward(grad.half(), x, *given), "grad"),
        (lambda: ops.fake_quantize_lsq_backward(grad, x, torch.ones(2), *given[1:]), "scale"),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == argument


def test_checks_refuse_what_is_not_finite() -> None:
    x = torch.tensor([1.0, torch.nan, torch.inf])
    y, mask = ops.fake_quantize(x, torch.tensor([1.0]))
    assert y.tolist() == [1.0, 0.0, 127.0]
    assert mask.tolist() == [1]
    ops.set_checks(True)
    try:
        with pytest.raises(NonFiniteError, match="argument 'x'"):
            ops.fake_quantize(x, torch.tensor([1.0]))
    finally:
        ops.set_checks(False)
    for bad in (0.0, -1.0, torch.inf, torch.nan):
        with pytest.raises(NonFiniteError, match="argument 'scale'"):
            ops.fake_quantize(x, torch.tensor([bad]))
        with pytest.raises(NonFiniteError, match="argument 'scale'"):
            ops.fake_quantize_lsq_backward(x, x, torch.tensor([bad]))


class Wrong:
    """The ops with one slip each, as a vector kernel makes them; the laws that judge the kernels must notice."""

    def __init__(self, bug: str) -> None:
        self.bug = bug

    def fake_quantize_dynamic(self, *args: Any) -> Any:
        return ops.fake_quantize_dynamic(*args)

    def fake_quantize(self, x: torch.Tensor, scale: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.bug == "limits swallowed":  # the mask counts the outermost codes as clipped
            granularity_and_group, qmin, qmax = rest[:3], rest[3], rest[4]
            y, _ = ops.fake_quantize(x, scale, *rest)
            return y, ops.fake_quantize(x, scale, *granularity_and_group, qmin + 1, qmax)[1]
        y, mask = ops.fake_quantize(x, scale, *rest)
        bits = numerics.unpack_mask(mask, (x.numel(),))
        if self.bug == "mask shifted by one":
            mask = numerics.pack_mask(bits.roll(1))
        elif self.bug == "tail of the mask not written":
            mask = mask.clone()
            mask[x.numel() // 8 :] = 0
        elif self.bug == "tail not written":
            y = y.clone()
            y.view(-1)[x.numel() // 16 * 16 :] = 0
        elif self.bug == "rounds half away":
            return ops.fake_quantize(torch.nextafter(x.float(), x.float() * 2).to(x.dtype), scale, *rest)[0], mask
        elif self.bug == "truncates to 16 bits":
            y = y.float().view(torch.int32).bitwise_and(-65536).view(torch.float32).to(x.dtype)
        return y, mask


@pytest.mark.parametrize(
    "bug",
    [
        "limits swallowed",
        "mask shifted by one",
        "tail of the mask not written",
        "tail not written",
        "rounds half away",
        "truncates to 16 bits",
    ],
)
def test_a_slip_of_a_kernel_would_be_noticed(bug: str) -> None:
    with pytest.raises(AssertionError):  # noqa: PT012  (one of many draws shows it)
        for seed in range(BASE_SEED, BASE_SEED + 10):
            for granularity in GRANULARITIES:
                fake_laws.normal(Wrong(bug), granularity, seed)
                for values in problems.VALUES:
                    fake_laws.catalogue(Wrong(bug), values, granularity, seed)


# ---- gradients


def test_gradients_pass_the_mask_and_nothing_else() -> None:
    draw = Draw(BASE_SEED, "gradients")
    for dtype in problems.FLOATS:
        x, weights = draw.normal(6, 50).to(dtype).requires_grad_(), draw.normal(6, 50).to(dtype)
        scale = torch.full((6,), 1.0 / 127).requires_grad_()
        y, mask = ops.fake_quantize(x, scale, None, "per_channel")
        assert y.requires_grad
        assert not mask.requires_grad
        (y * weights).sum().backward()
        same((x.grad,), (numerics.fake_quantize_backward(weights, mask),), str(dtype))
        assert scale.grad is None
        x.grad = None
        y, scale, zero_point = ops.fake_quantize_dynamic(x)
        assert not scale.requires_grad
        assert not zero_point.requires_grad
        y.backward(weights)
        same((x.grad,), (weights,), str(dtype))


def test_the_gradient_is_differentiable_in_turn() -> None:
    x = torch.randn(30, requires_grad=True)
    y, mask = ops.fake_quantize(x, torch.tensor([1.0 / 127]))
    (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, 2.0 * numerics.unpack_mask(mask, (30,)))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_learned_scale_follows_torchs_own(granularity: str) -> None:
    """Against autograd through the recipe of the paper in float64, away from the elements that round differently."""
    draw = Draw(BASE_SEED, "lsq", granularity)
    x, grad = draw.normal(8, 60), draw.normal(8, 60)
    group = 12 if granularity == "per_group" else 0
    scale, zero_point, *rest = fake_laws.given(draw, x, granularity, group)
    qmin, qmax = rest[2:]
    wide, s = x.double().requires_grad_(), scale.double().requires_grad_()
    grouped = {"per_tensor": wide.reshape(1, -1), "per_group": wide.unflatten(-1, (-1, 12))}.get(granularity, wide)
    zero = 0 if zero_point is None else zero_point.unsqueeze(-1)
    v = grouped / s.unsqueeze(-1)
    rounded = v + (v.round() - v).detach()
    limited = torch.where((rounded + zero).detach() < qmin, torch.as_tensor(qmin - zero).double(), rounded)
    limited = torch.where((rounded + zero).detach() > qmax, torch.as_tensor(qmax - zero).double(), limited)
    (limited * s.unsqueeze(-1)).backward(grad.double().reshape(grouped.shape))
    grad_x, grad_scale = ops.fake_quantize_lsq_backward(grad, x, scale, zero_point, *rest)
    torch.testing.assert_close(grad_x.double(), wide.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_scale.double(), s.grad, rtol=1e-4, atol=1e-3)


def test_a_compiled_graph_keeps_the_ops_whole() -> None:
    draw = Draw(BASE_SEED, "compiled")
    x, scale, weights = draw.normal(4, 33), torch.tensor([1.0 / 127]), draw.normal(4, 33)

    def step(x: torch.Tensor) -> torch.Tensor:
        y, _ = ops.fake_quantize(x * 1.0, scale)
        z, _, _ = ops.fake_quantize_dynamic(y * 2.0)
        return (z * weights).sum()

    plain, traced = x.clone().requires_grad_(), x.clone().requires_grad_()
    step(plain).backward()
    torch.compile(step, backend="aot_eager", fullgraph=True)(traced).backward()
    same((traced.grad,), (plain.grad,), "compiled")

    def kept(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ops.fake_quantize_out(x, scale, None, "per_tensor", 0, -127, 127, y, mask)
        return y * 2.0

    y, mask = buffers(x)
    doubled = torch.compile(kept, backend="aot_eager", fullgraph=True)(x, y, mask)
    want = ops.fake_quantize(x, scale)
    same((y, mask, doubled), (*want, want[0] * 2.0), "compiled with kept buffers")
