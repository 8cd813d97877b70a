"""link_ and chain_report: codes flow where they may, bit for bit the same; every break has its reason and its price."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyquant
from pyquant.core.presets import W4A4, W4A8, W8A8, W8A16, W8A8Dynamic
from pyquant.core.qtensor import QTensor
from pyquant.errors import ArgumentError, PyquantError
from pyquant.nn.chain import QResidual
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qlinear import QLinear

X = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
AFFINE = W8A8(symmetric_inputs=False)


def linear(k: int, n: int, scheme: Any = None, scale: float = 0.03, **more: Any) -> QLinear:
    torch.manual_seed(k + n)
    scheme = W8A8() if scheme is None else scheme
    numbers: dict[str, Any] = {"input_scale": scale} if scheme.is_static else {}
    if scheme.is_static and not scheme.inputs.symmetric:
        numbers["input_zero_point"] = -128
    return QLinear.from_float(nn.Linear(k, n), scheme, **(numbers | more))


def tower(scheme: Any = None) -> nn.Module:
    return nn.Sequential(
        linear(32, 48, scheme, activation="relu"),
        nn.Identity(),
        linear(48, 32, scheme, 0.02, activation="gelu"),
        linear(32, 8, scheme, 0.01),
    ).eval()


@pytest.mark.parametrize("scheme", [W8A8(), AFFINE, W4A8(16), W4A4(None)], ids=str)
@pytest.mark.parametrize("how", ["traced", "structure"])
def test_codes_flow_and_the_bits_stay(scheme: Any, how: str) -> None:
    model = tower(scheme)
    expected = model(X)
    pyquant.link_(model, X if how == "traced" else None)
    assert [m.scheme.outputs is not None for m in model if isinstance(m, QLinear)] == [True, True, False]
    assert isinstance(model[0](X), QTensor)
    assert torch.equal(model(X), expected)
    assert model[0].output_scale.data_ptr() == model[2].input_scale.data_ptr()
    assert [r.state for r in pyquant.chain_report(model, X)] == ["linked", "linked", "end"]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    pyquant.link_(model, X)  # again: nothing changes
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.state_dict().keys() == state.keys()


def test_what_the_unlinked_path_rounds_in_16_bits_the_linked_one_does_not() -> None:
    """The numbers of docs/numerics.md 13: the unlinked result is quantised after a rounding to float16."""
    model = tower().half()
    x = X.half()
    plain = copy.deepcopy(model)
    pyquant.link_(model, x)
    t = plain[0](x.float())  # float32 input: the result is not rounded
    wanted = pyquant.ops.quantize(t, plain[2].input_scale)
    assert torch.equal(model[0](x.float()).data, wanted)
    assert model(x).dtype == torch.float16
    assert (model(x) - plain(x)).abs().max() <= 0.1 * plain(x).abs().max()


class Parallel(nn.Module):
    """Fan-out: two readers of one result."""

    def __init__(self, second_scale: float = 0.02) -> None:
        super().__init__()
        self.base, self.a, self.b = linear(32, 16), linear(16, 8, scale=0.02), linear(16, 8, scale=second_scale)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return self.a(y) - self.b(y)


def test_fan_out_links_where_the_scales_agree_and_shares_their_memory() -> None:
    model = Parallel().eval()
    expected = model(X)
    pyquant.link_(model, X)
    assert torch.equal(model(X), expected)
    assert model.a.input_scale.data_ptr() == model.b.input_scale.data_ptr() == model.base.output_scale.data_ptr()
    other = Parallel(0.021).eval()
    record = pyquant.chain_report(other, X)[0]
    assert (record.state, record.readers) == ("broken", ("a", "b"))
    assert "0.02 for 'a', 0.021 for 'b'" in record.reason
    assert pyquant.link_(other, X).base.scheme.outputs is None


class Broken(nn.Module):
    """One reason a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.one = linear(32, 32, W8A16() if kind == "weight-only" else None)
        second = {"dynamic": W8A8Dynamic(), "float input": W8A16()}.get(kind, W8A8())
        self.two = linear(32, 32, second)
        self.act, self.norm, self.floats = nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 32)
        if kind == "hooks":
            self.one.register_forward_hook(lambda *a: None)

    def forward(self, x: Tensor) -> Any:
        y = self.one(x)
        if self.kind == "add":
            return self.two(y + x)
        if self.kind == "inplace add":
            y += x
            return self.two(y)
        if self.kind == "residual":
            return self.two(x, residual=y)
        if self.kind == "result":
            return self.two(y), y
        if self.kind == "dropped":
            return self.two(x)
        if self.kind == "float layer":
            return self.floats(y)
        if self.kind == "norm":
            return self.two(self.norm(y))
        if self.kind == "module":
            return self.two(self.act(y))
        if self.kind == "function":
            return self.two(F.relu(y))
        if self.kind == "view":
            assert y.shape[0] == x.shape[0]  # looking is no reading
            return self.two(y.view(3, 2, 32))
        return self.two(y)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("add", "add"),
        ("inplace add", "add_ in Broken"),
        ("residual", "residual operand of 'two'"),
        ("result", "also a result of the model"),
        ("float layer", "linear in 'floats' (Linear)"),
        ("norm", "layer_norm in 'norm' (LayerNorm)"),
        ("module", "relu in 'act' (ReLU)"),
        ("function", "relu in Broken"),
        ("view", "view in Broken"),
        ("dynamic", "'two' finds the scale of its input at run time"),
        ("float input", "'two' takes real numbers"),
        ("weight-only", "gives real numbers"),
        ("hooks", "hooks"),
    ],
)
def test_every_break_has_its_reason(kind: str, told: str) -> None:
    model = Broken(kind).eval()
    x = X
    records = {r.name: r for r in pyquant.chain_report(model, x)}
    assert records["one"].state == "broken"
    assert told in records["one"].reason
    assert records["one"].extra_bytes == 3 * 6 * 32 * (1 + len(records["one"].readers))
    before = {k: id(m) for k, m in model.named_modules()}
    pyquant.link_(model, x)
    assert {k: id(m) for k, m in model.named_modules()} == before


def test_bytes_are_counted() -> None:
    model = tower().half()
    records = pyquant.chain_report(model, X.half())
    assert [(r.elements, r.float_bytes, r.code_bytes, r.extra_bytes, r.state) for r in records] == [
        (6 * 48, 6 * 48 * 2 * 2, 6 * 48 * 2, 6 * 48 * 2, "linkable"),
        (6 * 32, 6 * 32 * 2 * 2, 6 * 32 * 2, 6 * 32 * 2, "linkable"),
        (6 * 8, 6 * 8 * 2 * 2, 6 * 8 * 2, 0, "end"),
    ]
    pyquant.link_(model, X.half())
    assert [r.extra_bytes for r in pyquant.chain_report(model, X.half())] == [0, 0, 0]
    assert [r.float_bytes for r in pyquant.chain_report(model, X.half())][:2] == [6 * 48 * 4, 6 * 32 * 4]


def test_layers_that_did_not_run_or_are_not_read() -> None:
    model = Broken("dropped").eval()
    assert pyquant.chain_report(model, X)[0].reason == "nothing reads the result"
    assert len(pyquant.chain_report(nn.Sequential(linear(32, 8)).eval(), X)) == 1


class Skip(nn.Module):
    """A block with a quantised identity branch; what it reads comes from another layer."""

    def __init__(self, activation: str | None = "relu", zero_point: int = -128, scale: float = 0.05) -> None:
        super().__init__()
        more = {"input_zero_point": zero_point}
        self.before = linear(32, 32, AFFINE, activation="relu")
        self.up = linear(32, 48, AFFINE, scale, activation="relu", **more)
        self.add = pyquant.QResidualAdd(linear(48, 32, AFFINE, 0.04), activation)
        self.add.residual = QResidual(scale, zero_point, AFFINE.inputs)
        self.after = linear(32, 8, AFFINE, 0.06, **more)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        return self.after(self.add(self.up(y), y))


@pytest.mark.parametrize("activation", ["relu", None])
@pytest.mark.parametrize("zero_point", [-128, -30])
def test_a_residual_block_is_one_chain(activation: str | None, zero_point: int) -> None:
    model = Skip(activation, zero_point).eval()
    expected = model(X)
    assert [r.state for r in pyquant.chain_report(model, X)] == ["linkable"] * 3 + ["end"]
    pyquant.link_(model, X)
    assert torch.equal(model(X), expected)
    assert [(r.name, r.state) for r in pyquant.chain_report(model, X)] == [
        ("before", "linked"),
        ("up", "linked"),
        ("add", "linked"),
        ("after", "end"),
    ]
    assert model.add.relu_is_free == (zero_point == -128)
    if activation == "relu":  # the planted bug: without the maximum over codes
        model.add.relu_is_free = True
        assert torch.equal(model(X), expected) == (zero_point == -128)


def test_convolutions_are_linked_too() -> None:
    torch.manual_seed(0)
    one = QConv2d.from_float(
        nn.Conv2d(3, 8, 3, padding=1), AFFINE, input_scale=0.03, input_zero_point=3, activation="relu"
    )
    two = QConv2d.from_float(nn.Conv2d(8, 4, 3, stride=2), AFFINE, input_scale=0.01, input_zero_point=-128)
    model = nn.Sequential(one, two).eval()
    for x in (torch.randn(2, 3, 9, 9), torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last)):
        expected = model(x)
        linked = pyquant.link_(copy.deepcopy(model), x)
        assert torch.equal(linked(x), expected)
        assert linked(x).stride() == expected.stride()
        assert linked[0](x).data.dtype == torch.int8


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(32, 48), linear(48, 32, scale=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def test_registered_pairs_need_no_example() -> None:
    model = nn.Sequential(Feed(), nn.ReLU()).eval()
    assert pyquant.link_(copy.deepcopy(model))[0].up.scheme.outputs is None
    pyquant.register_link(Feed, "up", "down")
    expected = model(X)
    assert pyquant.link_(model)[0].up.scheme.outputs is not None
    assert torch.equal(model(X), expected)
    shared = Feed().eval()
    shared.down = shared.up
    assert pyquant.link_(nn.Sequential(shared).eval())[0].up.scheme.outputs is None


class Peeks(nn.Module):
    """Code that treats a result by its type: no trace can know, the comparison finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = linear(32, 32), linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        z = self.two(y)
        return z + 1 if isinstance(y, tuple) else z


class Fails(Peeks):
    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        return self.two(y)[: y.shape[0]]


@pytest.mark.parametrize("kind", [Peeks, Fails])
def test_a_model_that_codes_would_change_stays_as_it_was(kind: type[nn.Module]) -> None:
    model = kind().eval()
    expected = model(X)
    before = {k: id(m) for k, m in model.named_modules()}
    with pytest.raises(PyquantError, match="as before"):
        pyquant.link_(model, X)
    assert {k: id(m) for k, m in model.named_modules()} == before
    assert torch.equal(model(X), expected)


def test_examples_of_every_form_and_wrong_models() -> None:
    for example in (X, (X,), {"input": X}):
        assert pyquant.chain_report(tower(), example)[0].state == "linkable"
    with pytest.raises(ArgumentError, match="training mode"):
        pyquant.link_(tower().train(), X)
    with pytest.raises(ArgumentError, match="'model'"):
        pyquant.chain_report(torch.relu, X)  # type: ignore[arg-type]
    floats = nn.Sequential(nn.Linear(32, 4)).eval()
    assert pyquant.chain_report(floats, X) == []
    hooks = [m._forward_hooks for m in tower().modules()]
    assert not any(hooks)


def test_saved_and_loaded_it_still_hands_codes(tmp_path: Any) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8)).eval()

    model = pyquant.quantize_(build(), W8A8(), input_scales={"0": 0.03, "2": 0.02})
    model = pyquant.link_(pyquant.fuse_(model), X)
    pyquant.save_pretrained(model, tmp_path)
    again = pyquant.load_pretrained(tmp_path, build)
    assert isinstance(again[0](X), QTensor)
    assert torch.equal(again(X), model(X))
    assert again[0].output_scale.data_ptr() != again[2].input_scale.data_ptr()
    pyquant.link_(again, X)
    assert again[0].output_scale.data_ptr() == again[2].input_scale.data_ptr()
    assert torch.equal(again(X), model(X))
    assert pyquant.quantization_report(model)[0].gives_codes


def test_the_page_runs() -> None:
    """Every Python block of docs/chains.md, one after the other."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "chains.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 5
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/chains.md", "exec"), names)


def test_a_linked_model_compiles_without_graph_breaks() -> None:
    model = pyquant.link_(Skip().eval(), X)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(X), model(X))


def test_readers_with_hooks_get_real_numbers() -> None:
    model = tower()
    model[2].register_forward_pre_hook(lambda module, args: None)
    assert "hooks" in pyquant.chain_report(model, X)[0].reason
