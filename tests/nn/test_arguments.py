"""Wrong arguments of the modules: our errors name argument, value and what is allowed; nothing is broken after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from qlayers import ALL, layer
from torch import nn

import pyquant
from pyquant.core.presets import FP16, W4A8, W8A8, W8A16, W4A8Dynamic, W8A8Dynamic
from pyquant.core.qtensor import QTensor
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear

CODES = torch.ones(4, 8, dtype=torch.int8)
ONES = torch.ones(4)
NAN, INF = float("nan"), float("inf")


def from_codes(**changes: Any) -> QLinear:
    arguments: dict[str, Any] = {"codes": CODES, "weight_scale": ONES, "scheme": W8A8Dynamic()} | changes
    return QLinear.from_codes(**arguments)


def from_float(**changes: Any) -> QLinear:
    arguments: dict[str, Any] = {"linear": nn.Linear(8, 4), "scheme": W8A8(), "input_scale": 0.1} | changes
    return QLinear.from_float(**arguments)


def nan_linear() -> nn.Linear:
    linear = nn.Linear(8, 4)
    linear.weight.data[2, 5] = NAN
    return linear


Case = tuple[Callable[[], Any], str, str, str]
MAKING: list[Case] = [
    (lambda: QLinear(-1, 4), "in_features", "-1", "whole number"),
    (lambda: QLinear(8, 4.0), "out_features", "4.0", "whole number"),
    (lambda: QLinear(True, 4), "in_features", "True", "whole number"),
    (lambda: QLinear(8, 4, scheme="W8A8"), "scheme", "'W8A8'", "QScheme"),
    (lambda: QLinear(8, 4, scheme=W8A8), "scheme", "function", "W8A8Dynamic()"),
    (lambda: QLinear(8, 4, activation="tanh"), "activation", "'tanh'", "'gelu'"),
    (lambda: QLinear(8, 4, activation="clamp"), "clamp", "None", "(low, high)"),
    (lambda: QLinear(8, 4, clamp=(2.0, 1.0)), "clamp", "(2.0, 1.0)", "low <= high"),
    (lambda: QLinear(8, 4, clamp=(NAN, 1.0)), "clamp", "nan", "low <= high"),
    (lambda: QLinear(8, 4, clamp=(1.0,)), "clamp", "(1.0,)", "(low, high)"),
    (lambda: QLinear(8, 4, clamp="ab"), "clamp", "'ab'", "(low, high)"),
    (lambda: QLinear(8, 4, activation="relu", clamp=(0.0, 6.0)), "clamp", "(0.0, 6.0)", "'relu'"),
    (lambda: QLinear(8, 4, dtype=torch.float64), "dtype", "torch.float64", "torch.bfloat16"),
    (lambda: QLinear(8, 4, dtype=None), "dtype", "None", "torch.float32"),
    (lambda: QLinear(8, 4, device="nowhere"), "device", "'nowhere'", "device"),
    (lambda: QLinear(8, 4, scheme=W4A8()), "group_size", "128", "divisor of in_features = 8"),
    (lambda: from_float(linear=nn.Conv1d(1, 1, 1)), "linear", "Conv1d", "torch.nn.Linear"),
    (lambda: from_float(linear=None), "linear", "NoneType", "torch.nn.Linear"),
    (lambda: from_float(linear=nn.Linear(8, 4).double()), "weight", "float64", "float32"),
    (
        lambda: from_float(linear=nn.Linear(8, 4).double(), scheme=FP16(), input_scale=None),
        "weight",
        "float64",
        "float32",
    ),
    (lambda: from_float(linear=nan_linear()), "weight", "nan at [2, 5]", "finite"),
    (lambda: from_float(linear=nn.Linear(130, 4), scheme=W4A8()), "group_size", "128", "in_features = 130"),
    (lambda: from_float(scheme=None), "scheme", "None", "QScheme"),
    (lambda: from_float(input_scale=None), "input_scale", "None", "number > 0"),
    (lambda: from_float(input_scale=0.0), "input_scale", "0.0", "above 0"),
    (lambda: from_float(input_scale=-1), "input_scale", "-1.0", "above 0"),
    (lambda: from_float(input_scale=NAN), "input_scale", "nan", "finite"),
    (lambda: from_float(input_scale=INF), "input_scale", "inf", "finite"),
    (lambda: from_float(input_scale=1e-60), "input_scale", "0.0", "above 0"),
    (lambda: from_float(input_scale="0.1"), "input_scale", "'0.1'", "number"),
    (lambda: from_float(input_scale=True), "input_scale", "True", "number"),
    (lambda: from_float(input_scale=torch.ones(2)), "input_scale", "float32 [2]", "float32 [1]"),
    (lambda: from_float(input_scale=torch.ones(1, dtype=torch.int32)), "input_scale", "int32 [1]", "float32 [1]"),
    (lambda: from_float(input_zero_point=3), "input_zero_point", "3", "None with this scheme"),
    (lambda: from_float(scheme=W8A8(symmetric_inputs=False)), "input_zero_point", "None", "int32 [1]"),
    (
        lambda: from_float(scheme=W8A8(symmetric_inputs=False), input_zero_point=200),
        "input_zero_point",
        "200",
        "-128 to 127",
    ),
    (lambda: from_float(scheme=W8A8(symmetric_inputs=False), input_zero_point=1.5), "input_zero_point", "1.5", "int32"),
    (
        lambda: from_float(scheme=W8A8(symmetric_inputs=False), input_zero_point=2**40),
        "input_zero_point",
        "1099511627776",
        "int32",
    ),
    (lambda: from_float(scheme=W8A8Dynamic()), "input_scale", "0.1", "None with this scheme"),
    (lambda: from_float(output_scale=0.1), "output_scale", "0.1", "None with this scheme"),
    (lambda: from_codes(codes=None), "codes", "None", "tensor"),
    (lambda: from_codes(codes=CODES[0]), "codes", "[8]", "[out_features, in_features]"),
    (lambda: from_codes(codes=CODES.int()), "codes", "int32 [4, 8]", "int8 [4, 8]"),
    (lambda: from_codes(codes=CODES * -128), "codes", "-128", "-127 to 127"),
    (lambda: from_codes(codes=CODES * 8, scheme=W4A8Dynamic(None)), "codes", "8", "-7 to 7"),
    (lambda: from_codes(codes=CODES, scheme=FP16(), weight_scale=None), "codes", "int8", "float16 [4, 8]"),
    (lambda: from_codes(weight_scale=None), "weight_scale", "None", "float32 [4]"),
    (lambda: from_codes(weight_scale=1.0), "weight_scale", "1.0", "float32 [4]"),
    (lambda: from_codes(weight_scale=ONES.double()), "weight_scale", "float64 [4]", "float32 [4]"),
    (lambda: from_codes(weight_scale=torch.ones(5)), "weight_scale", "[5]", "float32 [4]"),
    (lambda: from_codes(weight_scale=torch.ones(4, 1)), "weight_scale", "[4, 1]", "float32 [4]"),
    (lambda: from_codes(weight_scale=ONES * 0), "weight_scale", "0.0", "above 0"),
    (lambda: from_codes(weight_scale=-ONES), "weight_scale", "-1.0", "above 0"),
    (lambda: from_codes(weight_scale=ONES * NAN), "weight_scale", "nan", "finite"),
    (lambda: from_codes(weight_scale=ONES * INF), "weight_scale", "inf", "finite"),
    (lambda: from_codes(weight_scale=ONES.to("meta")), "weight_scale", "meta", "cpu"),
    (lambda: from_codes(weight_scale=ONES.to_sparse()), "weight_scale", "float32", "float32 [4]"),
    (lambda: from_codes(bias=torch.ones(3)), "bias", "[3]", "float32 [4]"),
    (lambda: from_codes(bias=ONES.half()), "bias", "float16 [4]", "float32 [4]"),
    (lambda: from_codes(bias=[1, 2, 3, 4]), "bias", "list", "float32 [4]"),
    (lambda: from_codes(weight_zero_point=ONES.int()), "weight_zero_point", "a tensor", "None"),
    (lambda: from_codes(scheme=W8A16(symmetric=False)), "weight_zero_point", "None", "int32 [4]"),
    (
        lambda: from_codes(scheme=W8A16(symmetric=False), weight_zero_point=ONES.int() * 300),
        "weight_zero_point",
        "300",
        "127",
    ),
    (lambda: from_codes(scheme=W4A8(None)), "input_scale", "None", "number > 0"),
    (lambda: QEmbedding(-1, 4), "num_embeddings", "-1", "whole number"),
    (lambda: QEmbedding(4, None), "embedding_dim", "None", "whole number"),
    (lambda: QEmbedding(4, 4, dtype=torch.int8), "dtype", "int8", "float32"),
    (lambda: QEmbedding.from_float(nn.Linear(4, 4)), "embedding", "Linear", "Embedding"),
    (lambda: QEmbedding.from_float(nn.Embedding(4, 4, max_norm=1.0)), "embedding", "max_norm=1.0", "None"),
    (lambda: QEmbedding.from_codes(CODES, torch.ones(8)), "weight_scale", "[8]", "[4]"),
    (lambda: QEmbedding.from_codes(CODES * -128, ONES), "codes", "-128", "-127"),
    (lambda: QEmbedding.from_codes(None, ONES), "codes", "NoneType", "int8"),
]


@pytest.mark.parametrize("index", range(len(MAKING)))
def test_making_a_layer(index: int) -> None:
    make, argument, got, allowed = MAKING[index]
    with pytest.raises(pyquant.ArgumentError) as caught:
        make()
    assert caught.value.argument == argument, str(caught.value)
    assert got in caught.value.got, str(caught.value)
    assert allowed in caught.value.allowed, str(caught.value)


X = torch.randn(3, 32)
RUNNING: list[tuple[Callable[[QLinear], Any], str]] = [
    (lambda q: q(None), "x"),
    (lambda q: q([1.0, 2.0]), "x"),
    (lambda q: q(3.0), "x"),
    (lambda q: q("x"), "x"),
    (lambda q: q(torch.tensor(1.0)), "x"),
    (lambda q: q(torch.zeros(0)), "x"),
    (lambda q: q(X[:, :31]), "x"),
    (lambda q: q(torch.randn(3, 33)), "x"),
    (lambda q: q(X.T), "x"),
    (lambda q: q(X.double()), "x"),
    (lambda q: q(X.long()), "x"),
    (lambda q: q(X.to(torch.int32)), "x"),
    (lambda q: q(torch.zeros(3, 24, dtype=torch.int32)), "x"),  # as wide as its accumulators
    (lambda q: q(X.bool()), "x"),
    (lambda q: q(X.to(torch.complex64)), "x"),
    (lambda q: q(X.to("meta")), "x"),
    (lambda q: q(X.to_sparse()), "x"),
    (lambda q: q((X, torch.ones(1))), "x"),
    (lambda q: q(QTensor(X, torch.ones(1))), "x"),
    (lambda q: q(QTensor(None, torch.ones(1))), "x"),
    (lambda q: q(X, 1.0), "residual"),
    (lambda q: q(X, [1.0]), "residual"),
    (lambda q: q(X, torch.zeros(3, 23)), "residual"),
    (lambda q: q(X, torch.zeros(24)), "residual"),
    (lambda q: q(X, torch.zeros(1, 3, 24)), "residual"),
    (lambda q: q(X, torch.zeros(3, 24, dtype=torch.int8)), "residual"),
    (lambda q: q(X, torch.zeros(3, 24).double()), "residual"),
    (lambda q: q(X, torch.zeros(3, 24, device="meta")), "residual"),
]


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_running_a_layer(scheme: pyquant.QScheme) -> None:
    q = layer(scheme, 32, 24)
    right = q(X)
    for index, (call, argument) in enumerate(RUNNING):
        with pytest.raises(pyquant.PyquantError) as caught:
            call(q)
        error = caught.value
        assert isinstance(error, pyquant.ArgumentError), f"case {index}: {error!r}"
        where: tuple[str, ...] = (argument, "x.data") if index == 19 else (argument,)
        assert error.argument in where, f"case {index}: {error}"
        assert error.got, f"case {index}: {error}"
        assert error.allowed, f"case {index}: {error}"
        assert torch.equal(q(X), right), f"case {index}: the next right call is wrong"


@pytest.mark.parametrize(
    "x", [None, 1, [0], torch.tensor([0.5]), torch.tensor([True]), torch.tensor([10]), torch.tensor([-1])]
)
def test_running_an_embedding(x: Any) -> None:
    q = QEmbedding.from_float(nn.Embedding(10, 4))
    with pytest.raises(pyquant.ArgumentError, match=r"argument 'input'"):
        q(x)
