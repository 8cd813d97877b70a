"""QLinear computes what pyquant.numerics says, for every scheme, shape, layout and dtype; and its gradients."""

from __future__ import annotations

import copy

import accept
import problems
import pytest
import torch
from qlayers import ALL, CODES_OUT, FLOAT, INTEGER, layer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pyquant
from pyquant.core.presets import W8A8, W4A8Dynamic, W8A8Dynamic
from pyquant.core.qtensor import QTensor
from pyquant.errors import NonFiniteError
from pyquant.nn.qlinear import QLinear
from pyquant.nn.weights import quantise_weight

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALL = "small layers may be constant or mostly zero"


def compare(q: QLinear, x: Tensor | QTensor, residual: Tensor | None = None, what: str = "") -> None:
    got, want = q(x, residual), q.reference(x, residual)
    if isinstance(want, QTensor):
        assert isinstance(got, QTensor)
        accept.t0(got.data, want.data, what=what, waiver=SMALL)
        assert got.scale is want.scale
    elif q.scheme.is_integer:
        accept.t1(got, want, what=what, waiver=SMALL)
    else:
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scheme", ALL + CODES_OUT, ids=str)
def test_forward_is_the_reference(scheme: pyquant.QScheme) -> None:
    draw = problems.Draw(problems.BASE_SEED, "qlinear", str(scheme))
    for index in range(24):
        k, n = 16 * draw.integer(0, 9), draw.integer(0, 70)
        if scheme.weights.group_size is None:
            k += draw.integer(0, 15)
        activation = draw.choice(problems.ACTIVATIONS)
        clamp = (-0.5, 0.75) if activation == "clamp" else None
        q = layer(scheme, k, n, bias=draw.chance(0.7), activation=activation, clamp=clamp)
        lead = draw.choice([(), (1,), (0,), (5,), (33,), (2, 3), (1, 2, 1, 3), (2, 0)])
        dtype = draw.choice(DTYPES)
        x = draw.normal(*lead, k).to(dtype)
        residual = draw.normal(*lead, n).to(draw.choice(DTYPES)) if draw.chance(0.5) else None
        compare(q, x, residual, f"case {index}: {scheme} k={k} n={n} {lead} {dtype} {activation}")


def test_forward_is_the_integer_product_by_hand() -> None:
    """Against int64 arithmetic written out here, not against pyquant.numerics."""
    torch.manual_seed(1)
    q = layer(W8A8Dynamic(), 96, 40)
    x = torch.randn(7, 96)
    scale = x.abs().amax(1) / torch.tensor(127.0)
    x_q = torch.clamp(torch.round(x * (1 / scale).unsqueeze(1)), -127, 127).to(torch.int64)
    acc = x_q @ q.codes.to(torch.int64).T
    assert q.bias is not None
    want = acc.to(torch.float32) * q.weight_scale * scale.unsqueeze(1) + q.bias
    accept.t1(q(x), want)


@pytest.mark.parametrize("scheme", [W8A8Dynamic(), W4A8Dynamic(16), W8A8(), FLOAT[0], FLOAT[4]], ids=str)
def test_layouts_of_x_and_residual(scheme: pyquant.QScheme) -> None:
    q = layer(scheme, 32, 24)
    draw = problems.Draw(problems.BASE_SEED, "layouts", str(scheme))
    seen = 0
    for layout in problems.LAYOUTS:
        x = layout.build(draw.normal(6, 32))
        if layout.refused is not None or x.dim() < 1 or x.shape[-1] != 32:
            continue
        seen += 1
        residual = layout.build(draw.normal(6, 24)).detach()
        x = x.detach()
        got, want = q(x, residual), q(x.contiguous(), residual.contiguous())
        if scheme.is_integer:
            accept.t1(torch.Tensor(got), torch.Tensor(want), what=layout.name, waiver=SMALL)
        else:  # float sums follow the memory: on some processors the BLAS adds a strided operand in another order
            torch.testing.assert_close(torch.Tensor(got), torch.Tensor(want), rtol=1e-5, atol=1e-5, msg=layout.name)
    assert seen >= 15


@pytest.mark.parametrize("scheme", INTEGER, ids=str)
def test_a_row_alone_is_the_row_in_its_batch(scheme: pyquant.QScheme) -> None:
    q = layer(scheme, 48, 33)
    x = problems.Draw(problems.BASE_SEED, "rows").normal(19, 48)
    whole = q(x)
    for row in range(19):
        accept.t1(q(x[row]), whole[row])
    order = torch.randperm(19, generator=torch.Generator().manual_seed(3))
    accept.t1(q(x[order]), whole[order])


def test_one_thread_gives_the_bits_of_two() -> None:
    q, x = layer(W8A8Dynamic(), 256, 300), torch.randn(65, 256)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = q(x)
        torch.set_num_threads(2)
        accept.t1(q(x), one)
    finally:
        torch.set_num_threads(before)


def test_a_poisoned_row_stays_alone() -> None:
    q, x = layer(W8A8Dynamic(), 32, 24), torch.randn(5, 32)
    clean = q(x)
    x[2, 31], x[4, 0] = float("nan"), float("-inf")
    y = q(x)
    assert bool(y[[2, 4]].isnan().all())
    accept.t1(y[[0, 1, 3]], clean[[0, 1, 3]])


# ---- codes between layers


def test_integer_output_feeds_the_next_layer() -> None:
    """Two static layers linked by codes give what the float hand-over gives, bit for bit."""
    first = layer(CODES_OUT[0], 48, 32)
    second = QLinear.from_float(nn.Linear(32, 16), W8A8(), input_scale=first.output_scale)
    x = torch.randn(9, 48)
    codes = first(x)
    assert isinstance(codes, QTensor)
    assert codes.data.dtype == torch.int8
    real = codes.data.float() * codes.scale
    accept.t1(second(codes), second(real))
    accept.t1(second(codes), second.reference(codes))


@pytest.mark.parametrize("scheme", [s for s in INTEGER if not s.is_static], ids=str)
def test_dynamic_layers_take_per_token_codes(scheme: pyquant.QScheme) -> None:
    q, x = layer(scheme, 32, 24), torch.randn(3, 5, 32)
    assert scheme.inputs is not None
    data, scale, zero_point = pyquant.ops.quantize_dynamic(
        x, "per_token", 0, scheme.inputs.symmetric, *scheme.inputs.code_range
    )
    codes = QTensor(data, scale, None if scheme.inputs.symmetric else zero_point)
    accept.t1(q(codes), q(x))
    accept.t1(q(codes), q.reference(codes))


def test_codes_of_rows_meet_the_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are laid out once, when a layer is made, not at each call with codes."""
    affine, plain = layer(W8A8Dynamic(symmetric_inputs=False), 32, 24), layer(W4A8Dynamic(group_size=None), 32, 24)
    x = torch.randn(6, 32)
    want = affine(x), plain(x)
    made = pyquant.ops.quantize_dynamic(x, "per_token", 0, False, -128, 127)
    symmetric = pyquant.ops.quantize_dynamic(x)
    anew = plain(QTensor(*made)), affine(QTensor(made[0], made[1][:1]))  # a zero point too many; one scale for all
    laid = []
    monkeypatch.setattr(QLinear, "_canonical", lambda self: laid.append(self))
    accept.t1(affine(QTensor(*made)), want[0])
    accept.t1(plain(QTensor(symmetric[0], symmetric[1])), want[1])
    assert not laid
    assert all(y.isfinite().all() for y in anew)


def test_unsigned_codes_are_the_signed_ones_of_the_same_numbers() -> None:
    static = layer(W8A8(symmetric_inputs=False), 32, 24)
    x = torch.randn(4, 32)
    assert static.input_scale is not None
    assert static.input_zero_point is not None
    codes = pyquant.ops.quantize(x, static.input_scale, static.input_zero_point, qmin=-128)
    unsigned = (codes.int() + 128).to(torch.uint8)
    q_u8 = QTensor(unsigned, static.input_scale.clone(), static.input_zero_point + 128)
    accept.t1(static(q_u8), static(x))
    dynamic = layer(W8A8Dynamic(), 32, 24)
    token_scale = torch.full((4,), 0.02)
    u8 = QTensor(unsigned, token_scale, torch.full((4,), 131, dtype=torch.int32))
    s8 = QTensor(codes, token_scale, torch.full((4,), 3, dtype=torch.int32))
    accept.t1(dynamic(u8), dynamic(s8))
    plain = QTensor(unsigned, token_scale)
    real = unsigned.double() * 0.02
    torch.testing.assert_close(
        dynamic(plain).double(),
        real @ dynamic.dequantised_weight().double().T + dynamic.bias.double(),
        rtol=1e-4,
        atol=1e-4,
    )  # type: ignore[union-attr]


def test_codes_of_another_scale_are_refused() -> None:
    static = layer(W8A8(), 32, 24)
    codes = torch.zeros(2, 32, dtype=torch.int8)
    for bad in (
        QTensor(codes, torch.tensor([0.5])),
        QTensor(codes, static.input_scale, torch.tensor([1], dtype=torch.int32)),
        QTensor(codes, torch.ones(2)),
    ):
        with pytest.raises(pyquant.ArgumentError, match=r"argument 'x'.*this layer's input"):
            static(bad)
    with pytest.raises(pyquant.ArgumentError, match=r"argument 'x'.*QTensor.*W8A16"):
        layer(FLOAT[0])(QTensor(codes, torch.ones(1)))


# ---- weights


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_to_float_has_the_dequantised_weights(scheme: pyquant.QScheme) -> None:
    q = layer(scheme, 32, 24)
    back = q.to_float()
    if scheme.is_float:
        assert torch.equal(back.weight, q.codes.float())
    else:
        scale, zero = q.weight_scale.double(), q.weight_zero_point
        codes = q.codes.double().reshape(24, *scale.shape[1:], -1)
        zero = torch.zeros(()) if zero is None else zero.double().unsqueeze(-1)
        want = ((codes - zero) * scale.unsqueeze(-1)).float().reshape(24, 32)
        accept.t1(back.weight.detach(), want)
    assert torch.equal(back.bias, q.bias)
    assert isinstance(back.weight, nn.Parameter)
    x = torch.randn(8, 32)
    torch.manual_seed(32 * 1000 + 24)
    float_layer = nn.Linear(32, 24)
    step = 0.0 if scheme.is_float else float(q.weight_scale.max())
    reach = 0.51 if scheme.weights.calibrator == "max" and not scheme.weights.two_level else 2.0  # others may clip
    assert float((back.weight - float_layer.weight).detach().abs().max()) <= max(reach * step, 2e-3)
    assert F.linear(x, back.weight, back.bias).shape == (8, 24)


def test_a_linear_becomes_the_same_layer_again() -> None:
    """Codes are a fixed point: quantising the dequantised weights gives them back."""
    q = layer(W8A8Dynamic(), 64, 32)
    again = QLinear.from_float(q.to_float(), W8A8Dynamic())
    accept.t0(again.codes, q.codes)


def test_per_tensor_weights_share_one_scale() -> None:
    scheme = pyquant.QScheme(pyquant.TensorScheme(), W8A8Dynamic().inputs)
    q = layer(scheme, 32, 24)
    assert q.weight_scale.unique().numel() == 1
    torch.manual_seed(32 * 1000 + 24)
    assert float(q.weight_scale[0]) == float(nn.Linear(32, 24).weight.detach().abs().max() / torch.tensor(127.0))
    compare(q, torch.randn(4, 32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_widened_before_they_are_quantised(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 32).to(dtype)
    narrow = quantise_weight(weight, W8A8().weights)
    wide = quantise_weight(weight.float(), W8A8().weights)
    accept.t0(narrow[0], wide[0])
    accept.t1(narrow[1], wide[1])


def test_from_float_leaves_the_linear_alone() -> None:
    linear = nn.Linear(16, 8)
    before = {name: t.clone() for name, t in linear.state_dict().items()}
    q = QLinear.from_float(linear, W8A8Dynamic())
    linear.bias.data.add_(1)  # the layer has its own bias
    assert torch.equal(q.bias, before["bias"])
    assert torch.equal(linear.weight, before["weight"])
    half = QLinear.from_float(linear, pyquant.FP16())
    linear.weight.data.zero_()
    assert bool(half.weight.any())


# ---- gradients


@pytest.mark.parametrize("scheme", [s for s in INTEGER if not s.is_static] + FLOAT, ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_gradients_are_those_of_the_dequantised_linear(scheme: pyquant.QScheme, activation: str | None) -> None:
    q = layer(scheme, 32, 24, activation=activation)
    x = torch.randn(5, 32, requires_grad=True)
    residual = torch.randn(5, 24, requires_grad=True)
    y = q(x, residual)
    with torch.no_grad():
        accept.t1(y.detach(), q(x, residual).detach(), waiver=SMALL)
    grad = torch.randn(5, 24)
    y.backward(grad)
    x2, r2 = x.detach().clone().requires_grad_(), residual.detach().clone().requires_grad_()
    act = {None: lambda t: t, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}[activation]
    (act(F.linear(x2, q.dequantised_weight(), q.bias)) + r2).backward(grad)
    assert x.grad is not None
    assert bool(x.grad.any())
    torch.testing.assert_close(x.grad, x2.grad, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(residual.grad, r2.grad)


def test_a_static_range_passes_no_gradient_where_it_clips() -> None:
    q = layer(W8A8(), 32, 24)
    x = torch.linspace(-6, 6, 32).reshape(1, 32).requires_grad_()  # the range is [-3, 3]
    q(x).sum().backward()
    assert x.grad is not None
    clipped = x.detach().abs() > 3
    assert not bool(x.grad[clipped].any())
    assert bool(x.grad[~clipped].all())


def test_no_grad_inputs_carry_no_graph() -> None:
    q = layer(W8A8Dynamic())
    assert not q(torch.randn(2, 32)).requires_grad
    with torch.no_grad():
        assert not q(torch.randn(2, 32, requires_grad=True)).requires_grad
    assert not any(p.requires_grad or p.numel() for p in q.parameters())


# ---- telling


def test_kernel_info_and_repr() -> None:
    q = layer(W4A8Dynamic(16), 32, 24, activation="gelu")
    told = q.kernel_info(8)
    assert told.is_exact
    assert told.device == "cpu"
    assert told.kernel
    assert told.reason
    assert (
        repr(q)
        == "QLinear(in_features=32, out_features=24, bias=True, scheme=W4A8Dynamic(group_size=16), activation=gelu)"
    )
    assert not layer(FLOAT[0]).kernel_info().is_exact
    uncalibrated = QLinear(8, 8, scheme=W8A8())
    assert uncalibrated.kernel_info().kernel == "none"
    assert "without input_scale" in repr(uncalibrated)
    for bad in (-1, 1.5, True, None):
        with pytest.raises(pyquant.ArgumentError, match=r"argument 'M'"):
            q.kernel_info(bad)  # type: ignore[arg-type]


def test_deepcopy_is_independent() -> None:
    q, x = layer(W8A8Dynamic()), torch.randn(3, 32)
    twin, before = copy.deepcopy(q), q(x)
    accept.t1(twin(x), before)
    assert twin._buffers["storage"].data_ptr() != q._buffers["storage"].data_ptr()  # type: ignore[union-attr]
    twin.bias = torch.zeros(24)
    assert not torch.equal(twin(x), before)
    accept.t1(q(x), before)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "scheme", ["W4A16(group_size=32)", "W8A16", "FP16", "W8A8Dynamic", "W4A8Dynamic(group_size=32)"]
)
def test_gradients_under_checkpointing(scheme: str, reentrant: bool) -> None:
    """Saved tensors can be asked for once there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    pyquant.quantize_(model, scheme, check_speed=False)
    grads = []
    for through in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        x = torch.linspace(-2, 2, 3 * 64).reshape(3, 64).requires_grad_()
        through(x).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_16_bit_weights_that_the_type_does_not_hold_are_refused() -> None:
    for dtype, value in ((torch.float32, 1e5), (torch.bfloat16, -1e5), (torch.float32, torch.nan)):
        linear = nn.Linear(8, 4).to(dtype)
        with torch.no_grad():
            linear.weight[2, 5] = value
        with pytest.raises(NonFiniteError, match=r"at \[2, 5\]; allowed: .*65504; FP16\('bfloat16'\)"):
            QLinear.from_float(linear, pyquant.FP16())
        if value == value:
            assert QLinear.from_float(linear, pyquant.FP16("bfloat16"))(torch.ones(1, 8)).isfinite().all()


def test_float32_inputs_of_a_16_bit_layer_keep_their_digits_and_range_on_a_cpu() -> None:
    draw = problems.Draw(problems.BASE_SEED, "float32 into 16 bits", 0)
    q = QLinear.from_float(nn.Linear(128, 24), pyquant.FP16())
    for x in (draw.normal(9, 128), torch.full((1, 128), 7e4), torch.full((1, 128), 1e-8)):
        magnitude = x.abs().double() @ q.codes.abs().double().t() + q.bias.abs().double()
        exact = x.double() @ q.codes.double().t() + q.bias.double()
        bound = 128 * 2.0**-24 * magnitude + exact.abs() * 2.0**-23  # docs/numerics.md 8
        assert bool(((q(x).double() - exact).abs() <= bound).all())
