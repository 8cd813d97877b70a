"""Schemes: what is allowed, what is refused and how, and the ways to and from dicts and text."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyquant.core.presets import (
    FP16,
    PRESETS,
    W4A4,
    W4A8,
    W4A16,
    W8A8,
    W8A16,
    W4A4Dynamic,
    W4A8Dynamic,
    W4A8TwoLevel,
    W4A8TwoLevelDynamic,
    W8A8Dynamic,
    scheme_from_name,
)
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import PyquantError, SchemeError

WEIGHTS = TensorScheme(granularity="per_channel")
TOKENS = TensorScheme(granularity="per_token", dynamic=True)

VARIANTS = [preset() for preset in PRESETS.values()] + [
    W8A8(symmetric_inputs=False),
    W8A8Dynamic(symmetric_inputs=False),
    W4A8(group_size=None),
    W4A8Dynamic(32),
    W4A4(64),
    W4A4Dynamic(group_size=1, symmetric_inputs=False),
    W8A16(group_size=16, symmetric=False),
    W4A16(None, symmetric=False),
    FP16("bfloat16"),
]


@pytest.mark.parametrize(
    ("scheme", "text"),
    [
        (W8A8(), "W8A8"),
        (W8A8Dynamic(), "W8A8Dynamic"),
        (W8A8Dynamic(symmetric_inputs=False), "W8A8Dynamic(symmetric_inputs=False)"),
        (W4A8(), "W4A8(group_size=128)"),
        (W4A8(None), "W4A8(group_size=None)"),
        (W4A8Dynamic(group_size=128), "W4A8Dynamic(group_size=128)"),
        (W4A8TwoLevel(), "W4A8TwoLevel(group_size=128)"),
        (W4A8TwoLevelDynamic(32, symmetric_inputs=False), "W4A8TwoLevelDynamic(group_size=32, symmetric_inputs=False)"),
        (W4A4(), "W4A4"),
        (W4A4Dynamic(64), "W4A4Dynamic(group_size=64)"),
        (W8A16(symmetric=False), "W8A16(symmetric=False)"),
        (W4A16(32), "W4A16(group_size=32)"),
        (FP16(), "FP16"),
        (FP16("bfloat16"), "FP16(dtype=bfloat16)"),
    ],
)
def test_str_names_the_preset(scheme: QScheme, text: str) -> None:
    assert str(scheme) == text


@pytest.mark.parametrize("scheme", VARIANTS, ids=str)
def test_dict_and_text_give_the_scheme_back(scheme: QScheme) -> None:
    assert QScheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme
    assert scheme_from_name(str(scheme)) == scheme
    assert hash(QScheme.from_dict(scheme.to_dict())) == hash(scheme)


def test_the_presets_are_what_their_names_say() -> None:
    assert (W8A8().weights.bits, W8A8().inputs.bits, W8A8().is_static) == (8, 8, True)
    assert W8A8().weights.granularity == "per_channel"
    assert W8A8().inputs.granularity == "per_tensor"
    assert (W4A8Dynamic().weights.bits, W4A8Dynamic().weights.group_size, W4A8Dynamic().is_static) == (4, 128, False)
    assert (W4A4().weights.bits, W4A4().inputs.bits, W4A4().inputs.code_range) == (4, 4, (-7, 7))
    assert W8A8(symmetric_inputs=False).inputs.code_range == (-128, 127)
    assert W4A16(symmetric=False).weights.code_range == (-8, 7)
    assert W8A16().is_weight_only
    assert not W8A16().is_integer
    assert FP16().is_float
    assert not FP16().is_weight_only


def test_presets_of_four_bits_take_static_ranges_by_the_squared_error() -> None:
    """15 codes that reach the largest number leave most of them unused; 255 do not."""
    static = {
        name: scheme.inputs.calibrator
        for name, scheme in ((name, preset()) for name, preset in PRESETS.items())
        if scheme.inputs is not None and scheme.is_static
    }
    assert static == {"W8A8": "max", "W4A8": "max", "W4A8TwoLevel": "max", "W4A4": "mse"}
    assert W4A4(32, symmetric_inputs=False).inputs.calibrator == "mse"
    dynamic = [preset().inputs for name, preset in PRESETS.items() if name.endswith("Dynamic")]
    assert {inputs.calibrator for inputs in dynamic} == {"max"}  # of each row, at run time


def test_what_was_written_before_presets_said_it_is_what_it_was() -> None:
    saved = W4A4().to_dict()
    for calibrator in ({"calibrator": "max"}, {}):
        saved["inputs"] = {"bits": 4} | calibrator
        scheme = QScheme.from_dict(saved)
        assert scheme.inputs == TensorScheme(bits=4)
        assert str(scheme) == "W4A4, inputs max"


def test_a_scheme_that_no_preset_gives_tells_its_parts() -> None:
    scheme = QScheme(WEIGHTS, TOKENS, TensorScheme(calibrator="percentile", percentile=99.9))
    assert (
        str(scheme)
        == "QScheme(weights=int8 per_channel, inputs=int8 per_token dynamic, outputs=int8 per_tensor percentile(99.9))"
    )
    assert QScheme.from_dict(scheme.to_dict()) == scheme


def test_a_scheme_near_a_preset_is_told_by_what_differs() -> None:
    entropy = TensorScheme(calibrator="percentile", percentile=99.9)
    mse = TensorScheme(granularity="per_channel", calibrator="mse")
    assert str(QScheme(mse, entropy)) == "W8A8, weights mse, inputs percentile(99.9)"
    assert str(QScheme(TensorScheme(), TOKENS)) == "W8A8Dynamic, weights per_tensor"
    assert str(QScheme(TensorScheme(4, granularity="per_group", group_size=32))) == "W4A16(group_size=32), weights max"
    assert str(QScheme(TensorScheme(4, granularity="per_group", group_size=32, narrow_range=False))) == (
        "W4A16(group_size=32), weights full range"
    )


def test_affine_is_never_narrow() -> None:
    assert TensorScheme(symmetric=False) == TensorScheme(symmetric=False, narrow_range=False)
    assert TensorScheme(narrow_range=False).code_range == (-128, 127)


REFUSED: list[tuple[Callable[[], Any], str, str]] = [
    (lambda: TensorScheme(bits=1), "bits", "1"),
    (lambda: TensorScheme(bits=9), "bits", "9"),
    (lambda: TensorScheme(bits=True), "bits", "True"),
    (lambda: TensorScheme(bits="8"), "bits", "'8'"),
    (lambda: TensorScheme(symmetric=1), "symmetric", "1"),
    (lambda: TensorScheme(dynamic=None), "dynamic", "None"),
    (lambda: TensorScheme(narrow_range="yes"), "narrow_range", "'yes'"),
    (lambda: TensorScheme(granularity="tensor"), "granularity", "'tensor'"),
    (lambda: TensorScheme(granularity=None), "granularity", "None"),
    (lambda: TensorScheme(granularity="per_group"), "group_size", "None"),
    (lambda: TensorScheme(granularity="per_group", group_size=0), "group_size", "0"),
    (lambda: TensorScheme(granularity="per_group", group_size=-128), "group_size", "-128"),
    (lambda: TensorScheme(granularity="per_group", group_size=1.0), "group_size", "1.0"),
    (lambda: TensorScheme(granularity="per_group", group_size=2**31), "group_size", "2147483648"),
    (lambda: TensorScheme(group_size=128), "group_size", "128"),
    (lambda: TensorScheme(calibrator="minmax"), "calibrator", "'minmax'"),
    (lambda: TensorScheme(percentile=0), "percentile", "0"),
    (lambda: TensorScheme(percentile=float("nan")), "percentile", "nan"),
    (lambda: TensorScheme(percentile=100.1), "percentile", "100.1"),
    (lambda: QScheme(None), "weights", "None"),
    (lambda: QScheme(WEIGHTS, "per_token"), "inputs", "per_token"),
    (lambda: QScheme(WEIGHTS, None, 8), "outputs", "8"),
    (lambda: QScheme(WEIGHTS, float_dtype="float16"), "float_dtype", "'float16'"),
    (lambda: QScheme(TOKENS), "weights.granularity", "'per_token'"),
    (lambda: QScheme(TensorScheme(granularity="per_channel", dynamic=True)), "weights.dynamic", "True"),
    (lambda: QScheme(TensorScheme(granularity="per_channel", symmetric=False), TOKENS), "weights.symmetric", "False"),
    (lambda: QScheme(WEIGHTS, TensorScheme(bits=16)).check_kernels(), "inputs.bits", "16"),
    (lambda: QScheme(WEIGHTS, TensorScheme(bits=4)).check_kernels(), "inputs.bits", "4"),
    (lambda: QScheme(WEIGHTS, TOKENS, TensorScheme(bits=5)).check_kernels(), "outputs.bits", "5"),
    (lambda: QScheme(TensorScheme(bits=3)).check_kernels(), "weights.bits", "3"),
    (lambda: QScheme(WEIGHTS, TensorScheme(granularity="per_token")), "inputs.granularity", "'per_token'"),
    (lambda: QScheme(WEIGHTS, TensorScheme(dynamic=True)), "inputs.granularity", "'per_tensor'"),
    (lambda: QScheme(WEIGHTS, None, TensorScheme()), "outputs", "int8 per_tensor"),
    (lambda: QScheme(WEIGHTS, TOKENS, TensorScheme(bits=16)), "outputs.bits", "16"),
    (lambda: QScheme(WEIGHTS, TOKENS, TOKENS), "outputs.dynamic", "True"),
    (lambda: QScheme(WEIGHTS, TOKENS, WEIGHTS), "outputs.granularity", "'per_channel'"),
    (lambda: QScheme(TensorScheme(bits=16)), "float_dtype", "None"),
    (lambda: FP16("float32"), "float_dtype", "'float32'"),
    (lambda: QScheme(TensorScheme(bits=16), TOKENS, float_dtype="float16"), "inputs", "int8 per_token dynamic"),
    (lambda: QScheme(TensorScheme(bits=16, symmetric=False), float_dtype="float16"), "weights", "symmetric=False"),
    (lambda: W4A8(group_size=0), "group_size", "0"),
    (lambda: QScheme.from_dict(None), "QScheme", "None"),
    (lambda: QScheme.from_dict({"weights": {}}), "version", "None"),
    (lambda: QScheme.from_dict({"version": 2, "weights": {}}), "version", "2"),
    (lambda: QScheme.from_dict({"version": True, "weights": {}}), "version", "True"),
    (lambda: QScheme.from_dict({"version": 1}), "weights", "None"),
    (lambda: QScheme.from_dict({"version": 1, "weights": {}, "x": 1}), "QScheme", "'x'"),
    (lambda: QScheme.from_dict({"version": 1, "weights": {"bit": 8}}), "TensorScheme", "'bit'"),
    (lambda: QScheme.from_dict({"version": 1, "weights": {}, "inputs": 3}), "TensorScheme", "3"),
    (lambda: scheme_from_name("W3A3"), "scheme", "W3A3"),
    (lambda: scheme_from_name("W8A8(1)"), "scheme", "W8A8(1)"),
    (lambda: scheme_from_name("W8A8(group_size=128)"), "scheme", "W8A8(group_size=128)"),
    (lambda: scheme_from_name(None), "scheme", "None"),
    (lambda: scheme_from_name("W4A8(group_size=__import__('os'))"), "scheme", "import"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_not_defined_is_refused_by_name(case: int) -> None:
    make, field, value = REFUSED[case]
    with pytest.raises(SchemeError) as caught:
        make()
    assert caught.value.argument == field
    assert value in caught.value.got
    assert caught.value.allowed


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("W4A8(group_size=32", "one pair of brackets: W4A8"),
        ("W4A8(group_size=32))", "one pair of brackets: W4A8"),
        ("W4A8(group_size=32, group_size=64)", "group_size stands there twice"),
    ],
)
def test_what_is_wrong_in_a_text_is_said(text: str, allowed: str) -> None:
    with pytest.raises(SchemeError, match=allowed):
        scheme_from_name(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=12,
)
FIELDS = st.sampled_from([*TensorScheme().to_dict(), "extra"])
TENSORS = st.dictionaries(FIELDS, JSON | st.sampled_from([4, 8, 16, "per_group", "per_token", True, 128]), max_size=5)
SCHEMES = st.fixed_dictionaries(
    {"version": st.just(1) | JSON, "weights": TENSORS | JSON},
    optional={"inputs": TENSORS | JSON, "outputs": TENSORS | JSON},
)


@settings(max_examples=500, deadline=None)
@given(SCHEMES | JSON)
def test_from_dict_raises_nothing_but_our_errors(data: Any) -> None:
    try:
        scheme = QScheme.from_dict(data)
    except PyquantError:
        return
    assert QScheme.from_dict(scheme.to_dict()) == scheme
    assert str(scheme)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30) | st.from_regex(r"W[48]A(4|8|16)(Dynamic)?\(\w*=?\w*,? ?\w*=?\w*\)", fullmatch=True))
def test_scheme_from_name_raises_nothing_but_our_errors(text: str) -> None:
    with contextlib.suppress(PyquantError):
        assert isinstance(scheme_from_name(text), QScheme)
