"""What holds for every op: schemas, rules that agree with the kernels, opcheck, layouts, refusals (C07-C10)."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import problems
import pytest
import torch
from op_samples import WRITTEN, samples, spec

from pyquant import ops
from pyquant.errors import ArgumentError, PyquantError
from pyquant.ops import fallback, rows_layout, shapes
from pyquant.ops.schema import SCHEMAS


def coded(x: torch.Tensor, dtype: torch.dtype = torch.int8, **changed: Any) -> torch.Tensor:
    """qlinear of codes [4, 8] with one scale a row; operands and words of the spec may be others."""
    given = ("x_scale", "x_zero_point", "out_dtype", "residual")
    operands = {name: changed.pop(name) for name in given if name in changed}
    if dtype == torch.int32:  # accumulators
        operands = {"out_dtype": torch.float32} | operands
    words = spec(4, 8, **({"x_qmin": -128} if changed.get("x_symmetric") is False else {}), **changed)
    w, ones = torch.ones(4, 8, dtype=torch.int8), torch.ones(4)
    scales = torch.ones(4, 2) if changed.get("group_size") else ones
    packed = ops.pack_linear(w, scales, words, x_scale=ones[:1] if changed.get("input") == "static" else None)
    return ops.qlinear(x.to(dtype), packed, spec=words, **({"x_scale": ones} | operands))


def test_every_op_has_a_rule_a_sample_and_a_wrapper() -> None:
    assert set(SCHEMAS) == set(samples(2, 3, 4))
    for name in SCHEMAS:
        assert callable(shapes.rule_of(name))
        assert callable(fallback.IMPLEMENTATIONS[name])
        assert callable(getattr(ops, name))
        schema = getattr(torch.ops.pyquant, name).default._schema
        written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        assert tuple(written) == WRITTEN.get(name, ())
        assert schema.is_mutable == (name in WRITTEN)


def test_schemas_are_pinned() -> None:
    """A changed string breaks saved programs: change it only together with a new op name, by further arguments at the
    end that have defaults, or by an argument that may be None now."""
    pinned = (Path(__file__).with_name("schemas.txt")).read_text().splitlines()
    assert pinned == sorted(name + schema for name, schema in SCHEMAS.items())
    assert len(pinned) >= 26
    for line in pinned:  # what torch made of them, defaults included
        registered = getattr(torch.ops.pyquant, line.partition("(")[0]).default._schema
        assert torch._C.parse_schema(f"pyquant::{line}") == registered
        assert not re.search(r"ScalarType \w+=", line), "AOTInductor leaves it out and puts back what cannot be loaded"


def check_defaults_of_the_wrappers() -> None:
    for name in SCHEMAS:
        parameters = inspect.signature(getattr(ops, name)).parameters
        for argument in getattr(torch.ops.pyquant, name).default._schema.arguments:
            if not argument.has_default_value():
                continue
            told, given = argument.default_value, parameters[argument.name].default
            if argument.name == "out_dtype" and isinstance(given, torch.dtype):
                told = told or torch.float32  # what an op takes for none
            same = {("gemm", "kernel"): None}.get((name, argument.name), told)
            assert given == same, f"{name}: {argument.name} is {given!r} by default, {same!r} in the schema"


def test_wrappers_have_the_defaults_of_the_schemas() -> None:
    """torch.ops.pyquant.gemm_s8s8 and pyquant.ops.gemm_s8s8 are one function."""
    check_defaults_of_the_wrappers()


def test_spec_travels_and_its_packed_size_is_the_same_in_both_languages() -> None:
    if not ops.native_available():
        pytest.skip(f"compiled library not in use: {ops.why_not_native()}")
    for n, k, bits, group, bias in itertools.product((0, 1, 16, 133), (0, 4, 100, 128), (4, 8), (0, 4), (False, True)):
        s = ops.LinearSpec(
            n,
            k,
            bits,
            group,
            has_bias=bias,
            activation="clamp",
            clamp_min=-0.5,
            clamp_max=1e9,
            layout="rows_blocked128" if bits == 4 and bias else "rows",
            two_level=bits == 4 and group == 4 and not bias,
        )
        assert ops.LinearSpec.from_ints(s.to_ints()) == s
        assert torch.ops.pyquant._packed_bytes(list(s.to_ints())) == rows_layout.packed_bytes(s)
    for n, k in itertools.product((0, 1, 133), (0, 64, 192)):
        s = ops.LinearSpec(n, k, 4, 64, layout="rows_blocked128", two_level=True)
        assert torch.ops.pyquant._packed_bytes(list(s.to_ints())) == rows_layout.packed_bytes(s)


FLOAT_SUMS = {"float_linear", "weight_only_linear"}  # outside of the bit contract (docs/numerics.md 8)


@pytest.mark.parametrize("name", sorted(set(SCHEMAS) - {"unpack_linear"} - set(WRITTEN)))
@pytest.mark.parametrize("layout", problems.LAYOUTS, ids=lambda v: v.name)
def test_layouts_give_the_contiguous_answer_or_a_refusal(name: str, layout: problems.Layout) -> None:
    base = samples(6, 5, 16)[name]
    op = getattr(torch.ops.pyquant, name).default
    tried = 0
    for position, argument in enumerate(base):
        if not isinstance(argument, torch.Tensor) or not layout.takes(argument):
            continue
        with torch.no_grad():
            laid = layout.build(argument)
        args = list(base)
        args[position] = laid
        tried += 1
        if layout.refused:
            try:
                got = op(*args)
            except (RuntimeError, PyquantError, NotImplementedError):
                continue
            plain = [a.resolve_neg() if isinstance(a, torch.Tensor) and a.is_neg() else a for a in args]
            assert _equal(got, op(*plain)), f"{name} argument {position}: silently different"
            continue
        plain = list(base)
        plain[position] = (
            torch.Tensor(laid.detach().clone().contiguous())
            if layout.name == "subclass"
            else laid.detach().clone(memory_format=torch.contiguous_format)
        )
        if (
            name in ("qlinear", "qconv2d") and position == 1 and not laid.is_contiguous()
        ):  # an opaque buffer has no layouts
            with pytest.raises((RuntimeError, PyquantError), match="argument 'packed'"):
                op(*args)
            continue
        same = _same_outcome(partial(op, *args), partial(op, *plain), _nearly if name in FLOAT_SUMS else _equal)
        assert same, f"{name} argument {position} {layout.name}"
    if tried == 0:
        assert layout.for_floats_only or layout.min_dim > 1 or layout.refused


def _same_outcome(
    one: Callable[[], Any], other: Callable[[], Any], alike: Callable[[Any, Any], bool] | None = None
) -> bool:
    results: list[Any] = []
    for call in (one, other):
        try:
            results.append(call())
        except (RuntimeError, PyquantError) as error:
            results.append(type(error))
    if isinstance(results[0], type) or isinstance(results[1], type):
        return results[0] is results[1]
    return (alike or _equal)(*results)


def _nearly(a: Any, b: Any) -> bool:
    """Equal up to the order of a short float32 sum, which on some processors follows the operand's memory."""
    a, b = torch.Tensor(a.detach()), torch.Tensor(b.detach())
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return all(_equal(x, y) for x, y in zip(a, b, strict=True))
    a, b = a.detach(), b.detach()
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


# ---- refusals

BAD_TENSORS: tuple[tuple[str, Callable[[torch.Tensor], Any]], ...] = (
    ("float64", lambda t: t.double()),
    ("complex", lambda t: t.to(torch.complex64)),
    ("bool", lambda t: t.bool()),
    ("int64", lambda t: t.long()),
    ("meta", lambda t: t.to("meta")),
    ("one more", lambda t: torch.cat([t, t[..., :1]], -1) if t.dim() and t.shape[-1] else t.double()),
    ("one less", lambda t: t[..., :-1] if t.dim() and t.shape[-1] else t.double()),
    ("two more dimensions", lambda t: t.reshape(1, *t.shape, 1)),
    ("sparse", lambda t: t.to_sparse()),
    ("list", lambda t: t.tolist()),
    ("string", lambda t: "tensor"),
    ("None", lambda t: None),
)
# What is legal although it looks wrong: K may change freely where nothing else fixes it (an odd K fills the
# same bytes of 4-bit codes), and optional operands may be absent.
LEGAL = {
    ("quantize", 0, "one more"),
    ("quantize", 0, "one less"),
    ("quantize_dynamic", 0, "one more"),
    ("quantize_dynamic", 0, "one less"),
    ("quantize_dynamic", 0, "two more dimensions"),
    ("dequantize", 0, "one more"),
    ("dequantize", 0, "one less"),
    ("pack_int4", 0, "one more"),
    ("pack_int4", 0, "one less"),
    ("pack_int4", 0, "two more dimensions"),
    ("quantize_dynamic", 0, "meta"),
    ("pack_int4", 0, "meta"),
    ("unpack_int4", 0, "meta"),
    ("unpack_linear", 0, "meta"),
    ("gemm_s8s4", 0, "one less"),
    ("gemm_s4s4", 0, "one less"),
    ("gemm", 0, "one less"),
    ("weight_only_linear", 0, "one less"),
    ("silu_mul_quantize", 0, "meta"),
    ("activation_mul_quantize", 0, "meta"),
    ("hadamard_quantize", 0, "meta"),
    ("hadamard_quantize", 0, "two more dimensions"),
    ("hadamard_transform", 0, "meta"),
    ("fake_quantize", 0, "one more"),
    ("fake_quantize", 0, "one less"),
    ("fake_quantize_dynamic", 0, "one more"),
    ("fake_quantize_dynamic", 0, "one less"),
    ("fake_quantize_dynamic", 0, "two more dimensions"),
    ("fake_quantize_dynamic", 0, "meta"),
    ("fake_quantize_backward", 0, "one less"),
    ("fake_quantize_backward", 0, "two more dimensions"),
    ("fake_quantize_backward_", 0, "one less"),
    ("fake_quantize_backward_", 0, "two more dimensions"),
    *(("magnitude_histogram", 0, kind) for kind in ("one more", "one less", "two more dimensions", "meta")),
}
OPTIONAL = {
    "gemm": {2, 3, 5, 6},
    "gemm_s8s8": {2, 3, 5, 6},
    "gemm_s8s4": {2, 3, 5, 6},
    "gemm_s4s4": {2, 3, 5, 6},
    "qlinear": {2},
    "qconv2d": {2},
    "weight_only_linear": {4, 5},
    "float_linear": {2, 3},
    "rms_norm_quantize": {1},
    "layer_norm_quantize": {1, 2},
    "add_rms_norm_quantize": {2},
    "add_layer_norm_quantize": {2, 3},
}


def refusals() -> list[tuple[str, int, str]]:
    cases = []
    for size in ((3, 5, 8), (4, 16, 64)):
        for name, args in samples(*size).items():
            cases += [
                (name, position, kind, size)
                for position, argument in enumerate(args)
                if isinstance(argument, torch.Tensor)
                for kind, _ in BAD_TENSORS
            ]
    return cases


def test_wrong_tensors_are_refused_by_name() -> None:
    table = dict(BAD_TENSORS)
    count, wrong = 0, []
    for name, position, kind, size in refusals():
        args = list(samples(*size)[name])
        bad = table[kind](args[position])
        same = isinstance(bad, torch.Tensor) and bad.dtype == args[position].dtype and bad.shape == args[position].shape
        if (
            (name, position, kind) in LEGAL
            or (kind == "None" and position in OPTIONAL.get(name, ()))
            or (same and kind not in ("meta", "sparse"))
        ):
            continue
        count += 1
        schema = getattr(torch.ops.pyquant, name).default._schema.arguments
        wrapper = getattr(ops, name)
        args[position] = bad
        keywords = {a.name: v for a, v in zip(schema, args, strict=False)}
        try:
            wrapper(**keywords)
        except ArgumentError as error:
            if not error.argument or not error.got or not error.allowed:
                wrong.append(f"{name} argument {position} {kind}: incomplete error {error}")
        except Exception as error:
            wrong.append(f"{name} argument {schema[position].name} {kind}: {type(error).__name__}: {error}")
        else:
            if not (name == "weight_only_linear" and position == 1):
                wrong.append(f"{name} argument {schema[position].name} {kind}: accepted")
    assert not wrong, f"{len(wrong)} of {count}\n" + "\n".join(wrong[:20])
    assert count >= 500


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda x: ops.quantize(x, torch.tensor([0.0])), "scale"),
        (lambda x: ops.quantize(x, torch.tensor([-1.0])), "scale"),
        (lambda x: ops.quantize(x, torch.tensor([float("nan")])), "scale"),
        (lambda x: ops.quantize(x, torch.tensor([float("inf")])), "scale"),
        (lambda x: ops.quantize(x, torch.ones(1), granularity="per_row"), "granularity"),
        (lambda x: ops.quantize(x, torch.ones(1), qmin=5, qmax=5), "qmax"),
        (lambda x: ops.quantize(x, torch.ones(1), qmin=-129), "qmin"),
        (lambda x: ops.quantize(x, torch.ones(1), group_size=4), "group_size"),
        (lambda x: ops.quantize(x, torch.ones(1), qmax=128), "qmax"),
        (lambda x: ops.quantize_dynamic(x, "per_group", 3), "group_size"),
        (lambda x: ops.quantize_dynamic(x, "per_group", 0), "group_size"),
        (lambda x: ops.quantize_dynamic(x, qmin=0), "qmin"),
        (lambda x: ops.magnitude_histogram(x, 129), "exponent"),
        (lambda x: ops.magnitude_histogram(x, -101), "exponent"),
        (lambda x: ops.rms_norm_quantize(x, eps=-1.0), "eps"),
        (lambda x: ops.layer_norm_quantize(x, eps=float("nan")), "eps"),
        (lambda x: ops.layer_norm_quantize(x, eps=float("inf")), "eps"),
        (lambda x: ops.rms_norm_quantize(x, x[0, :4]), "weight"),
        (lambda x: ops.add_rms_norm_quantize(x, x.half()), "residual"),
        (lambda x: ops.add_layer_norm_quantize(x, x, qmax=0, qmin=-9), "qmin"),
        (lambda x: ops.silu_mul_quantize(x[:, :7]), "x"),
        (lambda x: ops.activation_mul_quantize(x, x.half()), "up"),
        (lambda x: ops.activation_mul_quantize(x, x[:, :4]), "up"),
        (lambda x: ops.activation_mul_quantize(x, x, "swish"), "activation"),
        (lambda x: ops.activation_mul_quantize(x, x, "clamp", 1.0), "clamp_min"),
        (lambda x: ops.activation_mul_quantize(x, x, qmin=0), "qmin"),
        (lambda x: ops.dequantize(x.to(torch.int8), torch.ones(1), out_dtype=torch.float64), "out_dtype"),
        (lambda x: ops.gemm_s8s8(x.to(torch.int8), x.to(torch.int8)), "w_scale"),
        (lambda x: ops.gemm_s8s8(x.to(torch.int8), x.to(torch.int8), torch.ones(4), out_dtype=torch.int32), "w_scale"),
        (lambda x: ops.gemm_s8s8(x.to(torch.int8), x.to(torch.int8), torch.ones(4), out_dtype=torch.int8), "out_scale"),
        (lambda x: ops.gemm_s8s8(x.to(torch.int8), x.to(torch.int8), torch.ones(4), activation="swish"), "activation"),
        (lambda x: ops.float_linear(x, x, activation="clamp", clamp_min=1.0), "clamp_min"),
        (lambda x: ops.gemm_s4s4((x * 0 + 9).to(torch.int8), torch.zeros(4, 4, dtype=torch.uint8), torch.ones(4)), "x"),
        (lambda x: ops.pack_int4((x * 0 + 9).to(torch.int8)), "q"),
        (lambda x: ops.qlinear(x, torch.zeros(10, dtype=torch.uint8), spec=[1, 2, 3]), "spec"),
        (lambda x: ops.qlinear(x, torch.zeros(10, dtype=torch.uint8), spec=spec(4, 8)), "packed"),
        (lambda x: coded(x, dtype=torch.uint8), "x"),
        (lambda x: coded(x, dtype=torch.float32), "x"),
        (lambda x: coded(x, x_scale=None), "x"),
        (lambda x: coded(x, x_scale=torch.ones(5)), "x_scale"),
        (lambda x: coded(x, x_scale=torch.ones(4, 1)), "x_scale"),
        (lambda x: coded(x, x_scale=torch.ones(4).double()), "x_scale"),
        (lambda x: coded(x, x_zero_point=torch.zeros(4, dtype=torch.int32)), "x_zero_point"),
        (lambda x: coded(x, x_zero_point=torch.zeros(4), x_symmetric=False), "x_zero_point"),
        (lambda x: coded(x, x_zero_point=torch.zeros(1, dtype=torch.int32), x_symmetric=False), "x_zero_point"),
        (
            lambda x: ops.qlinear(
                x,
                ops.pack_linear(torch.ones(4, 8).to(torch.int8), torch.ones(4), spec(4, 8)),
                None,
                spec(4, 8),
                None,
                None,
                torch.zeros(4, dtype=torch.int32),
            ),
            "x_zero_point",
        ),
        (lambda x: coded(x, input="static"), "x_scale"),
        (lambda x: coded(x, dtype=torch.int32), "x"),
        (lambda x: coded(x[:, :4], dtype=torch.int32, out_dtype=None), "x"),
        (lambda x: coded(x[:, :4], dtype=torch.int32, x_scale=None), "x_scale"),
        (lambda x: coded(x[:, :4], dtype=torch.int32, x_scale=torch.ones(3)), "x_scale"),
        (lambda x: coded(x[:, :4], dtype=torch.int32, input="static"), "x_scale"),
        (
            lambda x: coded(
                x[:, :4], dtype=torch.int32, x_zero_point=torch.zeros(4, dtype=torch.int32), x_symmetric=False
            ),
            "x_zero_point",
        ),
        (lambda x: coded(x[:, :4], dtype=torch.int32, out_dtype=torch.int32), "out_dtype"),
        (lambda x: coded(x[:, :4], dtype=torch.int32, group_size=4), "spec"),
        (lambda x: coded(x, out_dtype=torch.int32, group_size=4), "spec"),
        (lambda x: coded(x, out_dtype=torch.int32, residual=torch.ones(4, 4)), "residual"),
        (lambda x: coded(x, dtype=torch.float32, x_scale=None, out_dtype=torch.int32), "x"),
        (lambda x: ops.pack_linear(x.to(torch.int8), torch.ones(4), spec(4, 8, has_bias=True)), "bias"),
        (lambda x: ops.pack_linear(x.to(torch.int8), torch.ones(4), spec(4, 8, input="static")), "x_scale"),
        (lambda x: ops.pack_linear(x.to(torch.int8), torch.ones(4) - 1, spec(4, 8)), "w_scale"),
        (lambda x: ops.weight_only_linear(x, x.to(torch.int8), torch.ones(4), w_bits=3), "w_bits"),
        (lambda x: ops.float_linear(x, x, out_dtype=torch.int8), "out_dtype"),
        (lambda x: ops.quantize(x, torch.ones(1), qmin=5, qmax=6), "zero_point"),
        (lambda x: ops.quantize(x, torch.ones(1), qmin=-6, qmax=-5), "zero_point"),
        (lambda x: ops.fake_quantize(x, torch.ones(1), qmin=5, qmax=6), "zero_point"),
    ],
)
def test_wrong_values_are_refused_by_name(call: Callable[[torch.Tensor], Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call(torch.ones(4, 8))
    assert caught.value.argument == argument


def test_rule_and_kernel_accept_the_same_problems() -> None:
    """2 000 random calls, legal or not: the fake rule and the kernel refuse the same, for the same argument."""
    mutations: tuple[Callable[[problems.Draw, dict[str, Any]], None], ...] = (
        lambda d, c: None,
        lambda d, c: c.update(group_size=d.choice((0, 3, 4, 8, -1))),
        lambda d, c: c.update(out_dtype=d.choice((torch.int8, torch.float64, torch.int32, torch.bfloat16))),
        lambda d, c: c.update(w_scale=None),
        lambda d, c: c.update(x=c["x"][:, :-1]),
        lambda d, c: c.update(bias=torch.ones(d.integer(0, 3))),
        lambda d, c: c.update(x_scale=torch.ones(d.integer(0, 3))),
        lambda d, c: c.update(x_zero_point=torch.zeros(d.integer(0, 3), dtype=torch.int32)),
        lambda d, c: c.update(activation=d.choice(("tanh", "relu", "clamp")), clamp_min=1.0),
        lambda d, c: c.update(residual=torch.zeros(d.integer(0, 4), d.integer(0, 4))),
        lambda d, c: c.update(out_qmin=d.integer(-130, 130), out_qmax=d.integer(-130, 130), out_zero_point=None),
        lambda d, c: c.update(x=c["x"].to(torch.int16)),
        lambda d, c: c.update(  # a rule sees no values: the zero point stays one of the codes (test_bounds.py)
            x=c["x"].to(torch.uint8), **{z: c[z].clamp(min=0) for z in ("x_zero_point",) if z in c}
        ),
    )
    agreed = refused = 0
    for index in range(2000):
        draw = problems.Draw(problems.BASE_SEED, "agreement", index)
        problem = problems.gemm_problem(index, epilogue=draw.choice(("accumulator", "float", "codes")))
        call = dict(problem.call)
        draw.choice(mutations)(draw, call)
        outcomes = []
        for function in (shapes.rule_of(problem.op), getattr(ops, problem.op)):
            try:
                result = function(**call)
                outcomes.append(("accepted", list(result.shape), result.dtype))
            except ArgumentError as error:
                outcomes.append(("refused", error.argument, error.allowed))
                refused += 1
        assert outcomes[0] == outcomes[1], f"index {index} {problem.op}: rule {outcomes[0]}, kernel {outcomes[1]}"
        agreed += 1
    assert agreed == 2000
    assert 300 < refused < 3700


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.uint64, torch.complex64], ids=str)
def test_every_type_has_its_name_in_a_refusal(dtype: torch.dtype) -> None:
    """The compiled library knew those of half of torch's types."""
    with pytest.raises(ArgumentError, match=f"got {str(dtype).removeprefix('torch.')} .4, 8."):
        ops.quantize_dynamic(torch.zeros(4, 8).to(dtype))
