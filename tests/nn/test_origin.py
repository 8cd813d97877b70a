"""dequantize_ brings back every class that quantize_ or load_pretrained rewrote, with the weights of the codes."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant.nn import forms, swap
from pyquant.nn.attention import Attention


class Subclass(nn.Linear):
    mark = 3


class SubConv(nn.Conv2d):
    pass


class SubAttention(nn.MultiheadAttention):
    pass


class Placed(nn.Embedding):
    """A table with a buffer of its own, and no forward."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.register_buffer("places", torch.arange(rows), persistent=False)


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3


IDS, X, IMAGE = torch.arange(6).reshape(2, 3), torch.randn(2, 3, 32), torch.randn(2, 3, 5, 5)


def kinds() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    """name -> (module, what it is called with)."""
    torch.manual_seed(0)
    found: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
        "linear": (nn.Linear(32, 16), (X,)),
        "subclass": (Subclass(32, 16, bias=False), (X,)),
        "of torch": (nn.modules.linear.NonDynamicallyQuantizableLinear(32, 16), (X,)),
        "convolution": (SubConv(3, 4, 3, padding=1), (IMAGE,)),
        "table": (Placed(10, 32), (IDS,)),
        "scaled table": (Scaled(10, 32), (IDS,)),
        "attention": (nn.MultiheadAttention(32, 4, batch_first=True), (X, X, X)),
        "attention of widths": (
            nn.MultiheadAttention(32, 4, kdim=16, vdim=8, bias=False, add_bias_kv=True),
            (X, X[..., :16], X[..., :8]),
        ),
        "attention, subclass": (SubAttention(32, 4), (X, X, X)),
        "lstm": (nn.LSTM(32, 16, 2, bidirectional=True, proj_size=8, batch_first=True), (X,)),
        "gru": (nn.GRU(32, 16, bias=False), (X,)),
        "encoder": (nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2), (X,)),
    }
    if importlib.util.find_spec("transformers") is not None:
        from transformers.models.falcon.modeling_falcon import FalconLinear
        from transformers.pytorch_utils import Conv1D

        falcon = FalconLinear(32, 16)
        nn.init.normal_(falcon.bias)
        found |= {"Conv1D": (Conv1D(48, 32), (X,)), "FalconLinear": (falcon, (X,))}
    return found


NAMES = (
    "linear",
    "subclass",
    "of torch",
    "convolution",
    "table",
    "scaled table",
    "attention",
    "attention of widths",
    "attention, subclass",
    "lstm",
    "gru",
    "encoder",
    "Conv1D",
    "FalconLinear",
)


def case(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if name not in kinds():
        pytest.skip("transformers is a demo extra and not installed")
    module, args = kinds()[name]
    return nn.Sequential(module).eval(), args


def described(model: nn.Module) -> dict[str, Any]:
    """Classes, keys, shapes and what a user may look at."""
    named = {n: (type(m), m.training, m.extra_repr()) for n, m in model.named_modules(remove_duplicate=False)}
    tensors = {n: (tuple(t.shape), t.dtype, type(t)) for n, t in (*model.named_parameters(), *model.named_buffers())}
    flags = [getattr(m, f, None) for m in model.modules() for f in ("activation_relu_or_gelu", "use_nested_tensor")]
    return {"modules": named, "tensors": tensors, "keys": list(model.state_dict()), "flags": flags}


def outputs(model: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        y = model[0](*args)  # type: ignore[operator]
    return y[0] if isinstance(y, tuple) else y


def made_of_floats(model: nn.Module) -> nn.Module:
    """The quantised model with each layer's own float twin, nothing else changed."""
    copied = copy.deepcopy(model)
    layers = {n: m for n, m in copied.named_modules() if hasattr(m, "to_float")}
    swap.swap_modules(copied, [([n], m.to_float()) for n, m in layers.items()])  # type: ignore[operator]
    return copied


def quantised(model: nn.Module) -> nn.Module:
    return pyquant.quantize_(model, "W8A8Dynamic", embeddings=True, check_speed=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["at once", "copied", "from a file"])
def test_the_class_comes_back_with_the_numbers_of_the_codes(name: str, way: str, tmp_path: Path) -> None:
    model, args = case(name)
    plain, before = copy.deepcopy(model), described(model)
    model = quantised(model)
    want = outputs(made_of_floats(model), args)
    if way == "copied":
        model = copy.deepcopy(model)
    if way == "from a file":
        pyquant.save_pretrained(model, tmp_path / "saved")
        model = pyquant.load_pretrained(tmp_path / "saved", copy.deepcopy(plain))
    weight = next(p for p in plain.parameters())
    back = pyquant.dequantize_(model)
    assert described(back) == before
    assert not any(torch.equal(p, weight) for p in back.parameters() if p.dim() > 1), "the codes, not the old floats"
    got = outputs(back, args)
    assert torch.allclose(got, want, atol=1e-5, rtol=1e-5)
    assert (got - outputs(plain, args)).norm() < 0.05 * got.norm()
    assert described(pyquant.dequantize_(quantised(back))) == before


def test_modules_that_share_stay_shared_and_hooks_run() -> None:
    model = nn.ModuleDict({"a": nn.GRU(32, 16), "c": nn.MultiheadAttention(32, 4)})
    model["b"] = model["a"]
    calls: list[str] = []
    quantised(model)
    model["c"].register_forward_hook(lambda *_: calls.append("c"))
    pyquant.dequantize_(model)
    assert model["a"] is model["b"]
    assert type(model["a"]) is nn.GRU
    model["c"](X, X, X)
    assert calls == ["c"]
    assert copy.deepcopy(model["a"])(X)[0].shape == (2, 3, 16)
    assert sum(p.numel() for p in model["a"].parameters()) == sum(p.numel() for p in nn.GRU(32, 16).parameters())


def test_half_of_it_left_in_floating_point() -> None:
    model = nn.Sequential(nn.MultiheadAttention(32, 4))
    key = model[0].in_proj_weight[32:64].detach().clone()
    pyquant.quantize_(model, "W8A8Dynamic", filter_fn=lambda _, name: not name.endswith("k_proj"))
    pyquant.dequantize_(model.to(torch.bfloat16))
    assert type(model[0]) is nn.MultiheadAttention
    assert torch.equal(model[0].in_proj_weight[32:64], key.bfloat16())


def test_what_the_user_exposed_stays_exposed() -> None:
    model = pyquant.expose_linears_(nn.Sequential(nn.MultiheadAttention(32, 4), nn.Linear(32, 32)))
    assert type(pyquant.dequantize_(quantised(model))[0]) is Attention  # type: ignore[index]


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ (2 * self.weight).T + self.bias


def _make(layer: Doubled) -> nn.Linear:
    new = nn.Linear(layer.in_features, layer.out_features)
    new.weight, new.bias = nn.Parameter(2 * layer.weight.detach()), layer.bias
    return new


def _back(form: nn.Linear, layer: Doubled) -> None:
    layer.weight, layer.bias = nn.Parameter(form.weight.detach() / 2), form.bias


@pytest.mark.parametrize(("back", "kind"), [(None, nn.Linear), (_back, Doubled)])
def test_registered_forms(back: Any, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_FORMS", dict(forms._FORMS))
    pyquant.register_linear_form(Doubled, _make, back)
    model = quantised(nn.Sequential(Doubled(32, 16)))
    want = outputs(made_of_floats(model), (X,))
    model = pyquant.dequantize_(model)
    assert type(model[0]) is kind  # type: ignore[index]
    assert torch.allclose(outputs(model, (X,)), want, atol=1e-5)
    with pytest.raises(pyquant.ArgumentError, match="'back'"):
        pyquant.register_linear_form(Doubled, _make, 3)  # type: ignore[arg-type]


def test_an_error_half_way_leaves_the_quantised_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantised(nn.Sequential(nn.GRU(32, 16), nn.TransformerEncoderLayer(32, 4, 64)))
    before = described(model)
    monkeypatch.setitem(forms._FORMS, nn.GRU, (forms._FORMS[nn.GRU][0], lambda *_: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        pyquant.dequantize_(model)
    assert described(model) == before


def test_no_float_weight_is_kept_alive() -> None:
    model = nn.Sequential(nn.LSTM(32, 16), nn.MultiheadAttention(32, 4), Subclass(32, 32))
    quantised(model)
    shells = [m.__dict__["_pyquant_origin"] for m in model.modules() if "_pyquant_origin" in m.__dict__]
    assert len(shells) == 3
    for shell in shells:
        assert not list(shell.parameters())
        for module in shell.modules():
            assert not [
                n
                for n, v in module.__dict__.items()
                if isinstance(v, Tensor) or (isinstance(v, list) and any(isinstance(item, Tensor) for item in v))
            ]
