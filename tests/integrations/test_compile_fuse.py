"""FusePass: a compiled model calls the ops that it would call by hand, and gives their bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyquant
from pyquant import ops
from pyquant.core.presets import FP16, W4A16, W8A8, W4A4Dynamic, W4A8Dynamic, W8A8Dynamic
from pyquant.core.qtensor import QTensor
from pyquant.errors import ArgumentError
from pyquant.integrations.compile import FusePass, fuse_exported, fuse_options

X = torch.linspace(-2, 2, 6 * 32).reshape(6, 32).sin()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def quantised(model: nn.Module, scheme: Any = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return pyquant.quantize_(model.eval(), scheme or W8A8Dynamic(), check_speed=False, **options)


def our_ops(graph: torch.fx.Graph) -> Counter[str]:
    targets = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    return Counter(t.split(".")[1] for t in targets if t.startswith("pyquant."))


class Fused:
    """A model through Dynamo and the pass; what inductor would compile is run as it is."""

    def __init__(self, model: nn.Module, dynamic: bool | None = None, **options: bool) -> None:
        self.fusing, self.graphs = FusePass(**options), []
        self._call = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=self._backend)

    def _backend(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.fusing(graph.graph)
        graph.graph.lint()
        graph.recompile()
        self.graphs.append(graph.graph)
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, inputs)

    def __call__(self, *inputs: Tensor) -> Any:
        with torch.no_grad():
            return self._call(*inputs)

    @property
    def ops(self) -> Counter[str]:
        return our_ops(self.graphs[-1])


# ---- a block of Llama


class RMSNorm(nn.Module):
    """As transformers writes LlamaRMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.linspace(0.5, 1.5, width)), 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module] = RMSNorm, width: int = 32, inner: int = 64) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down, self.act_fn = nn.Linear(inner, width, bias=False), nn.SiLU()

    def attend(self, h: Any, shape: torch.Size) -> Tensor:
        heads = (linear(h).view(*shape[:2], 4, -1).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.attend(self.norm1(x), x.shape))
        h = self.norm2(x)
        return x + self.down(self.act_fn(self.gate(h)) * self.up(h))


def by_hand(block: Any, x: Tensor) -> Tensor:
    """The same block with pyquant's ops called by their names."""

    def codes(norm: Any, x: Tensor) -> QTensor:
        q, scale, _ = ops.rms_norm_quantize(x, norm.weight, 1e-6)
        return QTensor(q, scale, None)

    x = block.o(block.attend(codes(block.norm1, x), x.shape), x)
    h = codes(block.norm2, x)
    q, scale, _ = ops.activation_mul_quantize(block.gate(h), block.up(h), "silu")
    return block.down(QTensor(q, scale, None), x)  # type: ignore[no-any-return]


OF_BLOCK = {"qlinear": 7, "rms_norm_quantize": 2, "activation_mul_quantize": 1}
FOLDED = {"gates": 1, "residuals": 2, "norms": 2}


class Called(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the calls of our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "pyquant":
            self.calls[op._schema.name.split("::")[1]] += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_block_of_llama_is_as_by_hand(dtype: torch.dtype, dynamic: bool | None) -> None:
    model = quantised(nn.Sequential(Block().to(dtype)))
    assert all(layer.dtype == dtype for layer in model.modules() if isinstance(layer, pyquant.QLinear))
    for layer in model.modules():  # codes of a norm give the type of the model
        assert not isinstance(layer, pyquant.QLinear) or layer.dtype == dtype
    fused = Fused(model, dynamic)
    for shape in ((2, 5, 32), (3, 7, 32), (2, 9, 32)):
        x = torch.randn(shape, dtype=dtype)
        with torch.no_grad(), Called() as called:
            want = by_hand(model[0], x)
        assert called.calls == OF_BLOCK
        got = fused(x)
        assert got.dtype == dtype
        assert torch.equal(got, want)
        assert fused.ops == OF_BLOCK
        unfused = model(x).double()
        assert float((got.double() - unfused).norm() / unfused.norm()) < 0.02
    assert {name: count / len(fused.graphs) for name, count in fused.fusing.folded.items()} == FOLDED


def test_an_exported_block_is_too(tmp_path: Path) -> None:
    model, rows = quantised(nn.Sequential(Block())), torch.export.Dim("rows", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(2, 5, 32),), dynamic_shapes=({1: rows},))
        assert our_ops(program.graph) == {"qlinear": 7}
        assert fuse_exported(program) == FOLDED
        assert our_ops(program.graph) == OF_BLOCK
        torch.export.save(program, tmp_path / "block.pt2")
        for saved in (program, torch.export.load(tmp_path / "block.pt2")):
            x = torch.randn(2, 9, 32)
            assert torch.equal(saved.module()(x), by_hand(model[0], x))


@pytest.mark.nightly
@pytest.mark.parametrize("cached", [False, True])
def test_inductor_compiles_it_with_and_without_its_caches(cached: bool) -> None:
    """A graph that comes from a cache was fused when it went in: the pass is not asked again."""
    model = quantised(nn.Sequential(Block()))
    for again in (False, True):
        torch._dynamo.reset()
        options = fuse_options()
        compiled, x = torch.compile(model, fullgraph=True, options=options), torch.randn(2, 5, 32)
        with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=not cached):
            torch.testing.assert_close(compiled(x), by_hand(model[0], x), rtol=1e-5, atol=1e-5)
        folded = options["pre_grad_custom_pass"].folded
        assert folded == FOLDED or (cached and not folded), again


# ---- gates, activations and residuals


class Gated(nn.Module):
    """Three layers, and what a function makes of them and the input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 8)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.gate, self.up, self.down)


def _written(x: Tensor, gate: Any, up: Any, down: Any) -> Tensor:
    g, u = gate(x), up(x)
    curve = F.silu(g)
    g.mul_(2)  # what the activation read before
    return down(curve * u)


# function -> its activation, or None: the gate is left alone
GATES: dict[str, tuple[Callable[..., Any], str | None]] = {
    "silu": (lambda x, g, u, d: d(F.silu(g(x)) * u(x)), "silu"),
    "the other way": (lambda x, g, u, d: d(u(x) * F.gelu(g(x))), "gelu"),
    "torch.mul": (lambda x, g, u, d: d(torch.mul(F.relu(g(x)), u(x))), "relu"),
    "of no layer": (lambda x, g, u, d: d(F.gelu(x.repeat(1, 2)[:, :48], approximate="tanh") * u(x)), "gelu_tanh"),
    "limits": (lambda x, g, u, d: d(F.hardtanh(g(x), -0.5, 0.25) * u(x)), "clamp"),
    "two readers": (lambda x, g, u, d: (lambda h: d(h) + d(h))(F.silu(g(x)) * u(x)), "silu"),
    "another reader": (lambda x, g, u, d: (d(h := F.silu(g(x)) * u(x)), h), None),
    "the activation is read": (lambda x, g, u, d: (d((h := F.silu(g(x))) * u(x)), h), None),
    "broadcast": (lambda x, g, u, d: d(F.silu(g(x)) * u(x)[:1]), None),
    "a number": (lambda x, g, u, d: d(F.silu(g(x)) * 2.0), None),
    "other function": (lambda x, g, u, d: d(torch.sigmoid(g(x)) * u(x)), None),
    "sum": (lambda x, g, u, d: d(F.silu(g(x)) + u(x)), None),
    "written": (_written, None),
}


@pytest.mark.parametrize("name", GATES)
def test_gates(name: str) -> None:
    function, activation = GATES[name]
    model = quantised(nn.Sequential(Gated(function)))
    fused = Fused(model)
    got = fused(X)
    assert fused.fusing.folded["gates"] == (activation is not None)
    feed = model[0]
    with torch.no_grad():
        if activation is None or name == "two readers":
            hand = Fused(model, gates=False)(X)
            torch.testing.assert_close(got, hand, rtol=0, atol=0.02)
            return
        a = X.repeat(1, 2)[:, :48] if name == "of no layer" else feed.gate(X)
        q, scale, _ = ops.activation_mul_quantize(a, feed.up(X), activation, -0.5, 0.25)
        assert torch.equal(got, feed.down(QTensor(q, scale, None)))


def test_a_gate_of_layers_with_static_or_affine_inputs() -> None:
    static = {"down": W8A8(), "*": W8A8Dynamic()}
    model = quantised(
        nn.Sequential(Gated(GATES["silu"][0])), {f"*{k}": v for k, v in static.items()}, input_scales={"0.down": 0.02}
    )
    fused = Fused(model)
    fused(X)
    assert fused.fusing.folded == {"activations": 1}
    model = quantised(nn.Sequential(Gated(GATES["silu"][0])), W8A8Dynamic(symmetric_inputs=False))
    fused, feed = Fused(model), model[0]
    with torch.no_grad():
        codes = ops.activation_mul_quantize(feed.gate(X), feed.up(X), "silu", 0.0, 0.0, False, -128, 127)
        assert torch.equal(fused(X), feed.down(QTensor(*codes)))


class Method(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


ACTIVATIONS = {
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "relu": nn.ReLU(),
    "relu in place": nn.ReLU(inplace=True),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(-0.5, 0.25),
}
SCHEMES = [W8A8Dynamic(), W4A8Dynamic(16), W4A16(16), FP16("bfloat16")]


PAIRS = [
    pytest.param(name, scheme, marks=() if scheme is SCHEMES[0] or name == "gelu" else pytest.mark.nightly)
    for name in ACTIVATIONS
    for scheme in SCHEMES
]


@pytest.mark.parametrize(("name", "scheme"), PAIRS, ids=str)
def test_activations_are_those_of_fuse(name: str, scheme: Any) -> None:
    model = quantised(nn.Sequential(nn.Linear(32, 24), ACTIVATIONS[name], nn.Linear(24, 8)), scheme)
    layers = list(model)
    hand = pyquant.fuse_(model)
    assert isinstance(hand[1], nn.Identity)
    fused = Fused(nn.Sequential(*layers))
    assert torch.equal(fused(X), hand(X))
    assert fused.fusing.folded == {"activations": 1}


def test_convolutions_static_layers_and_dropout_too() -> None:
    model = quantised(nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Dropout(0.5), nn.GELU()))
    x = torch.randn(2, 4, 9, 9)
    fused = Fused(model)
    got = fused(x)
    assert fused.fusing.folded == {"activations": 2}
    hand = nn.Sequential(model[0].with_activation("relu"), model[2].with_activation("gelu"))
    assert torch.equal(got, hand(x))
    static = quantised(nn.Sequential(nn.Linear(32, 24), Method()), W8A8(), input_scales={"0": 0.02})
    fused = Fused(static)
    assert torch.equal(fused(X), static[0].with_activation("relu")(X))
    assert fused.fusing.folded == {"activations": 1}


class Two(nn.Module):
    """Two layers, and what a function makes of them and the input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(32, 32), nn.Linear(32, 32), function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.a, self.b)


# function -> (what is folded, the same by hand)
RESIDUALS: dict[str, tuple[Callable[..., Any], dict[str, int], Callable[..., Any]]] = {
    "left": (lambda x, a, b: a(x) + x, {"residuals": 1}, lambda x, a, b: a(x, x)),
    "right": (lambda x, a, b: x + a(x), {"residuals": 1}, lambda x, a, b: a(x, x)),
    "torch.add": (lambda x, a, b: torch.add(x, a(x)), {"residuals": 1}, lambda x, a, b: a(x, x)),
    "method": (lambda x, a, b: x.add(a(x)), {"residuals": 1}, lambda x, a, b: a(x, x)),
    "two layers": (lambda x, a, b: a(x) + b(x), {"residuals": 1}, lambda x, a, b: b(x, a(x))),
    "after an activation": (
        lambda x, a, b: x + F.relu(a(x)),
        {"activations": 1, "residuals": 1},
        lambda x, a, b: a.with_activation("relu")(x, x),
    ),
    "dropout that is off": (
        lambda x, a, b: x + F.dropout(a(x), 0.1, training=False),
        {"residuals": 1},
        lambda x, a, b: a(x, x),
    ),
}


@pytest.mark.parametrize("name", RESIDUALS)
def test_residuals(name: str) -> None:
    function, folded, hand = RESIDUALS[name]
    model = quantised(nn.Sequential(Two(function)))
    fused = Fused(model)
    got = fused(X)
    assert fused.fusing.folded == folded
    with torch.no_grad():
        assert torch.equal(got, hand(X, model[0].a, model[0].b))


def _changed_between(x: Tensor, a: Any, b: Any) -> Tensor:
    x = x * 1
    y = a(x)
    x.mul_(2)
    return F.relu(y) + x  # the layer read x before


def _residual_changed(x: Tensor, a: Any, b: Any) -> Tensor:
    r = x * 1
    y = a(x)
    r += 1
    return y + r


LEFT_ALONE: dict[str, Callable[..., Any]] = {
    "read twice": lambda x, a, b: (F.gelu(y := a(x)), y),
    "other function": lambda x, a, b: torch.tanh(a(x)),
    "a number": lambda x, a, b: a(x) + 1.0,
    "alpha": lambda x, a, b: torch.add(a(x), x, alpha=2),
    "broadcast": lambda x, a, b: a(x) + x[:1],
    "wider": lambda x, a, b: a(x) + x[None].repeat(2, 1, 1),
    "other type": lambda x, a, b: a(x) + x.double(),
    "itself": lambda x, a, b: (lambda y: y + y)(a(x)),
    "activation of the sum": lambda x, a, b: F.relu(a(x) * x),
    "norm read by others": lambda x, a, b: (lambda h: a(h) * h)(F.rms_norm(x, (32,))),
    "no norm": lambda x, a, b: a(x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)),
    "norm over more": lambda x, a, b: a(F.layer_norm(x, (6, 32))),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_something_else_is_left_alone(name: str) -> None:
    model = quantised(nn.Sequential(Two(LEFT_ALONE[name])))
    fused = Fused(model)
    got = fused(X)
    assert not fused.fusing.folded
    with torch.no_grad():
        want = model(X)
    for a, b in zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]:
        assert torch.equal(a, b)


@pytest.mark.parametrize("function", [_changed_between, _residual_changed])
def test_nothing_moves_over_a_write(function: Callable[..., Any]) -> None:
    model = quantised(nn.Sequential(Two(function)))
    fused = Fused(model)
    got = fused(X)
    with torch.no_grad():
        want = model(X)
    assert not fused.fusing.folded
    torch.testing.assert_close(got, want, rtol=0, atol=0)


class Cached(nn.Module):
    """A buffer that every call writes into, in a way whose result nobody reads."""

    def __init__(self, write: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.write = nn.Linear(32, 32), nn.Linear(32, 32), write
        self.register_buffer("cache", torch.zeros(8, 32))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        self.write(self.cache, h)
        return self.b(h) + self.cache[: len(x)]


def _set(cache: Tensor, h: Tensor) -> None:
    cache[1 : 1 + len(h)] = h


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy_": lambda cache, h: cache[: len(h)].copy_(h),
    "index_copy_": lambda cache, h: cache.index_copy_(0, torch.arange(len(h)) + 1, h),
    "add_": lambda cache, h: cache.narrow(0, 1, len(h)).add_(h),
    "out=": lambda cache, h: torch.mul(h, 2.0, out=cache[: len(h)]),
    "setitem": _set,
    "relu inplace": lambda cache, h: F.relu(cache[: len(h)].copy_(h), inplace=True),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_nobody_reads_stays(name: str) -> None:
    """Such as that of a cache of keys and values, beside layers that are folded."""
    model = quantised(nn.Sequential(Cached(WRITES[name])))
    with torch.no_grad():
        want = model(X)
    kept = model[0].cache.clone()
    model[0].cache.zero_()
    fused = Fused(model)
    got = fused(X)
    assert fused.fusing.folded["activations"] == 1
    assert kept.any()
    assert torch.equal(model[0].cache, kept)
    assert torch.equal(got, want)
    model[0].cache.zero_()
    with torch.no_grad():
        program = torch.export.export(model, (X,))
    assert fuse_exported(program)["activations"] == 1
    again = program.module()
    assert torch.equal(again(X), want)
    assert torch.equal(again.state_dict()["0.cache"], kept)


# ---- norms


def _layer_norm(x: Tensor, norm: Any) -> tuple[Tensor, ...]:
    return ops.layer_norm_quantize(x, norm.weight, norm.bias, norm.eps)


NORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor, Any], tuple[Tensor, ...]]]] = {
    "RMSNorm": (lambda: nn.RMSNorm(32, eps=1e-5), lambda x, n: ops.rms_norm_quantize(x, n.weight, 1e-5)),
    "RMSNorm, eps of the type": (
        lambda: nn.RMSNorm(32),
        lambda x, n: ops.rms_norm_quantize(x, n.weight, torch.finfo(torch.float32).eps),
    ),
    "RMSNorm without weights": (
        lambda: nn.RMSNorm(32, eps=1e-5, elementwise_affine=False),
        lambda x, n: ops.rms_norm_quantize(x, None, 1e-5),
    ),
    "written out": (lambda: RMSNorm(32), lambda x, n: ops.rms_norm_quantize(x, n.weight, 1e-6)),
    "LayerNorm": (lambda: nn.LayerNorm(32), _layer_norm),
    "LayerNorm without bias": (lambda: nn.LayerNorm(32, bias=False), _layer_norm),
    "LayerNorm without weights": (lambda: nn.LayerNorm(32, elementwise_affine=False), _layer_norm),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_give_the_codes_of_their_ops(name: str) -> None:
    make, codes = NORMS[name]
    norm = make()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    model = quantised(nn.Sequential(norm, nn.Linear(32, 24)))
    fused = Fused(model)
    got = fused(X)
    assert fused.fusing.folded == {"norms": 1}
    q, scale, _ = codes(X, norm)
    assert torch.equal(got, model[1](QTensor(q, scale, None)))


def test_affine_inputs_get_zero_points_and_four_bits_their_range() -> None:
    for scheme, limits in ((W8A8Dynamic(symmetric_inputs=False), (False, -128, 127)), (W4A4Dynamic(), (True, -7, 7))):
        torch._dynamo.reset()
        norm = nn.RMSNorm(32, eps=1e-5)
        model = quantised(nn.Sequential(norm, nn.Linear(32, 24)), scheme)
        fused = Fused(model)
        got = fused(X)
        assert fused.fusing.folded == {"norms": 1}
        q, scale, zero_point = ops.rms_norm_quantize(X, norm.weight, 1e-5, *limits)
        assert torch.equal(got, model[1](QTensor(q, scale, None if limits[0] else zero_point)))


def test_layers_that_want_other_codes_keep_the_norm() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a, self.b = nn.RMSNorm(32), nn.Linear(32, 8), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            return self.a(h) * self.b(h)

    two = quantised(nn.Sequential(Branches()), {"0.a": W8A8Dynamic(), "0.b": W4A4Dynamic(), "_default": W8A8Dynamic()})
    static = quantised(nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 8)), W8A8(), input_scales={"1": 0.02})
    for model in (two, static, quantised(nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 8)), W4A16(16))):
        torch._dynamo.reset()
        fused = Fused(model)
        assert torch.equal(fused(X), model(X))
        assert not fused.fusing.folded


# ---- the pass itself


def test_what_is_trained_is_not_touched() -> None:
    model = quantised(nn.Sequential(nn.Linear(32, 24), nn.ReLU()))
    fusing = FusePass()

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        fusing(graph.graph)
        return graph.forward

    compiled, x = torch.compile(model, backend=backend), X.clone().requires_grad_()
    compiled(x).sum().backward()
    want = X.clone().requires_grad_()
    model(want).sum().backward()
    assert not fusing.folded
    assert x.grad is not None
    assert torch.equal(x.grad, want.grad)


def test_options_choose_and_tell_caches_apart() -> None:
    model = quantised(nn.Sequential(Block()))
    for name in FOLDED:
        torch._dynamo.reset()
        fused = Fused(model, **{name: False})
        fused(torch.randn(2, 5, 32))
        instead = {"activations": 1} if name == "gates" else {}  # the curve becomes the layer's epilogue
        assert fused.fusing.folded == {other: n for other, n in FOLDED.items() if other != name} | instead
    ids = {FusePass(**options).uuid() for options in ({}, {"norms": False}, {"residuals": False})}
    assert len(ids) == 3
    assert FusePass().uuid() == FusePass(norms=True).uuid()
    assert list(fuse_options()) == ["pre_grad_custom_pass"]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="argument 'norms'"):
        FusePass(norms="yes")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="argument 'program'"):
        fuse_exported(nn.Linear(2, 2))  # type: ignore[arg-type]
