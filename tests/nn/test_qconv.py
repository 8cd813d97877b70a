"""QConv2d: equal bits with an int64 reference that knows nothing of our gather, over random geometry."""

from __future__ import annotations

import random
from typing import Any

import problems
import pytest
import torch
from qlayers import ALL, CODES_OUT, INTEGER, calibration
from torch import Tensor, nn
from torch.nn import functional as F

import pyquant
from pyquant import numerics
from pyquant.core.patches import Patches
from pyquant.core.presets import FP16, W4A8, W4A16, W8A8, W8A16, W8A8Dynamic
from pyquant.core.qtensor import QTensor
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, SchemeError
from pyquant.nn.qconv import QConv2d

AFFINE = W8A8(symmetric_inputs=False)
IDS = [str(s) for s in ALL]


def conv(seed: int, channels: int, out: int, **geometry: Any) -> nn.Conv2d:
    torch.manual_seed(seed)
    return nn.Conv2d(channels, out, **geometry)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, QTensor):
        return torch.equal(a.data, b.data) and torch.equal(a.scale, b.scale)
    return a.dtype == b.dtype and torch.equal(a, b)


def brute(layer: QConv2d, codes: Tensor, zero_point: int) -> Tensor:
    """int64 accumulators [B, N, H', W'] by the definition of a convolution: six loops, real zero outside."""
    p, (batch, channels, height, width) = layer.patches, codes.shape
    weight = layer.codes.to(torch.int64).reshape(p.groups, -1, *p.kernel_size, channels // p.groups)
    out_h, out_w = p.out_size(height, width)
    y = torch.zeros(batch, layer.out_channels, out_h, out_w, dtype=torch.int64)
    real = (codes.to(torch.int64) - zero_point).reshape(batch, p.groups, channels // p.groups, height, width)
    for i in range(out_h):
        for j in range(out_w):
            for a in range(p.kernel_size[0]):
                for b in range(p.kernel_size[1]):
                    row = i * p.stride[0] + a * p.dilation[0] - p.padding[0]
                    column = j * p.stride[1] + b * p.dilation[1] - p.padding[2]
                    if 0 <= row < height and 0 <= column < width:
                        sums = torch.einsum("bgc,gnc->bgn", real[..., row, column], weight[:, :, a, b])
                        y[:, :, i, j] += sums.flatten(1)
    return y


def geometries(count: int) -> list[dict[str, Any]]:
    rng = random.Random(problems.BASE_SEED)
    found = []
    for _ in range(count):
        kernel = (rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3, 5]))
        found.append(
            {
                "kernel_size": kernel,
                "stride": (rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2])),
                "padding": (rng.randint(0, kernel[0]), rng.randint(0, kernel[1])),
                "dilation": (rng.choice([1, 1, 2]), rng.choice([1, 1, 3])),
            }
        )
    return found


@pytest.mark.parametrize("seed", range(12))
def test_the_accumulator_is_exact(seed: int) -> None:
    """Scales of 1 and no bias: the float32 result is the int64 sum itself, below 2^24."""
    rng = random.Random(problems.BASE_SEED + seed)
    geometry = geometries(seed + 1)[-1]
    channels, out, batch = rng.randint(1, 9), rng.choice([rng.randint(1, 17), 40, 133]), rng.randint(1, 3)
    size = (rng.randint(7, 13), rng.randint(13, 17))
    p = Patches.make(**geometry)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (out, channels * p.pixels), generator=generator, dtype=torch.int8)
    zero_point = rng.randint(-128, 127)
    layer = QConv2d.from_codes(
        codes, torch.ones(out), patches=p, scheme=AFFINE, input_scale=1.0, input_zero_point=zero_point
    )
    x = torch.randint(-128, 128, (batch, channels, *size), generator=generator, dtype=torch.int8)
    expected = brute(layer, x, zero_point)
    given = QTensor(x, torch.ones(1), torch.tensor([zero_point], dtype=torch.int32))
    assert torch.equal(layer(given).to(torch.int64), expected)
    real = (x.double() - zero_point).float()  # the same numbers as floats
    assert torch.equal(layer(real).to(torch.int64), expected)


def grouped(rng: random.Random) -> tuple[int, int, int]:
    """Channels, output channels and groups: depthwise with one result a channel or several, groups of every width."""
    groups = rng.choice([2, 3, 5, 16, 24, 40, 72])
    channels = rng.choice([1, 1, 1, 2, 3, 4, 6, 8, 36])
    each = rng.choice([1, 1, 2, 3, 4, 8, 16, 33])
    while groups * max(channels, each) > 400:
        groups = max(groups // 2, 2)
    return groups * channels, groups * each, groups


@pytest.mark.parametrize("seed", range(16))
def test_the_accumulator_of_groups_is_exact(seed: int) -> None:
    rng = random.Random(problems.BASE_SEED + 100 + seed)
    channels, out, groups = grouped(rng)
    size = (rng.randint(7, 13), rng.randint(13, 17) if seed % 4 else rng.randint(90, 110))
    p = Patches.make(**geometries(seed + 1)[-1], groups=groups)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (out, channels // groups * p.pixels), generator=generator, dtype=torch.int8)
    zero_point = rng.randint(-128, 127)
    layer = QConv2d.from_codes(
        codes, torch.ones(out), patches=p, scheme=AFFINE, input_scale=1.0, input_zero_point=zero_point
    )
    x = torch.randint(-128, 128, (2, channels, *size), generator=generator, dtype=torch.int8)
    expected = brute(layer, x, zero_point)
    given = QTensor(x, torch.ones(1), torch.tensor([zero_point], dtype=torch.int32))
    assert torch.equal(layer(given).to(torch.int64), expected)
    real = (x.double() - zero_point).float().to(memory_format=torch.channels_last)
    assert torch.equal(layer(real).to(torch.int64), expected)


@pytest.mark.parametrize("scheme", ALL, ids=IDS)
@pytest.mark.parametrize(("channels", "out", "groups"), [(16, 16, 16), (70, 70, 70), (32, 24, 2), (9, 18, 3)])
def test_every_scheme_in_groups_equals_its_reference(scheme: QScheme, channels: int, out: int, groups: int) -> None:
    size = scheme.weights.group_size
    kernel = (4, 4) if size else (3, 2)
    if size and channels // groups * 16 % size:
        pytest.skip("the group size does not divide K")
    floats = conv(3, channels, out, kernel_size=kernel, stride=(2, 1), padding=(1, 2), groups=groups)
    layer = QConv2d.from_float(floats, scheme, **calibration(scheme))
    x = torch.randn(2, channels, 9, 11)
    residual = torch.randn_like(layer(x).float())
    for given in (None, residual):
        for image in (x, x.to(memory_format=torch.channels_last)):
            y, wanted = layer(image, given), layer.reference(x, given)
            if scheme.is_integer:
                assert same(y, wanted)
            else:
                torch.testing.assert_close(y, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scheme", [AFFINE, W8A8Dynamic(), W8A8Dynamic(symmetric_inputs=False)], ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "clamp"])
@pytest.mark.parametrize("channels", [32, 65])
def test_epilogues_of_groups(scheme: QScheme, activation: str, channels: int) -> None:
    clamp = (-0.25, 0.5) if activation == "clamp" else None
    floats = conv(1, channels, channels, kernel_size=3, padding=1, groups=channels)
    layer = QConv2d.from_float(floats, scheme, activation=activation, clamp=clamp, **calibration(scheme))
    x, residual = torch.randn(2, channels, 6, 5), torch.randn(2, channels, 6, 5)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        given = (x.to(dtype), residual.to(dtype))
        assert same(layer(*given), layer.reference(*given))
        last = [t.to(memory_format=torch.channels_last) for t in given]
        assert same(layer(*last), layer.reference(*given))


def test_codes_of_groups_with_zero_points_of_their_own() -> None:
    """Also ones that a symmetric layer could not have made."""
    for symmetric in (True, False):
        floats = conv(4, 12, 12, kernel_size=3, padding=2, groups=12)
        layer = QConv2d.from_float(floats, W8A8Dynamic(symmetric_inputs=symmetric))
        codes = torch.randint(0, 256, (3, 12, 6, 6), dtype=torch.uint8)
        given = QTensor(codes, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([3, 128, 250], dtype=torch.int32))
        assert same(layer(given), layer.reference(given))


def test_a_layer_in_groups_goes_everywhere_a_layer_goes() -> None:
    floats = conv(9, 12, 24, kernel_size=3, stride=2, padding=1, groups=6)
    layer = QConv2d.from_float(floats, W8A8Dynamic())
    x = torch.randn(2, 12, 8, 8)
    assert layer.weight.shape == floats.weight.shape == (24, 2, 3, 3)
    assert "groups=6" in str(layer)
    back = layer.to_float()
    assert back.groups == 6
    assert (back.weight - floats.weight).abs().max() < floats.weight.abs().max() / 127
    wanted = floats(x)
    assert (layer(x) - wanted).norm() / wanted.norm() < 0.02
    twin = QConv2d(12, 24, 3, 2, 1, groups=6)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))
    given = x.clone().requires_grad_()
    up = torch.randn_like(wanted)
    layer(given).backward(up)
    plain = x.clone().requires_grad_()
    back(plain).backward(up)
    torch.testing.assert_close(given.grad, plain.grad, rtol=1e-4, atol=1e-5)
    poisoned = x.clone()
    poisoned[1, 3, 2, 2] = float("inf")
    assert layer(poisoned)[1].isnan().all()
    assert torch.equal(layer(poisoned)[0], layer(x)[0])
    assert layer(torch.zeros(0, 12, 8, 8)).shape == (0, 24, 4, 4)


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ArgumentError, match="'groups'"):
        QConv2d(12, 10, 3, groups=4)
    with pytest.raises(ArgumentError, match="groups"):
        QConv2d(12, 10, 3, groups=0)
    codes = torch.ones(10, 9, dtype=torch.int8)
    with pytest.raises(ArgumentError, match="'patches'"):
        QConv2d.from_codes(codes, torch.ones(10), patches=Patches((3, 3), groups=4), scheme=W8A8Dynamic())


@pytest.mark.parametrize("scheme", ALL, ids=IDS)
def test_every_scheme_equals_its_reference(scheme: QScheme) -> None:
    for number, geometry in enumerate(geometries(3) + [{"kernel_size": 1}, {"kernel_size": 1, "stride": 2}]):
        channels = 16 if scheme.weights.group_size else 5
        layer = QConv2d.from_float(conv(number, channels, 6, **geometry), scheme, **calibration(scheme))
        x = torch.randn(2, channels, 14, 15)
        residual = torch.randn_like(layer(x).float())
        for given in (None, residual):
            y, wanted = layer(x, given), layer.reference(x, given)
            if scheme.is_integer:
                assert same(y, wanted)
            else:
                torch.testing.assert_close(y, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("scheme", [AFFINE, W8A8Dynamic(), W8A8Dynamic(symmetric_inputs=False)], ids=str)
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "clamp"])
def test_epilogues(scheme: QScheme, activation: str) -> None:
    clamp = (-0.25, 0.5) if activation == "clamp" else None
    floats = conv(1, 3, 7, kernel_size=3, padding=1)
    layer = QConv2d.from_float(floats, scheme, activation=activation, clamp=clamp, **calibration(scheme))
    x, residual = torch.randn(2, 3, 6, 5), torch.randn(2, 7, 6, 5)
    assert same(layer(x, residual), layer.reference(x, residual))
    for dtype in (torch.float16, torch.bfloat16):
        assert same(layer(x.to(dtype), residual.to(dtype)), layer.reference(x.to(dtype), residual.to(dtype)))


@pytest.mark.parametrize("scheme", CODES_OUT, ids=str)
def test_codes_out_and_in(scheme: QScheme) -> None:
    layer = QConv2d.from_float(conv(2, 16, 8, kernel_size=2, padding=1), scheme, **calibration(scheme))
    x = torch.randn(2, 16, 5, 5)
    y, wanted = layer(x), layer.reference(x)
    assert isinstance(y, QTensor)
    assert same(y, wanted)
    if y.zero_point is not None or scheme.outputs.bits == 4:  # type: ignore[union-attr]
        return
    after = QConv2d.from_float(conv(3, 8, 4, kernel_size=3), W8A8(), input_scale=y.scale)
    assert same(after(y), after.reference(y))
    real = numerics.dequantize(y.data, y.scale)
    assert same(after(y), after(real))


def test_uint8_codes_and_codes_of_images_with_scales_of_their_own() -> None:
    layer = QConv2d.from_float(conv(4, 3, 5, kernel_size=3, padding=2), W8A8Dynamic())
    codes = torch.randint(0, 256, (3, 3, 6, 6), dtype=torch.uint8)
    given = QTensor(codes, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([3, 128, 250], dtype=torch.int32))
    assert same(layer(given), layer.reference(given))
    one = QTensor(codes[:1], torch.tensor([0.1]), torch.tensor([3], dtype=torch.int32))
    assert torch.equal(layer(one)[0], layer(given)[0])


@pytest.mark.parametrize("symmetric", [True, False])
def test_dynamic_convolutions_lay_their_weights_out_once(symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = QConv2d.from_float(conv(4, 3, 5, kernel_size=3, padding=2), W8A8Dynamic(symmetric_inputs=symmetric))
    x = torch.randn(2, 3, 7, 6)
    want, laid = layer.reference(x), []
    monkeypatch.setattr(QConv2d, "_canonical", lambda self: laid.append(self))
    assert same(layer(x), want)
    assert not laid


@pytest.mark.parametrize("scheme", [AFFINE, W8A8Dynamic(symmetric_inputs=False)], ids=str)
def test_memory_formats_and_batches_give_equal_bits(scheme: QScheme) -> None:
    layer = QConv2d.from_float(conv(5, 4, 6, kernel_size=3, stride=2, padding=1), scheme, **calibration(scheme))
    x = torch.randn(3, 4, 9, 7)
    y, last = layer(x), layer(x.to(memory_format=torch.channels_last))
    assert y.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert not last.is_contiguous()
    assert torch.equal(y, last)
    wide = torch.randn(3, 4, 9, 14)
    wide[..., ::2] = x
    assert torch.equal(layer(wide[..., ::2]), y)
    for i in range(3):
        assert torch.equal(layer(x[i : i + 1])[0], y[i])
        assert torch.equal(layer(x[i]), y[i])


@pytest.mark.parametrize("scheme", [AFFINE, W8A8Dynamic(), *ALL[-2:]], ids=str)
@pytest.mark.parametrize("shape", [(0, 3, 5, 5), (2, 0, 5, 5), (2, 3, 0, 5)])
def test_zero_sizes(scheme: QScheme, shape: tuple[int, ...]) -> None:
    with pytest.warns(UserWarning, match="zero-element") if shape[1] == 0 else _nothing():
        floats = nn.Conv2d(shape[1], 4, 3, padding=2)
    layer = QConv2d.from_float(floats, scheme, **calibration(scheme))
    y = layer(torch.randn(shape))
    assert list(y.shape) == [shape[0], 4, shape[2] + 2, shape[3] + 2]
    if shape[0]:  # nothing is multiplied: the bias alone
        bias = floats.bias.detach().to(y.dtype)  # type: ignore[union-attr]
        if scheme.is_integer:
            assert torch.equal(y, bias.reshape(1, 4, 1, 1).expand_as(y))
    none = QConv2d.from_float(_without_outputs(), W8A8Dynamic())
    assert none(torch.randn(2, 3, 5, 5), torch.randn(2, 0, 3, 3)).shape == (2, 0, 3, 3)


def _without_outputs() -> nn.Conv2d:
    made = nn.Conv2d(3, 1, 3)
    made.weight, made.bias = nn.Parameter(torch.zeros(0, 3, 3, 3)), nn.Parameter(torch.zeros(0))
    made.out_channels = 0
    return made


class _nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


def test_a_poisoned_image_poisons_itself_alone() -> None:
    layer = QConv2d.from_float(conv(6, 2, 3, kernel_size=3, padding=1), W8A8Dynamic())
    x = torch.randn(3, 2, 4, 4)
    clean = layer(x)
    x[1, 0, 2, 2] = float("nan")
    y = layer(x)
    assert y[1].isnan().all()
    assert torch.equal(y[0], clean[0])
    assert torch.equal(y[2], clean[2])


def test_it_is_close_to_the_float_convolution() -> None:
    floats = conv(7, 8, 16, kernel_size=3, padding=1)
    x = torch.randn(2, 8, 10, 10)
    y = QConv2d.from_float(floats, W8A8Dynamic())(x)
    wanted = floats(x)
    assert (y - wanted).norm() / wanted.norm() < 0.02


@pytest.mark.parametrize("padding", ["same", "valid", 2, (1, 0)])
def test_padding_and_the_way_back(padding: Any) -> None:
    floats = conv(8, 3, 4, kernel_size=(4, 3), padding=padding, dilation=(1, 2))
    layer = QConv2d.from_float(floats, W8A8Dynamic())
    back = layer.to_float()
    assert back.padding == (padding if padding == "same" else layer.patches.float_padding())
    x = torch.randn(1, 3, 12, 12)
    assert back(x).shape == floats(x).shape
    again = QConv2d.from_float(back, W8A8Dynamic())
    assert torch.equal(again.codes, layer.codes)
    assert (back.weight - floats.weight).abs().max() < floats.weight.abs().max() / 127


def test_it_has_the_names_that_models_read_of_a_convolution() -> None:
    """MobileNet of transformers pads images itself, by the stride and the kernel of each of its convolutions."""
    floats = conv(8, 4, 8, kernel_size=(4, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2)
    layer = QConv2d.from_float(floats, W8A8Dynamic())
    names = [*nn.Conv2d.__constants__, "in_channels", "out_channels", "padding"]
    told = {name: getattr(layer, name) for name in names if name != "output_padding"}
    assert told == {name: getattr(floats, name) for name in told}
    uneven = QConv2d.from_float(conv(9, 4, 8, kernel_size=4, padding="same"), W8A8Dynamic())
    assert uneven.padding == uneven.patches.padding == (1, 2, 1, 2)
    assert not hasattr(layer, "output_padding")  # of transposed convolutions


def test_state_dict_round_trip() -> None:
    for scheme in (AFFINE, W8A8Dynamic(), W4A8(9), CODES_OUT[1], ALL[-1]):
        layer = QConv2d.from_float(
            conv(9, 4, 6, kernel_size=3, padding=1)
            if scheme.weights.group_size != 16
            else conv(9, 16, 6, kernel_size=3, padding=1),
            scheme,
            **calibration(scheme),
        )
        twin = QConv2d(layer.in_channels, 6, 3, padding=1, scheme=scheme)
        assert twin.load_state_dict(layer.state_dict()).missing_keys == []
        x = torch.randn(2, layer.in_channels, 6, 6)
        assert same(twin(x), layer(x))
        assert twin.state_dict().keys() == layer.state_dict().keys()
    half = QConv2d.from_float(conv(9, 4, 6, kernel_size=3), AFFINE, input_scale=0.1, input_zero_point=3).half()
    assert half.weight_scale.dtype == torch.float32
    assert half(torch.randn(1, 4, 5, 5).half()).dtype == torch.float16


@pytest.mark.parametrize("scheme", [AFFINE, W8A8Dynamic(), ALL[-3]], ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_gradients(scheme: QScheme, activation: str | None) -> None:
    """Those of the float convolution with the dequantised weights at the real input; clipped elements get none."""
    channels = 16 if scheme.weights.group_size else 3
    floats = conv(10, channels, 5, kernel_size=3, stride=2, padding=1)
    layer = QConv2d.from_float(floats, scheme, activation=activation, **calibration(scheme))
    x = (2 * torch.randn(2, channels, 7, 7)).requires_grad_()
    residual = torch.randn(2, 5, 4, 4, requires_grad=True)
    up = torch.randn(2, 5, 4, 4)
    layer(x, residual).backward(up)
    plain = x.detach().clone().requires_grad_()
    y = F.conv2d(plain, layer.to_float(torch.float32).weight, layer.bias, 2, 1)
    y = {"relu": F.relu, "gelu": F.gelu}.get(activation or "", lambda t: t)(y)
    y.backward(up)
    expected = plain.grad
    if scheme.is_static:
        low, high = (layer.input_scale * (q - layer.input_zero_point) for q in (-128, 127))
        inside = (x >= low) & (x <= high)
        assert not inside.all()
        expected = expected * inside
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5 if scheme.is_integer else 1e-2)
    assert torch.equal(residual.grad, up)


def test_bad_input_is_named() -> None:
    layer = QConv2d.from_float(conv(11, 3, 4, kernel_size=3), AFFINE, input_scale=0.1, input_zero_point=0)
    cases: list[tuple[Any, Any, str]] = [
        (torch.randn(1, 4, 5, 5), None, r"'x'.*\[B, 3, H, W\]"),
        (torch.randn(3, 5), None, "'x'"),
        (torch.randint(0, 3, (1, 3, 5, 5)), None, "'x'"),
        (torch.randn(1, 3, 2, 5), None, "image of 2 x 5"),
        (torch.randn(1, 3, 5, 5), torch.randn(1, 4, 3, 2), "'residual'"),
        (QTensor(torch.zeros(1, 3, 5, 5, dtype=torch.int8), torch.tensor([0.2])), None, "codes of scale"),
        ("an image", None, "'x'"),
    ]
    for x, residual, match in cases:
        with pytest.raises(ArgumentError, match=match):
            layer(x, residual)
    reflecting = nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")
    for floats, match in ((reflecting, "padding_mode='reflect'"),):
        with pytest.raises(ArgumentError, match=match):
            QConv2d.from_float(floats, W8A8Dynamic())
    with pytest.raises(SchemeError, match="group_size"):
        QConv2d.from_float(nn.Conv2d(3, 4, 3), W4A8(16), input_scale=1.0)
    for arguments, match in (
        ({"kernel_size": 0}, "kernel_size"),
        ({"kernel_size": 3, "stride": (1, 2, 3)}, "stride"),
        ({"kernel_size": 3, "padding": -1}, "padding"),
        ({"kernel_size": 3, "padding": "same", "stride": 2}, "same"),
    ):
        with pytest.raises(ArgumentError, match=match):
            QConv2d(3, 4, **arguments)


def test_planted_bugs_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather that pads with code 0 instead of the zero point, or mixes up the order of a row, changes the bits.

    Codes with a zero point that a symmetric layer could not have made are gathered; all others are read in place, whose
    bugs are in tests/csrc/planted_conv.py."""
    layer = QConv2d.from_float(conv(12, 3, 4, kernel_size=(2, 3), padding=1), W8A8Dynamic())
    codes = torch.randint(-128, 128, (1, 3, 5, 5), dtype=torch.int8)
    x = QTensor(codes, torch.ones(1), torch.tensor([7], dtype=torch.int32))
    assert same(layer(x), layer.reference(x))
    gather = Patches.gather
    monkeypatch.setattr(Patches, "gather", lambda self, image, fill=None: gather(self, image, None))
    assert not same(layer(x), layer.reference(x))
    monkeypatch.setattr(
        Patches,
        "gather",
        lambda self, image, fill=None: gather(self, image, fill).reshape(-1, 6, 3).transpose(1, 2).reshape(-1, 18),
    )
    assert not same(layer(x), layer.reference(x))


def test_it_compiles_without_graph_breaks() -> None:
    layer = QConv2d.from_float(conv(13, 3, 4, kernel_size=3, padding=1), AFFINE, **calibration(AFFINE))
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), layer(x))


def test_integer_schemes_are_all_covered() -> None:
    assert len(INTEGER) >= 12
    assert pyquant.QConv2d is QConv2d


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("scheme", [W8A16(), W4A16(group_size=None), FP16(), W8A8Dynamic()], ids=str)
def test_derivatives_of_transforms_are_those_of_backward(scheme: QScheme, groups: int) -> None:
    layer = QConv2d.from_float(conv(11, 8, 4, kernel_size=3, groups=groups), scheme, activation="relu")
    x = torch.randn(2, 8, 5, 5)
    own = x.clone().requires_grad_()
    layer(own).sum().backward()
    for found in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        got = found(lambda t: layer(t).sum())(x)
        torch.testing.assert_close(got, own.grad, rtol=1e-4, atol=1e-2)
