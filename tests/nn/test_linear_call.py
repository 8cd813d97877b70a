"""16-bit layers on a GPU hand their product and bias to torch without converting anything per call. Tensors without
numbers stand for the GPU's, but for the last tests, whose layer thinks that it is on one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import pyquant
from pyquant import QLinear
from pyquant.core.presets import scheme_from_name
from pyquant.nn.linear_call import LinearCall
from pyquant.nn.linear_state import LinearState
from pyquant.ops import tuned

BF16 = scheme_from_name("FP16(dtype=bfloat16)")


class Ops(TorchDispatchMode):
    """The names of the operations that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def ops_of(layer: nn.Module, x: Tensor) -> list[str]:
    with torch.no_grad(), Ops() as ops:
        y = layer(x)
    assert (y.shape, y.dtype) == ((*x.shape[:-1], 32), x.dtype)
    return ops.names


@pytest.mark.parametrize("shape", [(4, 64), (2, 3, 64), (64,), (0, 64)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_call_on_a_gpu_is_torchs_product_and_no_more(shape: tuple[int, ...], bias: bool) -> None:
    with FakeTensorMode():
        layer = QLinear(64, 32, bias, BF16, device="cuda", dtype=torch.bfloat16)
        names = ops_of(layer, torch.empty(shape, dtype=torch.bfloat16, device="cuda"))
        assert not [name for name in names if "copy" in name or "pyquant" in name], names
        assert sum("mm" in name or "linear" in name for name in names) == 1, names


def test_what_torch_does_not_compute_alone_stays_with_the_op() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 64, dtype=torch.bfloat16, device="cuda")
        for words in ({"activation": "relu"}, {}):
            layer = QLinear(64, 32, True, BF16, device="cuda", dtype=torch.bfloat16, **words)
            given = x if words else x.float()
            assert any("float_linear" in name for name in ops_of(layer, given))


def test_a_table_that_prefers_a_kernel_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "_has_float_rows", True)
    with FakeTensorMode():
        layer = QLinear(64, 32, True, BF16, device="cuda", dtype=torch.bfloat16)
        assert any(
            "float_linear" in name for name in ops_of(layer, torch.empty(4, 64, dtype=torch.bfloat16, device="cuda"))
        )


def test_tables_say_whether_they_choose_kernels_for_floats() -> None:
    sizes = {"out": "bf16", "x_packed": False, "w_layout": "natural", "group_size": 0, "n": 1, "k": 1, "m": 1}
    times = {"us": 1.0, "model_row": "torch", "model_us": 1.0}
    try:
        for w, row, want in (("s8", "ours", False), ("bf16", "torch", False), ("bf16", "ours", True)):
            table = tuned.Table()
            table.add("a GPU", [tuned.Choice(x="bf16", w=w, row=row, **sizes, **times)])
            tuned.activate(table)
            assert tuned.has_float_rows() is want
    finally:
        tuned.activate_found()


# ---- with numbers: a layer of the CPU that holds and uses what one of a GPU does


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrowed(layer: Any, bias: Tensor | None) -> Tensor | None:
        return bias.to(layer.storage.dtype) if bias is not None and layer.scheme.is_float else None

    def is_torchs(layer: Any, x: Tensor, storage: Tensor) -> bool:
        return x.dtype == storage.dtype and layer.activation == "none" and not x.requires_grad

    monkeypatch.setattr(LinearState, "_narrowed", narrowed)
    monkeypatch.setattr(LinearCall, "_is_torchs_linear", is_torchs)


def made() -> tuple[nn.Linear, QLinear, Tensor]:
    torch.manual_seed(0)
    linear = nn.Linear(64, 32, dtype=torch.bfloat16)
    layer = QLinear.from_float(linear, BF16)
    layer.bias = torch.randn(32) * 3
    with torch.no_grad():
        linear.bias.copy_(layer.bias_)
    return linear, layer, torch.randn(2, 5, 64, dtype=torch.bfloat16)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_the_result_is_torchs_and_follows_every_change_of_the_bias() -> None:
    linear, layer, x = made()
    with torch.no_grad():
        for one in (layer, copy.deepcopy(layer)):
            assert torch.equal(one(x), linear(x))
            assert torch.equal(one(x[0, 0]), linear(x[0, :1])[0])
        assert "bias_narrow" not in layer.state_dict()
        other = torch.arange(32.0)
        state = {**layer.state_dict(), "bias": other}
        linear.bias.copy_(other)
        layer.load_state_dict(state)
        assert torch.equal(layer(x), linear(x))
        fresh = QLinear(64, 32, True, BF16, dtype=torch.bfloat16)
        fresh.load_state_dict(state, assign=True)
        assert torch.equal(fresh(x), linear(x))
        layer.half().to("cpu").bfloat16()
        assert layer._buffers["bias_narrow"].dtype == torch.bfloat16
        assert torch.equal(layer(x), linear(x))
        layer.bias = None if "bias" not in layer.state_slots else torch.zeros(32)
        linear.bias.zero_()
        assert torch.equal(layer(x), linear(x))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_it_exports_compiles_and_trains() -> None:
    linear, layer, x = made()
    model = nn.Sequential(layer)
    with torch.no_grad():
        want = linear(x)
        program = torch.export.export(model, (x,))
        assert torch.equal(program.module()(x), want)
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), want)
    leaf = x.clone().requires_grad_()
    model(leaf).float().sum().backward()
    assert leaf.grad is not None
    pyquant.dequantize_(model)
    assert torch.equal(model[0].bias.detach().float(), layer.bias_.bfloat16().float())


@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W4A8Dynamic(group_size=8)", "W4A16(group_size=8)", "FP16"])
@pytest.mark.parametrize("name", ["float8_e8m0fnu", "float8_e4m3fn", "float64"])
def test_inputs_of_another_type_are_refused_by_their_name(scheme: str, name: str) -> None:
    """Also those that torch's own bindings have no number for."""
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    layer = QLinear.from_float(nn.Linear(16, 8), scheme_from_name(scheme))
    with pytest.raises(pyquant.errors.ArgumentError, match=rf"'x': got {name} \[2, 16\]; allowed: float32 or float16"):
        layer(torch.ones(2, 16).to(dtype))


@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W4A16(group_size=8)"])
def test_residuals_of_another_type_are_refused_by_their_name(scheme: str) -> None:
    dtype = getattr(torch, "float8_e8m0fnu", None)
    if dtype is None:
        pytest.skip("this torch has no float8_e8m0fnu")
    layer = QLinear.from_float(nn.Linear(16, 8), scheme_from_name(scheme))
    told = r"'residual': got float8_e8m0fnu \[2, 8\]; allowed: float32"
    with pytest.raises(pyquant.errors.ArgumentError, match=told):
        layer(torch.ones(2, 16), torch.ones(2, 8).to(dtype))
