"""Layers on ranks: each share and each sum against the whole layer, on the same numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accept
import pytest
import qlayers
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import pyquant
from pyquant import W8A16, QEmbedding, QLinear, QScheme, QTensor, W4A8Dynamic, W8A8Dynamic
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.integrations.distributed import PyquantColwise, PyquantRowwise, gather_quantized_
from pyquant.integrations.distributed.layouts import bounds
from pyquant.integrations.distributed.rowwise import sums_are_exact
from pyquant.integrations.onnx import exchange as onnx_forms
from pyquant.integrations.peft import refusals as peft_refusals
from pyquant.nn.experts import QExperts
from pyquant.nn.hadamard_linear import HadamardLinear
from pyquant.nn.reordered import Reordered

N, K = 50, 128  # outputs that no number of ranks divides; inputs whose groups of 16 lie on one rank each
SHAPES = (((3, 5, K), torch.float32), ((1, K), torch.bfloat16), ((K,), torch.float16), ((0, K), torch.float32))
ACTIVATIONS: list[dict[str, Any]] = [
    {},
    {"activation": "relu"},
    {"activation": "gelu"},
    {"activation": "silu"},
    {"activation": "clamp", "clamp": (-0.5, 0.75)},
]


def mesh_of(world: int) -> Any:
    return init_device_mesh("cpu", (world,))


def layer_of(scheme: QScheme, seed: int = 0, n: int = N, k: int = K, bias: bool = True, **words: Any) -> QLinear:
    torch.manual_seed(seed)
    linear = nn.Linear(k, n, bias)
    with torch.no_grad():
        linear.weight[:, k // 2 :] *= 3  # the halves of a row have other ranges, and other largest steps
    return QLinear.from_float(linear, scheme, **qlayers.calibration(scheme), **words)


def rows_of(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if len(shape) == 3 and shape[-1] > 4:
        x[0, ..., 0] += 9  # the largest of these rows lie on the first rank, of those on the last
        x[-1, ..., -1] -= 7
    return x.to(dtype)


def part(x: Tensor, world: int, rank: int, dim: int = -1) -> Tensor:
    begin, end = bounds(x.shape[dim], world, rank)
    return x.narrow(dim, begin, end - begin).contiguous()


def near(got: Tensor, want: Tensor, layer: QLinear, x: Tensor, terms: int) -> None:
    """docs/distributed.md: terms * 2^-22 times the sum of the magnitudes, and the rounding of the result."""
    magnitude = x.float().abs() @ layer.dequantised_weight().abs().t() + 1
    limit = terms * 2.0**-22 * magnitude + torch.finfo(got.dtype).eps * want.float().abs()
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert bool(((got.float() - want.float()).abs() <= limit).all()), (got.float() - want.float()).abs().max()


def agree(got: Tensor, want: Tensor, layer: QLinear, x: Tensor, exact: bool) -> None:
    if exact:
        accept.t1(got, want, waiver="a share, or clamped")
    else:
        grouped = layer.scheme.is_integer
        near(got, want, layer, x, K // 16 if grouped else K)


def colwise(scheme: QScheme, words: dict[str, Any], rank: int, world: int, folder: Path) -> None:
    whole = layer_of(scheme, **words)
    model = nn.Sequential(copy.deepcopy(whole))
    parallelize_module(model, mesh_of(world), {"0": PyquantColwise()})
    for shape, dtype in SHAPES:
        x = rows_of(1, *shape, dtype=dtype)
        begin, end = bounds(N, world, rank)
        want = whole(x)
        agree(model(x), want[..., begin:end].contiguous(), Rows(whole, begin, end), x, scheme.is_integer)
        residual = rows_of(2, *shape[:-1], N)
        want = whole(x, residual)[..., begin:end].contiguous()
        agree(model[0](x, residual[..., begin:end]), want, Rows(whole, begin, end), x, scheme.is_integer)


class Rows:
    """Some outputs of a layer, for bounds."""

    def __init__(self, layer: QLinear, begin: int, end: int) -> None:
        self.scheme, self._weight = layer.scheme, layer.dequantised_weight()[begin:end]

    def dequantised_weight(self) -> Tensor:
        return self._weight


def rowwise(scheme: QScheme, words: dict[str, Any], rank: int, world: int, folder: Path) -> None:
    whole = layer_of(scheme, **words)
    model = nn.Sequential(copy.deepcopy(whole))
    parallelize_module(model, mesh_of(world), {"0": PyquantRowwise()})
    for shape, dtype in SHAPES:
        x, exact = rows_of(1, *shape, dtype=dtype), sums_are_exact(scheme)
        agree(model(part(x, world, rank)), whole(x), whole, x, exact)
        residual = rows_of(2, *shape[:-1], N)
        agree(model[0](part(x, world, rank), residual), whole(x, residual), whole, x, exact)
        assert ("int32 sums, exact" in repr(model)) is exact
        assert ("float32 sums" in repr(model)) is not exact
        assert bool(pyquant.quantization_report(model)[0].reason) is (scheme.is_integer and not exact)


class Called(TorchDispatchMode):
    """What a call costs: ops of pyquant, exchanges between ranks, and ops on as many numbers as the result has."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers, self.ours, self.passes = numbers, list[str](), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).partition(".default")[0]
        if name.startswith(("pyquant.", "c10d.")):
            self.ours.append(name.removeprefix("pyquant."))
        elif isinstance(out, Tensor) and out.numel() == self.numbers:
            same = any(isinstance(a, Tensor) and a.data_ptr() == out.data_ptr() for a in args)  # a view
            self.passes += [] if same else [name]
        return out


@torch.no_grad()
def passes(rank: int, world: int, folder: Path) -> None:
    """One quantising pass, one product that stops at its accumulators, one sum, one pass of the epilogue; nothing is
    packed, and no other pass goes over the results."""
    ranges, sums = ["c10d.allreduce_", "quantize_dynamic", "quantize"], ["qlinear", "c10d.allreduce_", "qlinear"]
    want = {
        W8A8Dynamic(): ranges + sums,
        W8A8Dynamic(symmetric_inputs=False): ranges + sums,
        W4A8Dynamic(None): ranges + sums,
        pyquant.W4A8TwoLevelDynamic(16): ranges + sums,
        pyquant.W8A8(): sums,
        pyquant.W4A8(None): sums,
        W4A8Dynamic(16): [*ranges, "qlinear", "c10d.allreduce_"],
    }
    for scheme, ops in want.items():
        layer = nn.Sequential(layer_of(scheme, activation="gelu"))
        parallelize_module(layer, mesh_of(world), {"0": PyquantRowwise()})
        x = part(rows_of(1, 7, K), world, rank)
        with Called(7 * N) as called:
            layer(x)
        assert called.ours == ops, (str(scheme), called.ours)
        if ops[-1] == "qlinear":
            assert not called.passes, (str(scheme), called.passes)


def uneven(rank: int, world: int, folder: Path) -> None:
    """Inputs and outputs that are cut into unequal shares, down to none."""
    for n, k in ((3, 126), (1, 6), (50, 2), (5, 1)):
        for scheme in (W8A8Dynamic(symmetric_inputs=False), pyquant.W8A8()):
            whole, x = layer_of(scheme, n=n, k=k), rows_of(4, 6, k)
            row, column = nn.Sequential(copy.deepcopy(whole)), nn.Sequential(copy.deepcopy(whole))
            parallelize_module(row, mesh_of(world), {"0": PyquantRowwise()})
            parallelize_module(column, mesh_of(world), {"0": PyquantColwise(output_layouts=Replicate())})
            accept.t1(row(part(x, world, rank)), whole(x), waiver="tiny")
            accept.t1(column(x), whole(x), waiver="tiny")


def poisoned(rank: int, world: int, folder: Path) -> None:
    """A NaN or infinity that one rank sees gives rows of NaN on all, and touches no other row."""
    for scheme in (W8A8Dynamic(), W8A8Dynamic(symmetric_inputs=False), W4A8Dynamic(None)):
        whole, x = layer_of(scheme), rows_of(1, 4, 3, K)
        x[0, 0, 1], x[1, 1, -1], x[2, 2, K // 2], x[3, 0, 5] = math.nan, math.inf, -math.inf, math.nan
        model = nn.Sequential(copy.deepcopy(whole))
        parallelize_module(model, mesh_of(world), {"0": PyquantRowwise()})
        got = model(part(x, world, rank))
        assert int(got.isnan().all(-1).sum()) == 4
        accept.t1(got, whole(x))


def sequences(rank: int, world: int, folder: Path) -> None:
    """Layouts of inputs and results as torch's styles have them."""
    mesh = mesh_of(world)
    for scheme in (W8A8Dynamic(), W4A8Dynamic(None, symmetric_inputs=False), pyquant.W8A8()):
        whole, x = layer_of(scheme, activation="gelu"), rows_of(1, 2, 8, K)
        want, sequence = whole(x), part(x, world, rank, 1)

        def made(style: Any, whole: QLinear = whole) -> nn.Module:
            return parallelize_module(nn.Sequential(copy.deepcopy(whole)), mesh, {"0": style})

        accept.t1(made(PyquantColwise(input_layouts=Shard(1)))(sequence), part(want, world, rank))
        accept.t1(made(PyquantColwise(output_layouts=Replicate()))(x), want)
        accept.t1(made(PyquantColwise(output_layouts=Shard(1)))(x), part(want, world, rank, 1))
        accept.t1(made(PyquantRowwise(output_layouts=Shard(1)))(part(x, world, rank)), part(want, world, rank, 1))
        accept.t1(made(PyquantRowwise(output_layouts=Shard(-2)))(part(x, world, rank)), part(want, world, rank, 1))
        accept.t1(made(PyquantRowwise(output_layouts=Shard(-1)))(part(x, world, rank)), part(want, world, rank))
        accept.t1(made(PyquantRowwise(input_layouts=Replicate()))(x), want)
        accept.t1(
            made(PyquantRowwise(input_layouts=Shard(1), output_layouts=Shard(1)))(sequence), part(want, world, rank, 1)
        )
        residual = rows_of(3, 2, 8, N)
        got = made(PyquantRowwise(output_layouts=Shard(1)))[0](part(x, world, rank), part(residual, world, rank, 1))
        accept.t1(got, part(whole(x, residual), world, rank, 1))
        for style in (PyquantColwise(use_local_output=False), PyquantRowwise(use_local_output=False)):
            for placement in (Replicate(), Shard(1), Shard(-1)):
                got = made(style)(distribute_tensor(x, mesh, [placement]))
                assert isinstance(got, DTensor)
                accept.t1(got.full_tensor(), want)
        odd = rows_of(1, 2, 7, K)  # rows that no number of ranks divides
        accept.t1(
            made(PyquantRowwise(output_layouts=Shard(1)))(part(odd, world, rank)), part(whole(odd), world, rank, 1)
        )


def codes_between(rank: int, world: int, folder: Path) -> None:
    """Static codes from a colwise layer to a rowwise one, as link_ has them go."""
    for bits, symmetric in ((8, True), (8, False), (4, True)):
        middle = pyquant.TensorScheme(bits=bits, symmetric=symmetric)
        weights = W8A8Dynamic().weights if bits == 8 else pyquant.W4A4().weights
        inputs = pyquant.W8A8().inputs if bits == 8 else pyquant.W4A4().inputs
        first = layer_of(QScheme(weights, inputs, middle), n=64, k=K, activation="relu")
        torch.manual_seed(5)
        second = QLinear.from_float(
            nn.Linear(64, N),
            QScheme(weights, middle),
            input_scale=first.output_scale,
            input_zero_point=first.output_zero_point,
        )
        model, x = nn.Sequential(copy.deepcopy(first), copy.deepcopy(second)), rows_of(1, 3, 5, K)
        parallelize_module(model, mesh_of(world), {"0": PyquantColwise(), "1": PyquantRowwise()})
        assert isinstance(model[0](x), QTensor)
        accept.t1(model(x), second(first(x)))
    style = PyquantColwise(output_layouts=Replicate())
    gathers = parallelize_module(nn.Sequential(copy.deepcopy(first)), mesh_of(world), {"0": style})
    with pytest.raises(UnsupportedError, match="codes"):
        gathers(x)


def gradients(rank: int, world: int, folder: Path) -> None:
    for scheme in (pyquant.W8A8(), W8A8Dynamic(), W4A8Dynamic(16), W8A16()):
        for words in ({}, {"activation": "gelu"}):
            whole = layer_of(scheme, **words)
            x, residual = rows_of(1, 3, 4, K).mul_(4).requires_grad_(), rows_of(2, 3, 4, N).requires_grad_()
            weight = rows_of(3, 3, 4, N)
            (whole(x, residual) * weight).sum().backward()
            row, column = nn.Sequential(copy.deepcopy(whole)), nn.Sequential(copy.deepcopy(whole))
            parallelize_module(row, mesh_of(world), {"0": PyquantRowwise()})
            mine, other = part(x.detach(), world, rank).requires_grad_(), residual.detach().clone().requires_grad_()
            (row[0](mine, other) * weight).sum().backward()
            close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
            close(mine.grad, part(x.grad, world, rank))
            close(other.grad, residual.grad)
            parallelize_module(column, mesh_of(world), {"0": PyquantColwise()})
            again = x.detach().clone().requires_grad_()
            with_grad = column(again)
            (with_grad * part(weight, world, rank)).sum().backward()
            close(again.grad, x.grad)
            scattered = nn.Sequential(copy.deepcopy(whole))
            parallelize_module(scattered, mesh_of(world), {"0": PyquantRowwise(output_layouts=Shard(1))})
            mine = part(x.detach(), world, rank).requires_grad_()
            y = scattered[0](mine, part(residual.detach(), world, rank, 1))
            (y * part(weight, world, rank, 1)).sum().backward()
            close(mine.grad, part(x.grad, world, rank))


def hadamard(rank: int, world: int, folder: Path) -> None:
    for scheme in (W8A8Dynamic(), pyquant.W4A4Dynamic(None), W8A16()):
        torch.manual_seed(0)
        whole = HadamardLinear.from_linear(nn.Linear(K, N), 16)
        whole.linear = QLinear.from_float(whole.linear, scheme)
        x = rows_of(1, 2, 3, K)
        want = whole(x)
        row = nn.Sequential(copy.deepcopy(whole))
        parallelize_module(row, mesh_of(world), {"0": PyquantRowwise()})
        column = nn.Sequential(copy.deepcopy(whole))
        parallelize_module(column, mesh_of(world), {"0": PyquantColwise(output_layouts=Replicate())})
        for got in (row(part(x, world, rank)), column(x)):
            if scheme.is_integer:
                accept.t1(got, want)
            else:
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        gather_quantized_(row)
        accept.t1(row(x), want)
    large = HadamardLinear.from_linear(nn.Linear(K, N), 128)
    large.linear = QLinear.from_float(large.linear, W8A8Dynamic())
    with pytest.raises(UnsupportedError, match=rf"{K // world} each.*has 128"):
        parallelize_module(large, mesh_of(world), PyquantRowwise())


def embeddings(rank: int, world: int, folder: Path) -> None:
    for rows, columns, dtype in ((30, 18, torch.float32), (3, 64, torch.bfloat16), (1, 2, torch.float16)):
        torch.manual_seed(0)
        whole = QEmbedding.from_float(nn.Embedding(rows, columns, dtype=dtype))
        ids = torch.randint(rows, (4, 8), generator=torch.Generator().manual_seed(1))
        for style, dim in (
            (PyquantRowwise(), None),
            (PyquantRowwise(output_layouts=Shard(1)), 1),
            (PyquantColwise(), -1),
            (PyquantColwise(output_layouts=Replicate()), None),
            (PyquantColwise(output_layouts=Shard(1)), 1),
        ):
            model = parallelize_module(nn.Sequential(copy.deepcopy(whole)), mesh_of(world), {"0": style})
            want = whole(ids) if dim is None else part(whole(ids), world, rank, dim)
            accept.t1(model(ids), want, waiver="a share")
            accept.t1(model(ids.int()), want, waiver="a share")
            assert "over" in repr(model)
            with pytest.raises(ArgumentError, match=f"{rows - 1}"):
                model(torch.tensor([[rows]]))
            accept.t1(gather_quantized_(model)(ids), whole(ids))


def taken_from_one(rank: int, world: int, folder: Path) -> None:
    """src_data_rank: every rank gets the numbers of that one, or keeps its own."""
    x = rows_of(1, 4, K)
    for source, seeds in ((0, [0] * world), (world - 1, [world - 1] * world), (None, list(range(world)))):
        mine = nn.Sequential(layer_of(W8A8Dynamic(), seed=rank))
        parallelize_module(mine, mesh_of(world), {"0": PyquantColwise()}, src_data_rank=source)
        want = layer_of(W8A8Dynamic(), seed=seeds[rank])(x)
        accept.t1(mine(x), part(want, world, rank))


def changed_afterwards(rank: int, world: int, folder: Path) -> None:
    """Another activation, casts, copies, new numbers: a share remains one."""
    x, mesh = rows_of(1, 4, K), mesh_of(world)
    for scheme in (W8A8Dynamic(), pyquant.W4A8TwoLevelDynamic(16), W4A8Dynamic(None)):
        whole = layer_of(scheme)
        row = parallelize_module(copy.deepcopy(whole), mesh, PyquantRowwise())
        accept.t1(row.with_activation("relu")(part(x, world, rank)), whole.with_activation("relu")(x))
        accept.t1(copy.deepcopy(row)(part(x, world, rank)), whole(x))
        bias = torch.linspace(-1, 1, N)
        row.bias, whole.bias = bias, bias
        accept.t1(row(part(x, world, rank)), whole(x))
        y = row.to(torch.bfloat16)(part(x, world, rank).bfloat16())
        accept.t1(y, whole.to(torch.bfloat16)(x.bfloat16()))
        accept.t0(gather_quantized_(row).codes, whole.codes)
        accept.t1(row(x), whole(x))
        assert type(row) is QLinear
        assert not row.share
    plain = nn.Sequential(layer_of(W8A8Dynamic()), nn.ReLU())
    fused = pyquant.fuse_(copy.deepcopy(plain))
    parallelize_module(fused, mesh, {"0": PyquantColwise()})
    accept.t1(fused(x), part(plain(x), world, rank))
    late = parallelize_module(copy.deepcopy(plain), mesh, {"0": PyquantColwise()})
    accept.t1(pyquant.fuse_(late)(x), part(plain(x), world, rank))


def refused(rank: int, world: int, folder: Path) -> None:
    mesh = mesh_of(world)

    def plan(module: nn.Module, style: Any) -> Callable[[], nn.Module]:
        return lambda: parallelize_module(module, mesh, style)

    grouped = layer_of(W4A8Dynamic(64), k=192)
    before = {name: tensor.clone() for name, tensor in grouped.state_dict().items()}
    each = -(-192 // world)
    pairs = layer_of(W4A8Dynamic(None), k=6 if world == 2 else 12, n=4)
    convolution = pyquant.quantize_(nn.Sequential(nn.Conv2d(8, 8, 3)), "W8A8Dynamic", check_speed=False)[0]
    groups = f"192 inputs over {world} ranks are {each} each, and a group of scales has 64"
    wrong = {
        groups: plan(grouped, PyquantRowwise()),
        "a byte of codes has 2": plan(pairs, PyquantRowwise()),
        "desc_act": plan(Reordered(layer_of(W8A8Dynamic()), torch.randperm(K)), PyquantRowwise()),
        "QConv2d": plan(convolution, PyquantColwise()),
        "shared already": plan(parallelize_module(layer_of(W8A8Dynamic()), mesh, PyquantColwise()), PyquantRowwise()),
    }
    for message, call in wrong.items():
        with pytest.raises(UnsupportedError, match=message):
            call()
    assert all(torch.equal(grouped.state_dict()[name], tensor) for name, tensor in before.items())
    with pytest.raises(ArgumentError, match="input_scale"):
        parallelize_module(QLinear(8, 4, scheme=pyquant.W8A8()), mesh, PyquantColwise())
    with pytest.raises(ArgumentError, match="output_layouts"):
        PyquantRowwise(output_layouts="Replicate")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="use_local_output"):
        PyquantColwise(use_local_output=1)  # type: ignore[arg-type]
    share = nn.Sequential(layer_of(W8A8Dynamic()))
    parallelize_module(share, mesh, {"0": PyquantRowwise()})
    for call in (
        lambda: pyquant.save_pretrained(share, folder / "no"),
        lambda: pyquant.dequantize_(share),
        lambda: share[0].reference(rows_of(1, 2, K)),
    ):
        with pytest.raises(UnsupportedError, match="gather_quantized_"):
            call()
    with pytest.raises(ArgumentError, match=rf"residual.*\[2, {N}\]"):
        share[0](part(rows_of(1, 2, K), world, rank), rows_of(1, 1, N))
    with pytest.raises(ArgumentError, match=r"\[\.\.\., \d+\]"):
        share(rows_of(1, 2, K + 1))
    assert share[0].kernel_info(1).is_exact
    assert "rowwise" in onnx_forms.why_not(share[0], "onnxruntime")
    with pytest.raises(UnsupportedError, match=r"'0' is inputs 0 to|'0' is inputs \d+ to"):
        peft_refusals.check_layer(share[0], "0")


def noted(rank: int, world: int, folder: Path) -> None:
    """What was noted of a layer before it was cut is there again afterwards."""
    layer = layer_of(W4A8Dynamic(16))
    layer.note = "as it was"
    parallelize_module(layer, mesh_of(world), PyquantRowwise())
    assert "group scales" in layer.note
    assert gather_quantized_(layer).note == "as it was"


def experts(rank: int, world: int, folder: Path) -> None:
    bank = nn.Sequential(QExperts())
    with pytest.raises(UnsupportedError, match="experts"):
        parallelize_module(bank, mesh_of(world), {"0": PyquantColwise()})


@torch.no_grad()
def compiled(rank: int, world: int, folder: Path) -> None:
    """One graph, collectives included."""
    model = nn.Sequential(layer_of(W8A8Dynamic(), n=64, activation="gelu"), layer_of(W8A8Dynamic(), k=64)).eval()
    cut = parallelize_module(copy.deepcopy(model), mesh_of(world), {"0": PyquantColwise(), "1": PyquantRowwise()})
    x = rows_of(1, 2, 3, K)
    accept.t1(torch.compile(cut, fullgraph=True, backend="aot_eager")(x), model(x))
    torch._dynamo.reset()


def float_layers(rank: int, world: int, folder: Path) -> None:
    """What quantize_ left in floating point is torch's own business, in the same plan."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    want, x = copy.deepcopy(model), rows_of(1, 4, 16)
    parallelize_module(model, mesh_of(world), {"0": PyquantColwise(), "1": PyquantRowwise()})
    torch.testing.assert_close(model(x), want(x))


CASES: dict[str, Callable[[int, int, Path], None]] = {}
for i, one in enumerate(qlayers.ALL):
    fused = ACTIVATIONS[i % len(ACTIVATIONS)] | {"bias": i % 4 != 3}
    CASES[f"colwise {one}"] = partial(colwise, one, fused)
    CASES[f"rowwise {one}"] = partial(rowwise, one, fused)
for case in (
    passes,
    uneven,
    poisoned,
    sequences,
    codes_between,
    gradients,
    hadamard,
    embeddings,
    taken_from_one,
    changed_afterwards,
    refused,
    compiled,
    noted,
    experts,
    float_layers,
):
    CASES[case.__name__] = case
