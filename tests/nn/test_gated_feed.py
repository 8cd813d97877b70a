"""Gated feed-forward modules under fuse_: which are known, the bits of the op in their middle, when it steps aside."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyquant
from pyquant import numerics
from pyquant.core.presets import W4A16, W8A8, W4A4Dynamic, W4A8Dynamic, W8A8Dynamic
from pyquant.errors import CheckpointError
from pyquant.nn import gated_feed
from pyquant.nn.gate_source import Gate, gate_of
from pyquant.nn.gated_feed import GatedFeed, gated_feeds

X = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))


class Feed(nn.Module):
    """As the models of transformers write it."""

    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48), nn.Linear(32, 48)
        self.down_proj, self.act_fn = nn.Linear(48, 32), nn.SiLU() if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        """The text does not matter."""
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj  # noqa: RET504


class ByFunction(nn.Module):
    """As Meta's Llama does."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 48)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class UpFirst(Feed):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(hidden) * self.act_fn(self.gate_proj(hidden)))


class Joined(nn.Module):
    """As Phi-3 and GLM do."""

    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(32, 96), nn.Linear(48, 32)
        self.activation_fn = nn.SiLU() if act is None else act

    def forward(self, hidden_states: Tensor) -> Tensor:
        up_states = self.gate_up_proj(hidden_states)

        gate, up_states = up_states.chunk(2, dim=-1)
        up_states = up_states * self.activation_fn(gate)

        return self.down_proj(up_states)


class Thirds(Joined):
    def forward(self, hidden_states: Tensor) -> Tensor:
        up_states = self.gate_up_proj(hidden_states)
        gate, up_states = up_states.chunk(2, dim=0)
        up_states = up_states * self.activation_fn(gate)
        return self.down_proj(up_states)


class Squared(Joined):
    def forward(self, hidden_states: Tensor) -> Tensor:
        up_states = self.gate_up_proj(hidden_states)
        gate, up_states = up_states.chunk(2, dim=-1)
        up_states = gate * self.activation_fn(gate)
        return self.down_proj(up_states)


class Residual(Feed):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Dropped(Feed):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x), 0.5, False))


class Doubled(Feed):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(2 * x))


class Same(Feed):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.up_proj(x))


class Longer(Feed):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        down = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down  # noqa: RET504


class Returned(Feed):
    def forward(self, x: Tensor) -> Tensor:
        down = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))  # noqa: F841
        return x


class Scaled(Feed):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Decorated(Feed):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Summed(Feed):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


class Wrapped(Feed):
    pass


def _twice(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def called(self: nn.Module, x: Tensor) -> Tensor:
        return 2 * forward(self, x)

    return called


Wrapped.forward = _twice(Feed.forward)  # type: ignore[method-assign]

KNOWN = {
    Feed: Gate("gate_proj", "up_proj", "down_proj", "act_fn"),
    UpFirst: Gate("gate_proj", "up_proj", "down_proj", "act_fn"),
    ByFunction: Gate("w1", "w3", "w2", "", F.silu),
    Joined: Gate("gate_up_proj", "", "down_proj", "activation_fn"),
}
OTHERS = [Thirds, Squared, Residual, Dropped, Doubled, Same, Longer, Returned, Scaled, Decorated, Summed, Wrapped]


def quantised(model: nn.Module | None = None, scheme: Any = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    whole = nn.Sequential(Feed() if model is None else model).to(dtype).eval()
    return pyquant.quantize_(whole, scheme or W8A8Dynamic(), check_speed=False)


class Called(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the calls of all ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[op._schema.name] += 1
        return op(*args, **(kwargs or {}))


def by_hand(feed: Any, x: Tensor) -> Tensor:
    """From the specification: nothing is rounded between the two products' results and the codes."""
    gate, up, down, act = (getattr(feed, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))
    name = {nn.SiLU: "silu", nn.ReLU: "relu", nn.ReLU6: "clamp"}.get(type(act), "gelu")
    middle = numerics.activation_mul(gate.reference(x), up.reference(x), name, 0.0, 6.0)
    return down.reference(middle).to(x.dtype)


@pytest.mark.parametrize("kind", KNOWN)
def test_a_source_that_says_it_is_known(kind: type[nn.Module]) -> None:
    assert gate_of(kind()) == KNOWN[kind]


@pytest.mark.parametrize("kind", OTHERS)
def test_any_other_source_is_not(kind: type[nn.Module]) -> None:
    assert gate_of(kind()) is None
    model = quantised(kind())
    if kind is Thirds:
        return  # rows of its input become gates: of no use but to this test
    before = model(X)
    pyquant.fuse_(model)
    assert not gated_feeds(model)
    assert torch.equal(model(X), before)


def test_a_module_without_readable_source_is_left_alone() -> None:
    made: dict[str, Any] = {"Feed": Feed}
    text = "class Made(Feed):\n    def forward(self, x):\n        return self.down_proj(self.gate_proj(x))\n"
    exec(text, made)
    assert gate_of(made["Made"]()) is None
    model = Feed()
    model.forward = model.forward  # type: ignore[method-assign]
    assert gate_of(model) is None


def test_a_source_that_changed_since_it_was_imported_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(-x))

    class Changed(Feed):
        pass

    Changed.forward = forward  # type: ignore[method-assign]
    text = "def forward(self, x):\n    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\n"
    monkeypatch.setattr("inspect.getsource", lambda function: text)
    assert gate_of(Changed()) is None


def _called(act: Any) -> str:
    return str(getattr(act, "__name__", type(act).__name__))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(), nn.ReLU(), nn.ReLU6(), F.silu, F.gelu], ids=_called)
def test_bits_are_those_of_the_specification(act: Any, dtype: torch.dtype) -> None:
    model, x = quantised(Feed(act), dtype=dtype), X.to(dtype)
    before = model(x)
    pyquant.fuse_(model)
    assert isinstance(model[0], GatedFeed)
    assert isinstance(model[0], Feed)
    if isinstance(act, nn.Module):
        assert torch.equal(model(x), by_hand(model[0], x))
    assert model(x).dtype == dtype
    torch.testing.assert_close(model(x).double(), before.double(), rtol=0, atol=0.03)
    for shape in ((2, 3, 32), (1, 32), (0, 32)):
        rows = torch.randn(shape).to(dtype)
        want = by_hand(model[0], rows.reshape(-1, 32)) if isinstance(act, nn.Module) else model(rows)
        assert torch.equal(model(rows).reshape(-1, 32), want.reshape(-1, 32))


@pytest.mark.parametrize(
    "scheme", [W8A8Dynamic(), W4A8Dynamic(16), W4A4Dynamic(), W8A8Dynamic(symmetric_inputs=False)], ids=str
)
def test_schemes(scheme: pyquant.QScheme) -> None:
    model = pyquant.fuse_(quantised(scheme=scheme))
    assert torch.equal(model(X), by_hand(model[0], X))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_and_ups_of_one_layer(dtype: torch.dtype) -> None:
    model, x = quantised(Joined(nn.GELU()), dtype=dtype), X.to(dtype)
    before = model(x)
    assert isinstance(pyquant.fuse_(model)[0], GatedFeed)  # type: ignore[index]
    both = model[0].gate_up_proj.reference(x)
    middle = numerics.activation_mul(both[:, :48].contiguous(), both[:, 48:].contiguous(), "gelu")
    assert torch.equal(model(x), model[0].down_proj.reference(middle).to(dtype))
    torch.testing.assert_close(model(x).double(), before.double(), rtol=0, atol=0.05)
    with torch.no_grad(), Called() as called:
        model(x)
    assert called.calls["pyquant::qlinear"] == 2
    assert not called.calls["aten::clone"] + called.calls["aten::mul"]
    assert not gated_feeds(pyquant.fuse_(quantised(nn.Sequential(Halves()))))


class Halves(Joined):
    """Whose layers do not fit: left for the model itself to say."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(32, 100)


def test_one_op_is_between_the_products() -> None:
    model = quantised()
    with torch.no_grad(), Called() as plain:
        model(X)
    pyquant.fuse_(model)
    with torch.no_grad(), Called() as fused:
        model(X)
    assert plain.calls["aten::silu"] == plain.calls["aten::mul"] == 1
    assert {name: count for name, count in fused.calls.items() if name.startswith("pyquant")} == {
        "pyquant::qlinear": 3,
        "pyquant::activation_mul_quantize": 1,
    }
    assert not fused.calls["aten::silu"] + fused.calls["aten::mul"]


@pytest.mark.parametrize("first", ["fuse", "merge"])
def test_merged_layers_are_one_product_that_is_not_taken_apart(first: str) -> None:
    model = quantised()
    want = pyquant.fuse_(copy.deepcopy(model))(X)
    steps = (pyquant.fuse_, pyquant.merge_) if first == "fuse" else (pyquant.merge_, pyquant.fuse_)
    for step in steps:
        step(model)
    assert isinstance(model[0], GatedFeed)
    with torch.inference_mode(), Called() as called:
        got = model(X)
    assert torch.equal(got, want)
    assert called.calls["pyquant::qlinear"] == 2
    assert not called.calls["aten::clone"]
    hooks: list[int] = []
    model[0].up_proj.register_forward_hook(lambda *_: hooks.append(1))
    assert torch.equal(model(X), want)
    assert hooks == [1]


def _hook(name: str, seen: list[str]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        getattr(model[0], name).register_forward_hook(lambda *_: seen.append(name))  # type: ignore[index]

    return change


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj", "act_fn"])
def test_hooks_run_whenever_they_come(name: str) -> None:
    seen: list[str] = []
    late, early = pyquant.fuse_(quantised()), quantised()
    plain = quantised()(X)
    for model in (late, early):
        _hook(name, seen)(model)
    pyquant.fuse_(early)
    assert not isinstance(early[0], GatedFeed)
    for model in (late, early):
        torch.testing.assert_close(model(X), plain, rtol=0, atol=0.03)
    assert seen == [name, name]


class Adapter(nn.Module):
    """As LoRA wraps a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 1.0


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_a_layer_that_something_wraps_is_called(name: str) -> None:
    model = pyquant.fuse_(quantised())
    other = quantised()
    for one in (model, other):
        setattr(one[0], name, Adapter(getattr(one[0], name)))
    assert torch.equal(model(X), other(X))


def test_gradients_are_those_of_the_layers() -> None:
    model, other = pyquant.fuse_(quantised()), quantised()
    grads = []
    for one in (model, other):
        x = X.clone().requires_grad_()
        one(x).square().sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    assert torch.equal(*grads)
    assert torch.equal(torch.func.vmap(model)(X[:, None])[:, 0], model(X))
    assert torch.equal(model(X[0]), other(X[0]))  # one dimension


@pytest.mark.parametrize("down", [W8A8(), W4A16(16), None], ids=str)
def test_only_a_layer_that_quantises_its_own_rows_takes_the_gate(down: pyquant.QScheme | None) -> None:
    model = nn.Sequential(Feed()).eval()
    scales = {"0.down_proj": 0.05} if down == W8A8() else None
    pyquant.quantize_(
        model,
        {"*down_proj": down, "*": W8A8Dynamic()},
        input_scales=scales,
        check_speed=False,
    )
    pyquant.fuse_(model)
    assert not gated_feeds(model)


def test_a_shared_layer_is_left_alone() -> None:
    model = nn.Sequential(Feed(), Feed()).eval()
    model[1].gate_proj = model[0].gate_proj
    pyquant.quantize_(model, W8A8Dynamic(), check_speed=False)
    assert not gated_feeds(pyquant.fuse_(model))


def test_a_shared_module_is_fused_once() -> None:
    feed = Feed()
    model = pyquant.quantize_(nn.Sequential(feed, nn.ReLU(), feed).eval(), W8A8Dynamic(), check_speed=False)
    assert list(gated_feeds(pyquant.fuse_(model))) == ["0", "2"]
    assert not gated_feeds(pyquant.dequantize_(model))
    assert type(model[0]) is Feed


def test_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyquant.nn.fuse as fuse

    model = quantised(nn.Sequential(Feed(), ByFunction()))
    y, held = model(X), [(type(m), set(m.__dict__)) for m in model.modules()]
    real, count = fuse.make_gated, 0

    def failing(*args: Any) -> None:
        nonlocal count
        real(*args)
        count += 1
        if count == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(fuse, "make_gated", failing)
    with pytest.raises(KeyboardInterrupt):
        pyquant.fuse_(model)
    assert [(type(m), set(m.__dict__)) for m in model.modules()] == held
    assert torch.equal(model(X), y)


def test_copies_pickles_and_reports() -> None:
    model = pyquant.fuse_(quantised())
    want, keys = model(X), list(quantised().state_dict())
    assert list(model.state_dict()) == keys
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert type(other[0]) is type(model[0])
        assert torch.equal(other(X), want)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(X), want)
    assert [(r.name, r.fused) for r in pyquant.quantization_report(model) if r.fused] == [("0.down_proj", "0.act_fn")]
    assert type(model[0]).__name__ == "GatedFeed"
    assert pyquant.fuse_(model) is model
    assert torch.equal(model(X), want)


def test_back_to_floats() -> None:
    model = pyquant.dequantize_(pyquant.fuse_(quantised()))
    assert type(model[0]) is Feed
    assert "_gate" not in model[0].__dict__
    assert torch.equal(model(X), pyquant.dequantize_(quantised())(X))


def test_compile_and_export_have_its_bits() -> None:
    model = pyquant.fuse_(quantised())
    with torch.no_grad():
        want = model(X)
        assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(X), want)
        program = torch.export.export(model, (X,))
        assert torch.equal(program.module()(X), want)
    assert sum("activation_mul_quantize" in str(node.target) for node in program.graph.nodes) == 1
    traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(X), want, rtol=0, atol=0.03)
    torch._dynamo.reset()


def test_autocast() -> None:
    model, other = pyquant.fuse_(quantised()), quantised()
    with torch.autocast("cpu", torch.bfloat16):
        got, want = model(X), other(X)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0.05)


# ---- checkpoints


@pytest.mark.parametrize("start", ["float", "meta", "fused"])
def test_round_trip(tmp_path: Path, start: str) -> None:
    model = pyquant.fuse_(quantised())
    digest = pyquant.save_pretrained(model, tmp_path / "a")
    with torch.device("meta" if start == "meta" else "cpu"):
        built = nn.Sequential(Feed()) if start != "fused" else pyquant.fuse_(quantised())
    again = pyquant.load_pretrained(tmp_path / "a", built).eval()
    assert isinstance(again[0], GatedFeed)
    assert torch.equal(again(X), model(X))
    assert pyquant.save_pretrained(again, tmp_path / "b") == digest


def test_files_of_models_without_gates_are_as_before(tmp_path: Path) -> None:
    pyquant.save_pretrained(quantised(), tmp_path)
    assert "gated" not in (tmp_path / "manifest.json").read_text()


def test_another_model_is_refused_and_unchanged(tmp_path: Path) -> None:
    pyquant.save_pretrained(pyquant.fuse_(quantised()), tmp_path / "fused")
    pyquant.save_pretrained(quantised(), tmp_path / "plain")
    other = nn.Sequential(Residual())
    with pytest.raises(CheckpointError, match=r"'0' was saved as down\(activation.*has a Residual there"):
        pyquant.load_pretrained(tmp_path / "fused", other)
    assert type(other[0].gate_proj) is nn.Linear
    with pytest.raises(CheckpointError, match="'0' was fused in the model and not in the file"):
        pyquant.load_pretrained(tmp_path / "plain", pyquant.fuse_(quantised()))


@pytest.mark.parametrize("own", [{"gated": "0"}, {"gated": [1]}, {"gated": ["1"]}, {"gated": ["0.gate_proj"]}])
def test_junk_in_the_file_is_refused(tmp_path: Path, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from pyquant.io.pretrained import save

    monkeypatch.setattr(save, "gated_feeds", lambda model: {})
    model = quantised()
    real = save.save_checkpoint

    def with_junk(*args: Any, extra: dict[str, Any], **options: Any) -> str:
        extra[save.OWN_EXTRA] |= own
        return real(*args, extra=extra, **options)

    monkeypatch.setattr(save, "save_checkpoint", with_junk)
    pyquant.save_pretrained(model, tmp_path)
    with pytest.raises(CheckpointError):
        pyquant.load_pretrained(tmp_path, nn.Sequential(Feed()))


# ---- models of others


def test_a_llama_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_hidden_layers=2, vocab_size=64, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    pyquant.quantize_(model, {"*lm_head*": None, "*": "W8A8Dynamic"}, check_speed=False)
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        before = model(ids).logits
        pyquant.fuse_(model)
        assert sorted(gated_feeds(model)) == ["model.layers.0.mlp", "model.layers.1.mlp"]
        assert all(
            isinstance(m, transformers.models.llama.modeling_llama.LlamaMLP) for m in gated_feeds(model).values()
        )
        torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=0.05)
        merged = pyquant.merge_(copy.deepcopy(model))
        assert torch.equal(merged(ids).logits, model(ids).logits)


def test_the_kinds_are_made_once() -> None:
    assert gated_feed._kind(Feed) is gated_feed._kind(Feed)
