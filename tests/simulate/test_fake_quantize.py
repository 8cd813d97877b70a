"""FakeQuantize: the codes of the integer path, the states a range can be in, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyquant import ops
from pyquant.calibrate import Range, compute_range
from pyquant.core.presets import W8A8
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.simulate.fake_quantize import FakeQuantize

SCHEMES = [
    TensorScheme(bits=bits, symmetric=symmetric, narrow_range=narrow)
    for bits in (4, 8)
    for symmetric, narrow in ((True, True), (True, False), (False, False))
]


def calibrated(scheme: TensorScheme, x: Tensor) -> FakeQuantize:
    fake = FakeQuantize(scheme)
    statistics = fake.start_calibration()["x"]
    fake(x)
    fake.stop_calibration()
    fake.set_range(compute_range(statistics, scheme))
    return fake


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gives_the_codes_of_the_integer_path(scheme: TensorScheme, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    fake = calibrated(scheme, torch.randn(64, 33))
    x = (torch.randn(17, 33) * 3).to(dtype)
    scale, zero_point = fake.qparams()
    codes = ops.quantize(x, scale, zero_point, "per_tensor", 0, *scheme.code_range)
    assert codes.unique().numel() > 10, "the data must use the range"
    expected = ops.dequantize(codes, scale, zero_point, out_dtype=dtype)
    assert torch.equal(fake(x), expected)


def test_gradient_is_cut_where_the_range_clips() -> None:
    fake = FakeQuantize(TensorScheme())
    fake.set_qparams(torch.tensor([0.1]))
    x = torch.tensor([-20.0, -12.7, 0.04, 12.7, 12.8, 13.0], requires_grad=True)
    fake(x).backward(torch.arange(1.0, 7.0))
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 2.0, 3.0, 4.0, 0.0, 0.0]


def test_a_range_that_follows_its_data_passes_every_gradient() -> None:
    fake = FakeQuantize(TensorScheme(granularity="per_channel"), follows=True)
    x = torch.randn(5, 7, requires_grad=True)
    y = fake(x)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(5, 7))
    scale, zero_point = fake.qparams(x)
    assert zero_point is None
    assert torch.equal(y, ops.dequantize(ops.quantize(x, scale, None, "per_channel"), scale, None, "per_channel"))


def test_collects_without_changing_and_then_covers_the_data() -> None:
    fake, x = FakeQuantize(TensorScheme(symmetric=False)), torch.linspace(-1, 3, 50)
    assert not fake.is_calibrated
    statistics = fake.start_calibration()["x"]
    assert torch.equal(fake(x), x)
    fake.stop_calibration()
    assert not fake.is_calibrated, "the caller sets the range, once all is well"
    fake.set_range(compute_range(statistics, fake.scheme))
    assert fake.is_calibrated
    assert fake.statistics is None
    assert torch.allclose(fake(x), x, atol=4 / 255)


def test_without_a_range_it_refuses_to_run() -> None:
    fake = FakeQuantize(TensorScheme())
    fake.start_calibration()
    fake.stop_calibration()
    assert not fake.is_calibrated
    with pytest.raises(ArgumentError, match="not calibrated"):
        fake(torch.ones(2))


def test_off_passes_on_unchanged() -> None:
    fake, x = FakeQuantize(TensorScheme()), torch.randn(3)
    fake.mode = "off"
    assert fake(x) is x


def test_state_dict_carries_whether_it_is_calibrated() -> None:
    known, other = (
        calibrated(TensorScheme(symmetric=False), torch.randn(99)),
        FakeQuantize(TensorScheme(symmetric=False)),
    )
    unknown = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    other.load_state_dict(known.state_dict())
    assert other.is_calibrated
    assert torch.equal(other(torch.ones(3)), known(torch.ones(3)))
    other.load_state_dict(unknown)
    assert not other.is_calibrated


def test_nan_in_calibration_data_raises() -> None:
    fake = FakeQuantize(TensorScheme())
    fake.start_calibration()
    with pytest.raises(NonFiniteError):
        fake(torch.tensor([1.0, float("nan")]))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_refuses_scales_that_mean_nothing(scale: float) -> None:
    with pytest.raises(ArgumentError, match="above 0"):
        FakeQuantize(TensorScheme()).set_qparams(torch.tensor([scale]))


def test_refuses_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="scheme"):
        FakeQuantize(W8A8())
    with pytest.raises(ArgumentError, match="follows"):
        FakeQuantize(TensorScheme(), follows=True).set_range(Range(torch.tensor(-1.0), torch.tensor(1.0)))
    with pytest.raises(ArgumentError, match="'x'"):
        FakeQuantize(TensorScheme(), follows=True).qparams()
