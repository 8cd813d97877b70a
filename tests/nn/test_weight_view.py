"""layer.weight: a float tensor to look at, codes in memory, the dequantised numbers to compute with."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from qlayers import ALL, layer
from torch import Tensor, nn
from torch.nn import functional as F

import pyquant
from pyquant.core.presets import FP16, W4A16, W8A8, W4A8Dynamic, W8A8Dynamic
from pyquant.nn import weights
from pyquant.nn.weight_view import QWeight

SOME = [W8A8Dynamic(), W4A8Dynamic(16), W4A16(16), FP16()]


def convolution(scheme: pyquant.QScheme) -> pyquant.QConv2d:
    return pyquant.QConv2d.from_float(nn.Conv2d(8, 6, (2, 4), padding=1), scheme)


def embedding() -> pyquant.QEmbedding:
    return pyquant.QEmbedding.from_float(nn.Embedding(11, 8))


def layers() -> list[nn.Module]:
    return [*(layer(s) for s in ALL), *(convolution(s) for s in SOME), embedding()]


def refuse_to_dequantise(patch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the weight was dequantised")

    patch.setattr(weights, "dequantise_weight", refuse)
    patch.setattr(pyquant.ops, "unpack_linear", refuse)
    patch.setattr(pyquant.ops, "unpack_int4", refuse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_looks_like_the_weight_of_the_float_layer(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    made = [(q.to(dtype), q.codes.shape) for q in layers()]
    refuse_to_dequantise(monkeypatch)
    for q, matrix in made:
        w, want = q.weight, q.dtype
        assert isinstance(w, Tensor)
        assert not isinstance(w, nn.Parameter)
        assert (w.dtype, w.device.type, w.is_floating_point(), w.requires_grad) == (want, "cpu", True, False)
        shape = (6, 8, 2, 4) if isinstance(q, pyquant.QConv2d) else tuple(matrix)
        assert tuple(w.shape) == tuple(w.size()) == shape
        assert (w.dim(), w.ndim, w.numel(), w.is_contiguous()) == (len(shape), len(shape), matrix.numel(), True)
        assert w.stride() == torch.empty(shape).stride()
        assert w.nbytes == w.numel() * want.itemsize
        assert w.detach().dtype == w.data.dtype == want
        for move in (Tensor.half, Tensor.bfloat16, Tensor.cpu, lambda t: t.to("cpu", torch.float16), Tensor.float):
            assert type(move(w)) is type(w)
        assert w.half().dtype == torch.float16


def test_its_numbers_are_those_of_to_float() -> None:
    for q in layers():
        for dtype in (torch.float32, torch.bfloat16):
            q.to(dtype)
            w, real = q.weight, q.to_float(dtype).weight.detach()
            assert type(w.clone()) is Tensor
            for value in (w.clone(), w.contiguous().reshape(-1).reshape(w.shape), w + 0, torch.stack([w, w])[1]):
                assert torch.equal(value, real)
            assert torch.equal(w[3:5], real[3:5])
            assert torch.equal(w.half().clone(), real.half() if dtype == torch.float32 else w.half().clone())
            assert torch.equal(w.flatten(1).T.double(), real.flatten(1).T.double())
            assert torch.equal(w.to(torch.float64), real.double())
            assert w.to("meta").shape == real.shape
            assert float(w.abs().max()) == float(real.abs().max())
        q.float()
        w, real = q.weight, q.to_float().weight.detach()
        assert np.array_equal(w.numpy(), real.numpy())
        assert np.array_equal(np.asarray(w), real.numpy())
        assert w.tolist() == real.tolist()
        assert torch.equal(torch.from_dlpack(w), real)
        assert repr(real).removeprefix("tensor(")[:20] in repr(w)
        assert "codes" in repr(w) or "16-bit floats" in repr(w)
        assert "meta" in repr(w.to("meta"))


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_a_parent_may_multiply_by_it(scheme: pyquant.QScheme) -> None:
    q, x = layer(scheme), torch.randn(5, 32, requires_grad=True)
    real = q.to_float().weight.detach()
    for product in (
        lambda w: F.linear(x, w, q.bias),
        lambda w: torch.einsum("ik,ok->io", x, w),
        lambda w: x @ w.T,
        lambda w: torch.addmm(q.bias, x, w.t()),
        lambda w: F.linear(x, w[:12], q.bias[:12]),
        lambda w: F.linear(x, torch.cat([w, w])),
    ):
        got, want = product(q.weight), product(real)
        assert torch.equal(got, want)
        grad = torch.autograd.grad(got.sum(), x)[0]
        assert torch.equal(grad, torch.autograd.grad(want.sum(), x)[0])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_parent_of_sixteen_bits_may_use_weight_and_bias(dtype: torch.dtype, when: str) -> None:
    """Biases of layers are held in float32 whatever the type around; they show the type of the layer."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.conv = nn.Linear(32, 24), nn.Conv2d(2, 6, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            fc, conv, image = self.fc, self.conv, x.reshape(-1, 2, 4, 4)
            return (
                F.linear(x, fc.weight, fc.bias),
                F.linear(x, fc.weight, bias=fc.bias),
                torch.addmm(fc.bias, x, fc.weight.t()),
                torch.addmv(fc.bias, fc.weight, x[0]),
                torch.baddbmm(fc.bias.expand(2, 1, 24), x.expand(2, 3, 32), fc.weight.t().expand(2, 32, 24)),
                x @ fc.weight.T + fc.bias,
                torch.cat([fc.weight, fc.bias[:, None]], 1),
                F.conv2d(image, conv.weight, conv.bias, padding=1),
            )

    net, x = Net(), torch.randn(3, 32, dtype=dtype)
    want = net.to(dtype)(x)
    net = (
        pyquant.quantize_(net, pyquant.W8A8Dynamic())
        if when == "before"
        else (pyquant.quantize_(net.float(), pyquant.W8A8Dynamic()).to(dtype))
    )
    for y, real in zip(net(x), want, strict=True):
        assert y.dtype == dtype
        assert (y - real).norm() < 0.03 * real.norm()


def test_a_table_gives_the_rows_that_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    q, ids = embedding(), torch.tensor([[3, 0], [10, 3]])
    want = q.to_float().weight.detach()[ids]
    seen: list[int] = []
    dequantise = weights.dequantise_weight

    def count(codes: Tensor, *rest: Any) -> Tensor:
        seen.append(len(codes))
        return dequantise(codes, *rest)

    monkeypatch.setattr(weights, "dequantise_weight", count)
    assert torch.equal(F.embedding(ids, q.weight), want)
    assert seen == [4]


def test_writing_is_refused_and_changes_nothing() -> None:
    real = torch.zeros(24, 32)
    attempts: tuple[Callable[[Tensor], object], ...] = (
        Tensor.zero_,
        nn.init.normal_,
        lambda w: w.data.normal_(),
        lambda w: w.copy_(real),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: setattr(w, "data", real),
        lambda w: torch.add(real, real, out=w),
        lambda w: w.requires_grad_(),
        lambda w: torch._foreach_mul_([real.clone(), w], 2.0),
        lambda w: w.mul_(3),
        lambda w: w.mul_(-2),
        lambda w: w.div_(0),
        lambda w: w.mul_(torch.full((24, 1), 2.0)),
        lambda w: w.detach().mul_(2),
        lambda w: w.div_(2, rounding_mode="floor"),
    )
    for scheme in SOME:
        q = layer(scheme)
        before = q.to_float().weight.detach()
        for attempt in attempts:
            with pytest.raises(pyquant.UnsupportedError, match="held as codes and cannot be written"):
                attempt(q.weight)
        assert torch.equal(q.weight.clone(), before)


def test_what_reads_memory_past_python_finds_no_floats_there_and_says_so() -> None:
    """torch.utils.dlpack followed a null pointer."""
    q, other = layer(W8A8Dynamic()), layer(W8A8Dynamic())
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(q.weight)
    assert torch.equal(torch.from_dlpack(q.weight), q.weight.dequantize())
    assert q.weight.data_ptr() == q.weight.detach().data_ptr() == q.weight.untyped_storage().data_ptr() != 0
    assert q.weight.data_ptr() != other.weight.data_ptr()


def test_a_power_of_two_in_place_goes_into_the_scales() -> None:
    for q in layers():
        x = torch.randint(11, (3,)) if isinstance(q, pyquant.QEmbedding) else None
        if x is None:
            x = torch.randn(2, 8, 9, 9) if isinstance(q, pyquant.QConv2d) else torch.randn(3, q.in_features)
        real, codes, bias, twin = q.weight.clone(), q.codes.clone(), getattr(q, "bias", None), copy.deepcopy(q)
        shown = q.weight
        assert shown.div_(4) is shown
        atol = 2.0**-25 if q.storage.dtype == torch.float16 else 0.0  # they round as floats of 16 bits do
        torch.testing.assert_close(shown.clone(), real / 4, rtol=0, atol=atol)
        torch.testing.assert_close(q.weight.clone(), real / 4, rtol=0, atol=atol)
        if "weight_scale" in twin.state_dict():
            assert torch.equal(q.codes, codes)
            twin.load_state_dict(twin.state_dict() | {"weight_scale": twin.weight_scale / 4})
            assert torch.equal(q(x), twin(x))
        if bias is not None:
            assert torch.equal(q.bias, bias)
        q.weight *= torch.tensor(8.0)
        torch.testing.assert_close(q.weight.clone(), real * 2, rtol=0, atol=8 * atol)


def test_a_scale_that_would_round_is_left() -> None:
    q = layer(W8A8Dynamic())
    before = q.weight.clone()
    with pytest.raises(pyquant.UnsupportedError, match="cannot be written"):
        q.weight.mul_(2.0**-126)
    assert torch.equal(q.weight.clone(), before)


def test_copies_and_files() -> None:
    for q in layers():
        w, real = q.weight, q.to_float().weight.detach()
        twin = copy.deepcopy(w)
        assert type(twin) is type(w)
        assert torch.equal(twin.clone(), real)
        file = io.BytesIO()
        torch.save({"w": w}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)["w"]
        assert type(loaded) is Tensor
        assert torch.equal(loaded, real)
        again = copy.deepcopy(nn.Sequential(q))[0]
        assert torch.equal(again.weight.clone(), real)
        assert again.codes.data_ptr() != q.codes.data_ptr()


@pytest.mark.parametrize("scheme", [*SOME, W8A8()], ids=str)
def test_it_is_never_stale_and_holds_nothing_back(scheme: pyquant.QScheme) -> None:
    q, other = layer(scheme), layer(scheme)
    with torch.no_grad():
        other = pyquant.QLinear.from_float(
            nn.Linear(32, 24), scheme, **({"input_scale": 0.1} if scheme.is_static else {})
        )
    held, new = q.weight, other.to_float().weight
    q.load_state_dict(other.state_dict())
    assert torch.equal(q.weight.clone(), new)
    assert torch.equal(held.clone(), new)  # as a Parameter that someone holds
    q.weight_scale = None if scheme.is_float else q.weight_scale * 2
    assert torch.equal(q.weight.clone(), q.to_float().weight)
    ref = weakref.ref(q)
    gc.disable()
    try:
        _, w = q.weight.clone(), q.weight
        del q
        assert ref() is None  # no cycle: the layer went without a collection
        assert w.numel() == 24 * 32
    finally:
        gc.enable()


def test_it_takes_codes_by_assignment() -> None:
    for scheme in (W8A8Dynamic(), W4A8Dynamic(16), FP16()):
        q, other, x = layer(scheme), pyquant.QLinear.from_float(nn.Linear(32, 24), scheme), torch.randn(3, 32)
        other.bias = q.bias
        q.weight = other.weight
        assert torch.equal(q(x), other(x))
        name = "weight_packed" if scheme.weights.bits == 4 and not scheme.is_float else "weight"
        setattr(q, name, torch.zeros_like(other.state_dict()[name]))
        assert not bool(q.weight.any())
        for wrong in (nn.Linear(32, 24).weight, "x", layer(W8A8Dynamic(), 16, 24).weight, layer(W4A16(8)).weight):
            with pytest.raises(pyquant.ArgumentError, match="weight"):
                q.weight = wrong
    table, new = embedding(), embedding()
    table.weight = new.weight
    assert torch.equal(table.weight.clone(), new.to_float().weight)
    with pytest.raises(pyquant.ArgumentError, match=r"argument 'weight': got float32 .11, 8.*int8 .11, 8"):
        table.weight = nn.Embedding(11, 8).weight


def test_hasattr_and_getmembers() -> None:
    for q in layers():
        members = dict(inspect.getmembers(q))
        assert "weight" in members
        four_bits = isinstance(q, pyquant.QLinear | pyquant.QConv2d) and "weight_packed" in q.state_slots
        assert hasattr(q, "weight_packed") == ("weight_packed" in members) == four_bits
        for name in dir(q):
            hasattr(q, name)  # raises nothing


def test_the_files_keep_their_keys() -> None:
    assert {n: t.dtype for n, t in embedding().state_dict().items()} == {
        "weight": torch.int8,
        "weight_scale": torch.float32,
    }
    state = layer(W8A8Dynamic()).state_dict()
    assert not isinstance(state["weight"], QWeight)
    assert state["weight"].dtype == torch.int8


def test_reading_it_while_a_graph_is_recorded() -> None:
    class Reads(nn.Module):
        def __init__(self, scheme: pyquant.QScheme) -> None:
            super().__init__()
            self.inner = layer(scheme)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x.to(self.inner.weight.dtype))
            return y + F.linear(x, self.inner.weight, self.inner.bias)

    x = torch.randn(3, 32)
    for scheme in (W8A8Dynamic(), W4A16(16)):
        model = Reads(scheme)
        want = model(x)
        exported = torch.export.export(model, (x,))
        assert torch.equal(exported.module()(x), want)
        traced = torch.jit.trace(model, (x,))
        assert torch.equal(traced(x), want)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), want)
