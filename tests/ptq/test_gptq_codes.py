"""gptq_codes: GPTQ of one matrix, by a scheme or given scales, from inputs or their moments."""

from __future__ import annotations

import pytest
import torch

from pyquant import W4A8, W4A16, W8A16, ArgumentError, NonFiniteError, QLinear, SchemeError, TensorScheme, gptq_codes
from pyquant.calibrate import weight_qparams
from pyquant.nn.weights import dequantise_weight, quantise_weight
from pyquant.ptq.improve.gptq_codes import column_codes

G = torch.Generator().manual_seed(5)
WEIGHT = torch.randn(12, 16, generator=G)
INPUTS = torch.randn(3, 40, 16, generator=G) @ torch.randn(16, 16, generator=G)
SCHEMES = [
    W4A16(group_size=None).weights,
    W4A16(group_size=4, symmetric=False).weights,
    W8A16(group_size=8),
    W4A8(None),
    TensorScheme(bits=4, granularity="per_tensor", calibrator="mse"),
    TensorScheme(bits=4, granularity="per_channel", calibrator="mse"),
]


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_are_nearer_than_rounding(scheme, act_order) -> None:
    codes, scale, zero_point = gptq_codes(WEIGHT, scheme, INPUTS, act_order=act_order)
    of_weights = scheme if isinstance(scheme, TensorScheme) else scheme.weights
    want_scale, want_zero = weight_qparams(WEIGHT, of_weights)
    assert torch.equal(scale, want_scale)
    assert zero_point is None if of_weights.symmetric else torch.equal(zero_point, want_zero)
    rounded = quantise_weight(WEIGHT, of_weights)[0]

    def error(q: torch.Tensor) -> float:
        per_row = scale.expand(12) if scale.dim() == 0 or scale.numel() == 1 else scale
        zero = None if zero_point is None else zero_point
        real = dequantise_weight(q, per_row.contiguous(), zero, of_weights)
        return float(((real - WEIGHT) @ INPUTS.reshape(-1, 16).t()).square().sum())

    assert codes.dtype == torch.int8
    assert error(codes) < 0.9 * error(rounded)
    rows = INPUTS.reshape(-1, 16)
    by_moments = gptq_codes(WEIGHT, scheme, hessian=rows.t() @ rows, act_order=act_order)
    assert torch.equal(by_moments[0], codes)
    given = gptq_codes(WEIGHT, scheme, INPUTS, scale=scale, zero_point=zero_point, act_order=act_order)
    assert torch.equal(given[0], codes)


def test_they_make_a_layer() -> None:
    scheme = W4A16(group_size=8)
    codes, scale, zero_point = gptq_codes(WEIGHT, scheme, INPUTS)
    layer = QLinear.from_codes(codes=codes, weight_scale=scale, weight_zero_point=zero_point, bias=None, scheme=scheme)
    want = INPUTS @ dequantise_weight(codes, scale, None, scheme.weights).t()
    torch.testing.assert_close(layer(INPUTS), want, rtol=1e-4, atol=1e-4)
    rows = INPUTS.reshape(-1, 16)
    by_hand = column_codes(WEIGHT, rows.t() @ rows, scale, qmin=-7, qmax=7)
    assert torch.equal(codes, by_hand)


BAD = {
    "scheme": {"scheme": "W4A16"},
    "inputs": {"inputs": None},
    "inputs ": {"hessian": torch.ones(16, 16)},
    "inputs  ": {"inputs": torch.ones(3, 15)},
    "inputs   ": {"inputs": torch.ones(3, 16, dtype=torch.int8)},
    "hessian": {"inputs": None, "hessian": torch.ones(16, 15)},
    "hessian ": {"inputs": None, "hessian": torch.eye(16) + torch.ones(16, 16).triu()},
    "hessian  ": {"inputs": None, "hessian": -torch.eye(16) * 5},
    "damp": {"damp": 0.0},
    "act_order": {"act_order": None},
    "weight": {"weight": WEIGHT[0]},
    "scale": {"scale": torch.ones(11)},
    "scale ": {"scale": -torch.ones(12)},
    "zero_point": {"zero_point": torch.zeros(12, dtype=torch.int32)},
    "zero_point ": {"scale": torch.ones(12), "zero_point": torch.zeros(12, dtype=torch.int32)},
}


@pytest.mark.parametrize("argument", BAD)
def test_wrong_arguments_are_named(argument) -> None:
    given = {"weight": WEIGHT, "scheme": W4A16(group_size=None), "inputs": INPUTS} | BAD[argument]
    with pytest.raises(ArgumentError, match=f"'{argument.strip()}'"):
        gptq_codes(**given)


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**-60, 2.0**60])
def test_codes_do_not_depend_on_the_size_of_the_inputs(factor: float) -> None:
    """Whose squares float32 does not hold."""
    scheme = W4A16(group_size=None)
    assert torch.equal(gptq_codes(WEIGHT, scheme, INPUTS * factor)[0], gptq_codes(WEIGHT, scheme, INPUTS)[0])


def test_numbers_that_are_none_are_refused() -> None:
    scheme = W4A16(group_size=None)
    with pytest.raises(NonFiniteError, match="'inputs'"):
        gptq_codes(WEIGHT, scheme, INPUTS * torch.inf)
    with pytest.raises(NonFiniteError, match="'hessian'"):
        gptq_codes(WEIGHT, scheme, hessian=torch.full((16, 16), torch.nan))
    with pytest.raises(NonFiniteError):
        gptq_codes(WEIGHT, scheme, INPUTS * torch.nan)
    with pytest.raises(NonFiniteError):
        gptq_codes(WEIGHT * torch.inf, scheme, INPUTS)
    with pytest.raises(SchemeError):
        gptq_codes(WEIGHT, W4A16(group_size=5), INPUTS)
