"""Quantize, Dequantize, QSequential, Residual, QResidual, QResidualAdd: codes from end to end, with exact numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pyquant
from pyquant import numerics
from pyquant.core.presets import W8A8, W8A8Dynamic
from pyquant.core.qtensor import QTensor
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError
from pyquant.nn.chain import QResidual
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qlinear import QLinear

AFFINE = TensorScheme(symmetric=False)
STATIC = TensorScheme()
DYNAMIC = TensorScheme(dynamic=True, granularity="per_token")


def codes_out(outputs: TensorScheme = STATIC) -> QScheme:
    return QScheme(W8A8().weights, STATIC, outputs)


@pytest.mark.parametrize(
    "scheme", [STATIC, AFFINE, TensorScheme(bits=4), TensorScheme(dynamic=True, granularity="per_token")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 7), (0, 3), (2, 3, 4), (1,)])
def test_quantize_and_dequantize(scheme: TensorScheme, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).to(dtype)
    numbers: tuple[Any, ...] = () if scheme.dynamic else (0.03, None if scheme.symmetric else -5)
    q = pyquant.Quantize(*(numbers or (None, None)), scheme)(x)
    if scheme.dynamic:
        codes, scale, zero = numerics.quantize_dynamic(x, "per_token", 0, True, *scheme.code_range)
    else:
        scale, zero = torch.tensor([0.03]), torch.tensor([numbers[1] or 0], dtype=torch.int32)
        codes = numerics.quantize(x, scale, zero, "per_tensor", 0, *scheme.code_range)
    assert torch.equal(q.data, codes)
    back = pyquant.Dequantize(dtype)(q)
    assert back.dtype == dtype
    if scale.numel() == 1:
        assert torch.equal(back, ((codes.int() - zero).float() * scale).to(dtype))
    else:
        assert torch.equal(back, (codes.float() * scale.unsqueeze(-1)).to(dtype))


def test_scales_keep_their_type_and_the_state_travels() -> None:
    a = pyquant.Quantize(0.1, 3, AFFINE).half().to(torch.bfloat16)
    assert a.scale.dtype == torch.float32
    b = pyquant.Quantize(1.0, 0, AFFINE)
    b.load_state_dict(a.state_dict())
    assert b.scale.item() == a.scale.item()
    assert b.zero_point.item() == 3
    assert list(pyquant.Quantize(None, None, DYNAMIC).state_dict()) == []


def test_a_chain_of_codes_equals_the_steps_done_by_hand() -> None:
    torch.manual_seed(0)
    one = QLinear.from_float(nn.Linear(8, 16), codes_out(), input_scale=0.02, output_scale=0.03, activation="relu")
    two = QLinear.from_float(nn.Linear(16, 4), W8A8(), input_scale=0.03)
    chain = pyquant.QSequential(pyquant.Quantize(0.02), one, nn.Identity(), two)
    x = torch.randn(5, 8)
    q = numerics.quantize(x, torch.tensor([0.02]))
    acc = (q.long() @ one.codes.long().T).float()
    t = torch.relu(acc * (torch.tensor(0.02) * one.weight_scale) + one.bias)
    mid = numerics.quantize(t, torch.tensor([0.03]))
    acc = (mid.long() @ two.codes.long().T).float()
    assert torch.equal(chain(x), acc * (torch.tensor(0.03) * two.weight_scale) + two.bias)
    assert type(chain[:2]) is pyquant.QSequential


def test_joints_that_cannot_work_are_named() -> None:
    one = QLinear.from_float(nn.Linear(4, 4), codes_out(), input_scale=0.02, output_scale=0.03)
    other = QLinear.from_float(nn.Linear(4, 4), W8A8(), input_scale=0.05)
    for members, match in (
        ((pyquant.Quantize(0.03), one), r"'0' before '1'.*scale 0.03.*scale 0.02"),
        ((one, other), "scale 0.03.*scale 0.05"),
        ((one, nn.ReLU()), "ReLU takes real numbers"),
        ((one, nn.Linear(4, 4)), "Linear takes real numbers"),
        ((other, pyquant.Dequantize()), "takes codes and is given real"),
        ((pyquant.Quantize(0.02, -3, AFFINE), one), "zero point -3.*zero point 0"),
    ):
        with pytest.raises(ArgumentError, match=match):
            pyquant.QSequential(*members)
    pyquant.QSequential(one, QLinear.from_float(nn.Linear(4, 4), W8A8Dynamic()), nn.ReLU())


def test_a_residual_is_rounded_and_codes_of_it_are_only_dequantised() -> None:
    r = QResidual(0.1, -20, AFFINE)
    x = torch.randn(3, 5) * 10
    codes = numerics.quantize(x, torch.tensor([0.1]), torch.tensor([-20]), "per_tensor", 0, -128, 127)
    real = numerics.dequantize(codes, torch.tensor([0.1]), torch.tensor([-20], dtype=torch.int32))
    assert torch.equal(r(x), real)
    assert not torch.equal(real, x)
    assert torch.equal(r(QTensor(codes, torch.tensor([0.1]), torch.tensor([-20], dtype=torch.int32))), real)
    with pytest.raises(ArgumentError, match=r"scale 0\.2"):
        r(QTensor(codes, torch.tensor([0.2]), torch.tensor([-20], dtype=torch.int32)))
    y = torch.randn(4, requires_grad=True)
    QResidual(0.01)(y).sum().backward()
    assert torch.equal(y.grad, ((y.detach() >= -1.27) & (y.detach() <= 1.27)).float())
    assert r(x.half()).dtype == torch.float16


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_the_sum_happens_in_the_epilogue(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    if kind == "linear":
        layer: Any = QLinear.from_float(nn.Linear(6, 6), W8A8(), input_scale=0.03)
        x, skip = torch.randn(4, 6), torch.randn(4, 6)
    else:
        layer = QConv2d.from_float(nn.Conv2d(3, 3, 3, padding=1), W8A8(), input_scale=0.03)
        x, skip = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 5, 5)
    add = pyquant.QResidualAdd(layer, "relu")
    add.residual = QResidual(0.02)
    seen = []
    forward = type(layer).forward
    monkeypatch.setattr(
        type(layer), "forward", lambda self, x, residual=None: (seen.append(residual), forward(self, x, residual))[1]
    )
    wanted = torch.relu(layer.reference(x, QResidual(0.02)(skip)))
    assert torch.equal(add(x, skip), wanted)
    assert len(seen) == 1
    assert seen[0] is not None
    # in 16 bits the sum is rounded once, not twice
    half = add(x.half(), skip.half())
    assert torch.equal(half, torch.relu(layer.reference(x.half(), QResidual(0.02)(skip.half()))))


@pytest.mark.parametrize(("outputs", "zero"), [(STATIC, None), (AFFINE, -128), (AFFINE, 7)])
def test_relu_over_codes_equals_relu_before_the_requantise(outputs: TensorScheme, zero: int | None) -> None:
    torch.manual_seed(2)
    layer = QLinear.from_float(
        nn.Linear(6, 6), codes_out(outputs), input_scale=0.03, output_scale=0.01, output_zero_point=zero
    )
    real = QLinear.from_codes(layer.codes, layer.weight_scale, scheme=W8A8(), bias=layer.bias, input_scale=0.03)
    add = pyquant.QResidualAdd(layer, "relu")
    add.residual = QResidual(0.02)
    x, skip = torch.randn(50, 6), torch.randn(50, 6)
    t = torch.relu(real(x, add.residual(skip)))
    zero_point = None if zero is None else torch.tensor([zero], dtype=torch.int32)
    wanted = numerics.quantize(t, torch.tensor([0.01]), zero_point, "per_tensor", 0, *outputs.code_range)
    assert torch.equal(add(x, skip).data, wanted)
    if zero == -128:
        add.relu_is_free = True
        assert torch.equal(add(x, skip).data, wanted)
    elif zero == 7:  # the planted bug: a free ReLU where the codes go below the zero point
        add.relu_is_free = True
        assert not torch.equal(add(x, skip).data, wanted)


def test_a_float_block_is_an_ordinary_sum() -> None:
    add, x, skip = pyquant.QResidualAdd(nn.Linear(4, 4)), torch.randn(2, 4), torch.randn(2, 4)
    assert torch.equal(add(x, skip), add.layer(x) + skip)
    assert pyquant.Residual()(x) is x


def test_bad_arguments_are_named() -> None:
    cases: list[tuple[Any, str]] = [
        (lambda: pyquant.Quantize(), "'scale'"),
        (lambda: pyquant.Quantize(0.0), "'scale'"),
        (lambda: pyquant.Quantize(float("nan")), "'scale'"),
        (lambda: pyquant.Quantize(1.0, 3), "'zero_point'"),
        (lambda: pyquant.Quantize(1.0, None, AFFINE), "'zero_point'"),
        (lambda: pyquant.Quantize(1.0, 200, AFFINE), "'zero_point'"),
        (lambda: pyquant.Quantize(1.0, None, TensorScheme(bits=16)), "'scheme'"),
        (lambda: pyquant.Quantize(1.0, None, DYNAMIC), "'scale'"),
        (lambda: QResidual(1.0, None, DYNAMIC), "'scheme'"),
        (lambda: pyquant.Quantize(1.0)(torch.ones(2, dtype=torch.int32)), "'x'"),
        (lambda: pyquant.Dequantize()(torch.ones(2)), "'x'"),
        (lambda: pyquant.Dequantize(torch.int8), "'dtype'"),
        (lambda: pyquant.QResidualAdd(nn.Linear(2, 2), "gelu"), "'activation'"),
        (lambda: pyquant.QResidualAdd(torch.relu), "'layer'"),
    ]
    for wrong, match in cases:
        with pytest.raises(ArgumentError, match=match):
            wrong()


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_traced_residual_block_takes_what_the_block_takes(is_linked: bool) -> None:
    """Codes or floats: torch.fx shows neither, and the branch for floats was recorded."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.relu = nn.Conv2d(4, 4, 3, 1, 1), nn.ReLU()
            self.conv2 = pyquant.QResidualAdd(nn.Conv2d(4, 4, 3, 1, 1), "relu")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv2(self.relu(self.conv1(x)), x)

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), Block(), nn.Conv2d(4, 2, 1)).eval(), torch.randn(2, 3, 6, 6)
    pyquant.quantize_(model, "W8A8", data=[x], check_speed=False)
    pyquant.fuse_(model)
    if is_linked:
        pyquant.link_(model, x)
    with torch.no_grad():
        assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))
