"""Both forms of a layer: the state is that of the codes, the real weights follow it wherever it goes."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import pyquant
from pyquant import QLinear, W8A8Dynamic
from pyquant.nn.two_forms import TwoFormLinear

FEW, MANY = (
    torch.randn(3, 16, generator=torch.Generator().manual_seed(1)),
    torch.randn(8, 16, generator=torch.Generator().manual_seed(2)),
)


def layer(seed: int = 0, **more: object) -> QLinear:
    torch.manual_seed(seed)
    return QLinear.from_float(nn.Linear(16, 8), W8A8Dynamic(), **more)  # type: ignore[arg-type]


def both(seed: int = 0, **more: object) -> TwoFormLinear:
    return TwoFormLinear.of(layer(seed, **more), [(4, math.inf)])


def check(two: TwoFormLinear, one: QLinear) -> None:
    """`two` has the numbers of `one` in both forms."""
    assert torch.equal(two(FEW.to(one.dtype)), one(FEW.to(one.dtype)))
    assert torch.equal(two(MANY.to(one.dtype)), one.to_float()(MANY.to(one.dtype)))


def test_each_number_of_rows_has_its_form() -> None:
    two = both()
    check(two, layer())
    assert torch.equal(two(MANY.reshape(2, 4, 16)), two(MANY).reshape(2, 4, 8))
    assert [two.kernel_info(M).kernel == "torch matmul" for M in (0, 3, 4, 99)] == [False, False, True, True]
    assert two.kernel_info(4).is_exact is False
    assert "in floats at rows 4-" in repr(two)
    for x in (FEW, MANY):
        assert torch.allclose(two(x), two.reference(x), atol=1e-6)
    x = MANY.clone().requires_grad_()
    two(x).sum().backward()
    assert torch.allclose(x.grad, two.to_float().weight.sum(0).expand(8, 16), atol=1e-6)
    for wrong in (torch.randn(8, 15), torch.ones(8, 16, dtype=torch.int64)):
        with pytest.raises(pyquant.ArgumentError):
            two(wrong)


def test_activation_residual_and_groups() -> None:
    two, residual = both(activation="gelu"), torch.randn(8, 8)
    wanted = nn.functional.gelu(two.to_float()(MANY)) + residual
    assert torch.allclose(two(MANY, residual), wanted, atol=1e-6)
    torch.manual_seed(0)
    weight_only = QLinear.from_float(nn.Linear(16, 8), pyquant.W4A16(group_size=8))
    check(TwoFormLinear.of(weight_only, [(4, math.inf)]), weight_only)


def test_the_state_is_that_of_a_qlinear_and_the_weights_follow_it() -> None:
    two, other = both(), layer(1)
    assert two.state_dict().keys() == other.state_dict().keys()
    assert layer().load_state_dict(two.state_dict())
    two.load_state_dict(other.state_dict())
    check(two, other)
    two.load_state_dict(layer(2).state_dict(), assign=True)
    check(two, layer(2))
    two.bias = torch.zeros(8)
    assert torch.equal(two(MANY), two.to_float()(MANY))
    for changed in (copy.deepcopy(both()).bfloat16(), both().half(), both().half().float()):
        check(changed, layer().to(changed.dtype))
        assert changed._buffers["float_weight"].dtype == changed.dtype


def test_devices() -> None:
    gone = both().to("meta")
    assert gone._buffers["float_weight"].is_meta
    back = gone.to_empty(device="cpu")
    back.load_state_dict(layer(1).state_dict())
    check(back, layer(1))


def test_files_hold_the_codes_and_load_as_a_qlinear(tmp_path: Path) -> None:
    model = nn.Sequential(both())
    pyquant.save_pretrained(model, tmp_path)
    loaded = pyquant.load_pretrained(tmp_path, nn.Sequential(nn.Linear(16, 8)))
    assert type(loaded[0]) is QLinear
    assert torch.equal(loaded(FEW), layer()(FEW))
    floats = pyquant.dequantize_(nn.Sequential(both()))
    assert torch.equal(floats[0].weight, layer().to_float().weight)


def test_what_has_no_two_forms_is_refused() -> None:
    static = QLinear.from_float(nn.Linear(16, 8), pyquant.W8A8(), input_scale=0.1)
    gives = static.with_outputs(pyquant.TensorScheme(), torch.tensor([0.1]))
    for one in (gives, QLinear.from_float(nn.Linear(16, 8), pyquant.FP16())):
        with pytest.raises(pyquant.ArgumentError, match="layer"):
            TwoFormLinear.of(one, [(4, math.inf)])
    with pytest.raises(pyquant.ArgumentError, match="link_ before auto_"):
        TwoFormLinear.of(static, [(4, math.inf)]).with_outputs(pyquant.TensorScheme(), torch.tensor([0.1]))


def test_it_compiles_and_exports_nothing_new() -> None:
    two = both()
    compiled = torch.compile(two, backend="eager", fullgraph=True)
    for x in (FEW, MANY):
        assert torch.equal(compiled(x), two(x))
