"""PackedQTensor: what takes codes takes int4 ones two a byte too, on every device, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import pyquant
from pyquant import PackedQTensor, QLinear, QTensor, ops
from pyquant.core.scheme import TensorScheme
from pyquant.nn.chain import Dequantize, QResidual, QResidualAdd, Quantize

INT4 = TensorScheme(bits=4)
X = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a chip whose kernels read packed codes."""
    monkeypatch.setattr(ops, "packs_int4", lambda device, columns: columns % 32 == 0)
    return


def codes(scale: float = 0.4) -> tuple[QTensor, PackedQTensor]:
    plain = Quantize(scale, scheme=INT4)(X)
    return plain, PackedQTensor(ops.pack_int4(plain.data), plain.scale, plain.zero_point)


def layer(scheme: pyquant.QScheme, **more: object) -> QLinear:
    torch.manual_seed(2)
    return QLinear.from_float(nn.Linear(64, 32), scheme, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "taker",
    [
        Dequantize(),
        QResidual(0.4, scheme=INT4),
        layer(pyquant.W4A4(), input_scale=0.4),
        layer(pyquant.W4A4Dynamic()),
        layer(pyquant.W8A8(), input_scale=0.4),
        layer(pyquant.W4A8Dynamic(group_size=None)),
        QResidualAdd(layer(pyquant.W4A4(), input_scale=0.4)),
    ],
    ids=lambda taker: f"{type(taker).__name__} {getattr(taker, 'scheme', '')}",
)
def test_packed_codes_are_taken_as_the_others(taker: nn.Module) -> None:
    plain, packed = codes()
    more = (torch.randn(5, 32),) if isinstance(taker, QResidualAdd) else ()
    want, got = taker(plain, *more), taker(packed, *more)
    assert torch.equal(got, want)
    if isinstance(taker, QLinear):
        assert torch.equal(taker.reference(packed), want)


def test_a_scale_a_token_is_taken_packed() -> None:
    dynamic = layer(pyquant.W4A4Dynamic())
    plain = Quantize(scheme=pyquant.W4A4Dynamic().inputs)(X)
    packed = PackedQTensor(ops.pack_int4(plain.data), plain.scale, plain.zero_point)
    assert torch.equal(dynamic(packed), dynamic(plain))
    assert torch.equal(dynamic(packed), dynamic(X))


@pytest.mark.usefixtures("packs")
def test_where_kernels_read_them_so_codes_are_given_packed() -> None:
    given = Quantize(0.4, scheme=INT4)(X)
    assert type(given) is PackedQTensor
    assert given.data.shape == (5, 32)
    assert type(Quantize(0.4, scheme=INT4)(X[:, :40])) is QTensor
    linked = layer(pyquant.W4A4(), input_scale=0.4).with_outputs(INT4, torch.tensor([0.2]))
    for x in (X, given):
        y = linked(x)
        assert type(y) is PackedQTensor
        assert y.data.shape == (5, 16)
        assert torch.equal(Dequantize()(y), Dequantize()(linked.reference(x)))
    add = QResidualAdd(linked, activation="relu")
    y, residual = add(given, torch.randn(5, 32)), torch.zeros(1)
    assert type(y) is PackedQTensor
    assert float(Dequantize()(y).min()) >= residual.item()


@pytest.mark.usefixtures("packs")
def test_images_are_never_given_packed() -> None:
    conv = pyquant.QConv2d.from_float(nn.Conv2d(32, 32, 1), pyquant.W4A4(), input_scale=0.4)
    image = torch.randn(2, 32, 8, 32)
    given = Quantize(0.4, scheme=INT4)(image)
    assert type(given) is PackedQTensor
    assert torch.equal(conv(given), conv(image))


def test_packed_codes_of_another_width_are_refused() -> None:
    _, packed = codes()
    wrong = PackedQTensor(packed.data[:, :16], packed.scale, packed.zero_point)
    with pytest.raises(pyquant.ArgumentError, match="x"):
        layer(pyquant.W4A4(), input_scale=0.4)(wrong)


def test_a_compiled_chain_carries_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, packed = codes()
    take = layer(pyquant.W4A4(), input_scale=0.4)
    compiled = torch.compile(lambda x: take(x), backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(packed), take(plain))


def test_a_report_of_chains_counts_two_codes_a_byte(packs: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8)).eval()
    pyquant.quantize_(model, pyquant.W4A4(), input_scales={"0": 0.4, "1": 0.2, "3": 0.1})
    wide, odd, _ = pyquant.chain_report(model, X)
    assert (wide.state, wide.float_bytes, wide.code_bytes) == ("linkable", 5 * 64 * 4 * 2, 5 * 32 * 2)
    assert (odd.state, odd.code_bytes) == ("broken", 5 * 48 * 2)  # 48 columns are not packed here
    linked = pyquant.chain_report(pyquant.link_(model, X), X)[0]
    assert (linked.state, linked.elements, linked.code_bytes) == ("linked", 5 * 64, wide.code_bytes)
    int8 = pyquant.quantize_(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).eval(),
        pyquant.W4A8(group_size=None),
        input_scales={"0": 0.4, "1": 0.2},
    )
    assert pyquant.chain_report(int8, X)[0].code_bytes == 5 * 64 * 2
