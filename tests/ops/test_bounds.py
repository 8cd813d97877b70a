"""What would overflow is refused by name: sizes, K of the codes that are given, zero points; in both engines."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyquant import ops
from pyquant.errors import ArgumentError
from pyquant.ops import fallback, linear_shapes, rows_layout, translate, zero_points

NATIVE = "cpu_blocked" if ops.native_available() else "rows"


def wire(n: int, k: int, **changed: Any) -> list[int]:
    return list(ops.LinearSpec(n, k, **{"layout": NATIVE} | changed).to_ints())


def zero(value: int, *shape: int) -> torch.Tensor:
    return torch.full(shape or (1,), value, dtype=torch.int32)


def registered(name: str) -> Callable[..., Any]:
    """torch.ops.pyquant's op with our errors, without what the functions of pyquant.ops look at before."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(torch.ops.pyquant, name)(*args, **kwargs)
        except RuntimeError as error:
            translate.reraise(error)

    return call


@pytest.fixture(params=["registered", "fallback"])
def op(request: pytest.FixtureRequest) -> Callable[[str], Callable[..., Any]]:
    """An op by name, as registered (compiled where there is a library), or in its plain-torch form."""
    if request.param == "fallback":
        return lambda name: fallback.IMPLEMENTATIONS[name]
    return registered


def layout_of(op: Callable[[str], Callable[..., Any]]) -> str:
    return "rows" if op("quantize") is fallback.IMPLEMENTATIONS["quantize"] else NATIVE


# ---- sizes

SIZES = [(2**62, 0), (2**57, 1), (2**31, 0), (0, 2**31), (2**63 - 1, 0), (2**40, 4), (-1, 4), (4, -1), (2**60, 2**20)]


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("layout", ["rows", "cpu_blocked", "rows_blocked128"])
def test_sizes_whose_products_leave_64_bits_are_refused(n: int, k: int, layout: str) -> None:
    spec = [n, k, *ops.LinearSpec(1, 1, w_bits=4, layout=layout).to_ints()[2:]]
    with pytest.raises(ArgumentError, match="argument 'spec'"):
        linear_shapes.linear_spec(spec)
    if ops.native_available():
        with pytest.raises(RuntimeError, match="argument 'spec': got n = "):
            torch.ops.pyquant._packed_bytes(spec)


def test_the_largest_sizes_have_positive_sizes_in_bytes() -> None:
    """n, k and group counts at their limits: the sum of all sections stays far below 2^63."""
    for layout in ("rows", "cpu_blocked", "rows_blocked128"):
        if layout == "cpu_blocked" and not ops.native_available():
            continue
        codes = {"x_qmin": -1, "x_qmax": 1, "w_bits": 4}
        spec = ops.LinearSpec(2**31 - 1, 2**28 - 1, group_size=1, has_bias=True, layout=layout, **codes)
        size = ops.packed_bytes(spec) if hasattr(ops, "packed_bytes") else rows_layout.packed_bytes(spec)
        assert spec.n * spec.k * 8 < size < 2**63


def test_packing_nothing_of_an_overflowing_size_does_not_crash(op: Callable[[str], Callable[..., Any]]) -> None:
    """All operands are empty, so only the spec speaks of the size (it was a segmentation fault)."""
    w, scale = torch.empty(0, dtype=torch.int8).view(0, 0), torch.empty(0)
    for n in (2**62, 2**58, 2**63 - 64):
        with pytest.raises(ArgumentError, match="argument 'spec'"):
            op("pack_linear")(w, scale, None, None, None, None, None, [n, 0, *wire(1, 1)[2:]])


@pytest.mark.parametrize("group", [2**31, 2**62, 2**63 - 1, -1])
def test_group_sizes_that_round_up_beyond_64_bits_are_refused(
    group: int, op: Callable[[str], Callable[..., Any]]
) -> None:
    empty = torch.empty(2, 0, dtype=torch.int8)
    with pytest.raises(ArgumentError, match="argument 'group_size'"):
        op("gemm_s8s8")(empty, empty, torch.ones(2, 0), group_size=group)
    with pytest.raises(ArgumentError, match="argument 'group_size'"):
        op("quantize")(torch.empty(2, 0), torch.empty(2, 0), None, "per_group", group)
    with pytest.raises(ArgumentError, match="argument 'group_size'"):
        op("pack_linear")(empty, torch.empty(2, 0), None, None, None, None, None, [2, 0, group, *wire(2, 0)[3:]])


def test_measured_choices_of_impossible_sizes_return_at_once() -> None:
    if not ops.native_available():
        pytest.skip(f"compiled library not in use: {ops.why_not_native()}")
    fields = ["G", "s8", "s8", "f16", "0", "natural", "0", "64", "64", "64", "torch", "1"]
    for at in (6, 7, 8, 9):
        for value in (2**62 + 1, 2**63 - 1, 2**31, 10**30):
            line = "\t".join([*fields[:at], str(value), *fields[at + 1 :]])
            with pytest.raises((RuntimeError, ValueError), match="not a whole number"):
                torch.ops.pyquant._set_tuned(line)
    torch.ops.pyquant._set_tuned("")


# ---- K of the codes that are given

K_OF_CODES = [
    # codes, spec, largest K: the type bounds it, whatever the spec says of floats (docs/numerics.md 3)
    (torch.int8, {"input": "static", "x_qmin": -1, "x_qmax": 1}, 131_071),
    (torch.int8, {"input": "static"}, 131_071),
    (torch.uint8, {"input": "static", "x_qmin": -1, "x_qmax": 1}, 65_793),
    (torch.uint8, {"input": "static"}, 65_793),
    (torch.int8, {"input": "static", "x_qmin": -100, "x_symmetric": False}, 65_793),
    (torch.int8, {"input": "static", "x_qmin": 0, "x_qmax": 9, "x_symmetric": False}, 122_461),
    (torch.int8, {"x_qmin": -1, "x_qmax": 1}, 131_071),
]


@pytest.mark.parametrize(("dtype", "fields", "limit"), K_OF_CODES)
def test_codes_bound_k_by_their_type(
    dtype: torch.dtype, fields: dict[str, Any], limit: int, op: Callable[[str], Callable[..., Any]]
) -> None:
    """At the bound near-maximal codes are exact; one more column is refused."""
    extreme = 255 if dtype == torch.uint8 else -128
    static = fields.get("input") == "static"
    for k in (limit, limit + 1):
        spec = wire(1, k, layout=layout_of(op), **fields)
        scale = torch.ones(1) if static else None
        w = torch.full((1, k), -128, dtype=torch.int8)
        packed = op("pack_linear")(w, torch.ones(1), None, scale, None, None, None, spec)
        x = torch.full((1, k), extreme, dtype=dtype)
        rows = None if static else torch.ones(1)
        if k == limit:
            y = op("qlinear")(x, packed, None, spec, torch.float32, rows)
            assert y.item() == float(torch.tensor(-128 * extreme * k, dtype=torch.float32))
        else:
            with pytest.raises(ArgumentError, match=f"codes with k = {k}; allowed: k <= {limit}"):
                op("qlinear")(x, packed, None, spec, torch.float32, rows)
            with pytest.raises(ArgumentError, match=f"codes with k = {k}"):
                linear_shapes.qlinear(x, packed, None, spec, torch.float32, rows)


def test_packed_nibbles_bound_k_by_their_type(op: Callable[[str], Callable[..., Any]]) -> None:
    """Nibbles reach 8 where the spec says 1; k_max of s4 with int8 weights is 2^31 // (8 * 128)."""
    limit = (2**31 - 1) // (8 * 128)
    spec = wire(0, limit + 1, layout=layout_of(op), input="static", x_qmin=-1, x_qmax=1)
    empty = torch.empty(0, limit + 1, dtype=torch.int8)
    packed = op("pack_linear")(empty, torch.empty(0), None, torch.ones(1), None, None, None, spec)
    with pytest.raises(ArgumentError, match="s4 codes with k = "):
        op("qlinear")(torch.zeros(1, limit // 2 + 1, dtype=torch.uint8), packed, None, spec)


# ---- zero points

X, CODES = torch.ones(2, 8), torch.ones(2, 8, dtype=torch.int8)
UNSIGNED, W = CODES.to(torch.uint8), torch.ones(4, 8, dtype=torch.int8)
W4, ONE = torch.full((4, 4), 0x11, dtype=torch.uint8), torch.ones(1)
EXTREMES = (-(2**31), -129, 256, 2**31 - 1)

# op, arguments without the zero point, its name, its least and largest value
ZERO_POINTS: list[tuple[str, tuple[Any, ...], dict[str, Any], str, int, int]] = [
    ("quantize", (X, ONE), {}, "zero_point", -127, 127),
    ("quantize", (X, ONE), {"qmin": 0, "qmax": 15}, "zero_point", 0, 15),
    ("fake_quantize", (X, ONE), {}, "zero_point", -127, 127),
    ("fake_quantize", (X, ONE), {"qmin": -8, "qmax": 7}, "zero_point", -8, 7),
    ("fake_quantize_lsq_backward", (X, X, ONE), {}, "zero_point", -127, 127),
    ("dequantize", (CODES, ONE), {}, "zero_point", -128, 127),
    ("dequantize", (UNSIGNED, ONE), {}, "zero_point", 0, 255),
    ("gemm_s8s8", (CODES, W), {"out_dtype": torch.int32}, "x_zero_point", -128, 127),
    ("gemm_s8s8", (UNSIGNED, W), {"out_dtype": torch.int32}, "x_zero_point", 0, 255),
    ("gemm_s8s4", (CODES, W4), {"out_dtype": torch.int32}, "x_zero_point", -128, 127),
    ("gemm_s8s4", (UNSIGNED, W4), {"out_dtype": torch.int32}, "x_zero_point", 0, 255),
    ("gemm_s4s4", (CODES, W4), {"out_dtype": torch.int32}, "x_zero_point", -8, 7),
    (
        "gemm_s8s8",
        (CODES, W, torch.ones(4)),
        {"out_dtype": torch.int8, "out_scale": ONE, "out_qmin": -8, "out_qmax": 7},
        "out_zero_point",
        -8,
        7,
    ),
    ("weight_only_linear", (X, W, torch.ones(4)), {}, "w_zero_point", -128, 127),
    ("weight_only_linear", (X, W4, torch.ones(4)), {"w_bits": 4}, "w_zero_point", -8, 7),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "argument", "low", "high"), ZERO_POINTS)
def test_zero_points_lie_among_the_codes(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argument: str,
    low: int,
    high: int,
    op: Callable[[str], Callable[..., Any]],
) -> None:
    count = (4,) if argument == "w_zero_point" else (1,)
    for good in (low, high):
        op(name)(*args, **kwargs, **{argument: zero(good, *count)})
    for bad in (low - 1, high + 1, *EXTREMES):
        with pytest.raises(
            ArgumentError, match=f"'{argument}': got a zero point of {bad}; allowed: codes from {low} to"
        ):
            op(name)(*args, **kwargs, **{argument: zero(bad, *count)})


def test_one_bad_zero_point_among_many_is_found_also_behind_strides(op: Callable[[str], Callable[..., Any]]) -> None:
    many = torch.zeros(2, 3, dtype=torch.int32)
    many[1, 0] = 300
    with pytest.raises(ArgumentError, match="a zero point of 300"):
        op("quantize")(X, torch.ones(2), many[:, 0], "per_token")
    with pytest.raises(ArgumentError, match="a zero point of 300"):
        op("gemm_s8s8")(CODES, W, torch.ones(4), torch.ones(2), many[:, 0])
    with pytest.raises(ArgumentError, match="a zero point of 300"):
        op("fake_quantize_out")(
            X, torch.ones(2), many[:, 0], "per_token", 0, -127, 127, X.clone(), UNSIGNED.view(-1)[:2]
        )


@pytest.mark.parametrize(("symmetric", "low", "high"), [(True, 0, 255), (False, -100, 255)])
def test_zero_points_of_a_packed_layer(
    symmetric: bool, low: int, high: int, op: Callable[[str], Callable[..., Any]]
) -> None:
    spec = wire(4, 8, layout=layout_of(op), input="static", x_qmin=-100, x_symmetric=symmetric)
    for value in (low, high):
        op("pack_linear")(W, torch.ones(4), None, ONE, zero(value), None, None, spec)
    for bad in (low - 1, high + 1, *EXTREMES):
        with pytest.raises(ArgumentError, match=f"'x_zero_point': got a zero point of {bad}"):
            op("pack_linear")(W, torch.ones(4), None, ONE, zero(bad), None, None, spec)


def test_a_packed_zero_point_must_fit_the_codes_of_the_call(op: Callable[[str], Callable[..., Any]]) -> None:
    """200 is a zero point of uint8 codes; floats and int8 codes of the same buffer would leave the bounds."""
    spec = wire(4, 8, layout=layout_of(op), input="static", x_qmin=-128, x_symmetric=False)
    packed = op("pack_linear")(W, torch.ones(4), None, ONE, zero(200), None, None, spec)
    assert op("qlinear")(UNSIGNED, packed, None, spec)[0, 0].item() == (1 - 200) * 8
    for x in (X, CODES):
        with pytest.raises(
            ArgumentError, match="'x_zero_point': got a zero point of 200; allowed: codes from -128 to 127"
        ):
            op("qlinear")(x, packed, None, spec)


def test_zero_points_beside_codes_of_a_dynamic_layer(op: Callable[[str], Callable[..., Any]]) -> None:
    spec = wire(4, 8, layout=layout_of(op), x_qmin=-8, x_qmax=7, x_symmetric=False)
    packed = op("pack_linear")(W, torch.ones(4), None, None, None, None, None, spec)
    op("qlinear")(CODES, packed, None, spec, None, torch.ones(2), zero(-8, 2))
    with pytest.raises(ArgumentError, match="a zero point of 8; allowed: codes from -8 to 7"):
        op("qlinear")(CODES, packed, None, spec, None, torch.ones(2), zero(8, 2))


def test_checks_see_zero_points_wherever_the_tensors_are() -> None:
    """What set_checks(True) does for CUDA operands, called by itself: on the CPU the ops refuse them anyway."""
    x, q, far = torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.int8), torch.tensor([200], dtype=torch.int32)
    u, near, one = q.to(torch.uint8), torch.tensor([-128], dtype=torch.int32), torch.ones(1)
    op = torch.ops.pyquant

    def check(op: Any, args: tuple[Any, ...]) -> None:
        zero_points.check(op._schema.name.removeprefix("pyquant::"), args, {})

    gemm = (q, q, one, None, near, None, None, one, far, 0, "none", 0.0, 0.0, -127, 127, torch.int8)
    affine = wire(4, 4, layout="rows", input="static", x_qmin=-100, x_symmetric=False, codes_out=True, out_qmax=100)
    held = fallback.pack_linear(W[:, :4], torch.ones(4), None, one, far, one, near + 1, affine)
    dynamic = wire(4, 4, layout="rows", x_qmin=-8, x_qmax=7, x_symmetric=False)
    loose = fallback.pack_linear(W[:, :4], torch.ones(4), None, None, None, None, None, dynamic)
    pack, scales = (W[:, :4], torch.ones(4), None, one), torch.ones(2)
    cases = [
        (op.pack_linear.default, (*pack, near, one, one.int(), affine), "x_zero_point"),
        (op.pack_linear.default, (*pack, one.int(), one, far, affine), "out_zero_point"),
        (op.pack_linear.default, (*pack, one.int(), one, one.int() + 100, affine), "out_zero_point"),
        (op.qlinear.default, (q, held, None, affine), "x_zero_point"),
        (op.qlinear.default, (x, held, None, affine), "x_zero_point"),
        (op.qlinear.default, (q, loose, None, dynamic, None, scales, zero(8, 2)), "x_zero_point"),
        (op.quantize.default, (x, one, far, "per_tensor", 0, -127, 127), "zero_point"),
        (op.fake_quantize.default, (x, one, near, "per_tensor", 0, -127, 127), "zero_point"),
        (op.dequantize.default, (q, one, far), "zero_point"),
        (op.gemm_s8s8.default, (q, q, None, None, far), "x_zero_point"),
        (op.gemm_s8s8.default, (u, q, None, None, near), "x_zero_point"),
        (op.gemm_s4s4.default, (q, u, None, None, near), "x_zero_point"),
        (op.gemm_s8s8.default, gemm, "out_zero_point"),
        (op.gemm.default, (q, q, None, None, far), "x_zero_point"),
        (op.weight_only_linear.default, (x, q, one, far), "w_zero_point"),
    ]
    for name, args, argument in cases:
        with pytest.raises(ArgumentError, match=f"'{argument}'"):
            check(name, args)
    check(op.dequantize.default, (q, one, near))
    check(op.dequantize.default, (u, one, far))
    check(op.quantize_dynamic.default, (x,))
    check(op.pack_linear.default, (*pack, far, one, one.int(), affine))  # of uint8 codes
    check(op.qlinear.default, (u, held, None, affine))
    check(op.qlinear.default, (q, held[1:], None, affine))  # refused by the op itself
    check(op.qlinear.default, (q, loose, None, dynamic, None, scales, zero(7, 2)))
    check(op.quantize.default, (x, one, far, "per_tensor", 0, "low", 127))  # refused by the op itself


def test_a_call_with_checks_looks_at_zero_points(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    looking = SimpleNamespace(check=lambda name, args, kwargs: seen.append(name))
    monkeypatch.setattr(translate, "zero_points", looking)
    q, one = torch.zeros(2, 4, dtype=torch.int8), torch.ones(1)
    ops.dequantize(q, one)
    ops.set_checks(True)
    try:
        ops.dequantize(q, one)
        ops.fake_quantize(torch.zeros(2, 4), one)
    finally:
        ops.set_checks(False)
    assert seen == ["dequantize", "fake_quantize"]


@pytest.mark.parametrize("junk", ["x", 2**70, 1.5, None])
def test_with_checks_a_spec_of_junk_is_still_an_argument_error(junk: Any) -> None:
    ops.set_checks(True)
    try:
        with pytest.raises(ArgumentError, match="'spec'"):
            ops.pack_linear(W, torch.ones(4), [junk] * 5)
    finally:
        ops.set_checks(False)
