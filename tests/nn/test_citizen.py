"""What works on nn.Linear works on a quantised layer: torch.func, tracing, autocast, meta, parameters, DDP."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from qlayers import ALL, layer
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, stack_module_state, vmap

import pyquant
from pyquant.core.presets import FP16, W4A16, W8A8, W4A8Dynamic, W8A8Dynamic

SOME = [W8A8Dynamic(), W8A8Dynamic(symmetric_inputs=False), W4A8Dynamic(16), W8A8(), W4A16(16)]


def other(q: pyquant.QLinear, **options: object) -> pyquant.QLinear:
    """Another layer of the same kind: all its numbers differ."""
    static = {"input_scale": 0.07} if q.scheme.is_static else {}
    return pyquant.QLinear.from_float(nn.Linear(32, 24), q.scheme, **static, **options)


def convolution() -> pyquant.QConv2d:
    return pyquant.QConv2d.from_float(nn.Conv2d(8, 6, 3, padding=1, stride=2), W8A8Dynamic())


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_vmap_has_a_rule(scheme: pyquant.QScheme) -> None:
    q, x = layer(scheme, activation="gelu"), torch.randn(5, 3, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        residual = torch.randn(5, 24)
        wanted = torch.stack([q(x[0, :1], r.reshape(1, 24))[0] for r in residual])
        for got, want in (
            (vmap(q)(x), q(x)),
            (vmap(q, in_dims=1, out_dims=1)(x), q(x)),
            (vmap(vmap(vmap(q)))(x.reshape(5, 3, 1, 32)), q(x).reshape(5, 3, 1, 24)),
            (vmap(lambda r: q(x[0, 0], r))(residual), wanted),
        ):
            if scheme.is_integer:
                assert torch.equal(got, want)
            else:  # sums of floats: another number of rows may take another order
                torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-3)


def test_vmap_of_convolutions_and_embeddings() -> None:
    conv, table, images = convolution(), pyquant.QEmbedding.from_float(nn.Embedding(9, 8)), torch.randn(4, 2, 8, 7, 7)
    ids = torch.tensor([[1, 2], [8, 0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(vmap(conv)(images), torch.stack([conv(z) for z in images]))
        assert torch.equal(vmap(table)(ids), table(ids))


@pytest.mark.parametrize("scheme", SOME, ids=str)
def test_derivatives(scheme: pyquant.QScheme) -> None:
    q, x = layer(scheme, activation="gelu"), torch.randn(32)
    want = torch.autograd.functional.jacobian(q, x)
    assert float(want.abs().max()) > 0.01
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        torch.testing.assert_close(jacrev(q)(x), want, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(jacfwd(q)(x), want, atol=1e-5, rtol=1e-4)
        rows = torch.randn(3, 32)
        each = torch.stack([torch.autograd.functional.jacobian(q, r).sum(0) for r in rows])
        torch.testing.assert_close(vmap(grad(lambda r: q(r).sum()))(rows), each, atol=1e-4, rtol=1e-4)


def test_derivatives_of_a_convolution() -> None:
    conv, z = convolution(), torch.randn(2, 8, 7, 7)

    def total(x: Tensor) -> Tensor:
        return conv(x).sum((0, 2, 3))

    want = torch.autograd.functional.jacobian(total, z)
    torch.testing.assert_close(jacrev(total)(z), want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(jacfwd(total, randomness="same")(z), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("scheme", [*SOME, FP16()], ids=str)
def test_functional_call_takes_every_tensor(scheme: pyquant.QScheme) -> None:
    q, x = layer(scheme), torch.randn(3, 32)
    new, model = other(q), nn.Sequential(q)
    before, wanted = model(x), new(x)
    assert torch.equal(functional_call(model, model.state_dict(), (x,)), before)
    for reverse in (False, True):
        state = dict(sorted((("0." + n, t) for n, t in new.state_dict().items()), reverse=reverse))
        given = dict(state)
        assert torch.equal(functional_call(model, state, (x,)), wanted)
        assert torch.equal(model(x), before)
        half = copy.deepcopy(model).half()  # whose bias shows float16, and is held in float32
        functional_call(half, state, (x.half(),))
        for name, tensor in given.items():  # torch writes back what it finds in the layer
            assert (type(state[name]), state[name].dtype) == (type(tensor), tensor.dtype), name
            assert torch.equal(state[name], tensor), name
    bias = torch.randn(24)
    twin = copy.deepcopy(q)
    twin.bias = bias
    assert torch.equal(functional_call(model, {"0.bias": bias}, (x,)), twin(x))
    assert torch.equal(model(x), before)
    with pytest.raises(pyquant.ArgumentError, match="weight"):
        functional_call(model, {"0.weight": torch.zeros(24, 32, dtype=torch.float64)}, (x,))
    assert torch.equal(model(x), before)


AFFINE = pyquant.QScheme(
    weights=pyquant.TensorScheme(granularity="per_channel"), inputs=pyquant.TensorScheme(symmetric=False)
)
BATCHES = {
    "input_zero_point": lambda: torch.arange(-2, 3, dtype=torch.int32)[:, None],
    "input_scale": lambda: rows(1),
    "bias": lambda: rows(24),
    "weight_scale": lambda: rows(24),
    "weight": lambda: torch.randint(-9, 9, (5, 24, 32), dtype=torch.int8),
}


def rows(count: int) -> torch.Tensor:
    return torch.rand(5, count) + 0.1


@pytest.mark.parametrize("names", [*((name,) for name in BATCHES), ("input_zero_point", "weight"), ("weight", "bias")])
def test_vmap_over_the_numbers_of_a_layer(names: tuple[str, ...]) -> None:
    """Zero points too; and the layer is afterwards what it was: nothing of the batch stays behind."""
    q = pyquant.QLinear.from_float(nn.Linear(32, 24), AFFINE, input_scale=0.05, input_zero_point=3)
    x, batch = torch.randn(3, 32), {name: BATCHES[name]() for name in names}
    before, state = q(x), {n: t.clone() for n, t in q.state_dict().items()}
    got = vmap(lambda numbers: functional_call(q, numbers, (x,)))(batch)
    assert torch.equal(q(x), before)
    assert {n: t.tolist() for n, t in q.state_dict().items()} == {n: t.tolist() for n, t in state.items()}
    want = [functional_call(q, {n: t[i] for n, t in batch.items()}, (x,)) for i in range(5)]
    assert torch.equal(got, torch.stack(want))


def test_vmap_over_zero_points_beyond_the_codes_is_refused() -> None:
    q = pyquant.QLinear.from_float(nn.Linear(32, 24), AFFINE, input_scale=0.05, input_zero_point=3)
    before = q(torch.ones(2, 32))
    with pytest.raises(ValueError, match="'x_zero_point': got a zero point of 300"):
        vmap(lambda z: functional_call(q, {"input_zero_point": z}, (torch.ones(2, 32),)))(
            torch.tensor([[0], [300]], dtype=torch.int32)
        )
    assert torch.equal(q(torch.ones(2, 32)), before)


@pytest.mark.parametrize("scheme", SOME, ids=str)
def test_an_ensemble_under_vmap(scheme: pyquant.QScheme) -> None:
    q = layer(scheme)
    models = [nn.Sequential(q), nn.Sequential(other(q))]
    parameters, buffers = stack_module_state(models)
    x = torch.randn(3, 32)
    want = torch.stack([m(x) for m in models])
    for shell in (
        models[0],
        copy.deepcopy(models[0]).to("meta"),
    ):  # without weights of its own, as torch's tutorial has it
        y = vmap(lambda p, b, shell=shell: functional_call(shell, (p, b), (x,)))(parameters, buffers)
        assert torch.equal(y, want)
    assert torch.equal(functional_call(shell, {n: t[1] for n, t in {**parameters, **buffers}.items()}, (x,)), want[1])


@pytest.mark.parametrize("scheme", SOME, ids=str)
def test_derivatives_by_frozen_numbers_are_refused_and_those_by_inputs_are_not(scheme: pyquant.QScheme) -> None:
    q, x = layer(scheme), torch.randn(3, 32)
    state = q.state_dict()

    def loss(numbers: dict[str, Tensor], rows: Tensor) -> Tensor:
        return functional_call(q, {**state, **numbers}, (rows,)).square().sum()

    for name in ("bias", "weight_scale"):
        given = {name: state[name].clone()}
        for derive in (grad(loss), jacrev(loss), jacfwd(loss), vmap(grad(loss), in_dims=(None, 0))):
            with pytest.raises(pyquant.UnsupportedError, match=f"derivative by {name}.*prepare_qat_"):
                derive(given, x)
        torch.testing.assert_close(grad(loss, argnums=1)(given, x), grad(lambda r: q(r).square().sum())(x))
        torch.testing.assert_close(jacfwd(loss, argnums=1)(given, x), grad(loss, argnums=1)(given, x))
        assert torch.equal(q.state_dict()[name], state[name])
    trainable = nn.Parameter(state["bias"].clone())  # a frozen layer takes a Parameter's numbers, as ever
    assert torch.equal(functional_call(q, {"bias": trainable}, (x,)), q(x))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("padding", [0, 1, (2, 0)])
def test_vmap_of_static_convolutions(symmetric: bool, padding: int | tuple[int, int]) -> None:
    conv = nn.Conv2d(8, 6, 3, padding=padding)
    point = {} if symmetric else {"input_zero_point": 13}
    q = pyquant.QConv2d.from_float(conv, W8A8(symmetric_inputs=symmetric), input_scale=0.05, **point)
    images = torch.randn(4, 2, 8, 7, 7)
    assert torch.equal(vmap(q)(images), torch.stack([q(z) for z in images]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_only_looked_at_leaves_nothing_in_an_exported_graph(dtype: torch.dtype) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(32, 24)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x.to(self.fc.weight.dtype))

    model = pyquant.quantize_(Net().to(dtype), W8A8Dynamic()).eval()
    program = torch.export.export(model, (torch.randn(3, 32),)).run_decompositions()
    told = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert any("qlinear" in name for name in told)
    assert not any("dequantize" in name or "unpack" in name for name in told), told


def test_tracing_with_fx() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.fc = pyquant.QEmbedding.from_float(nn.Embedding(9, 32)), layer(W8A8Dynamic())
            self.conv = convolution()

        def forward(self, ids: Tensor, z: Tensor) -> Tensor:
            return self.fc(self.table(ids)).relu().sum() + self.conv(z).sum()

    net, args = Net(), (torch.tensor([1, 3]), torch.randn(2, 8, 7, 7))
    traced = torch.fx.symbolic_trace(net)
    assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["table", "fc", "conv"]
    assert torch.equal(traced(*args), net(*args))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scheme", [*SOME, FP16()], ids=str)
def test_tracing_with_jit_checks_itself(scheme: pyquant.QScheme) -> None:
    model, x = nn.Sequential(layer(scheme), nn.ReLU()), torch.randn(3, 32)
    assert torch.equal(torch.jit.trace(model, (x,))(x), model(x))


@pytest.mark.parametrize("scheme", [*SOME, FP16("bfloat16")], ids=str)
def test_autocast_as_linear(scheme: pyquant.QScheme) -> None:
    q, x = layer(scheme), torch.randn(3, 32)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            y, trained = q(x), q(x.clone().requires_grad_())
            with torch.autocast("cpu", enabled=False):
                outside = q(x)
        assert nn.Linear(32, 24)(x).dtype == outside.dtype == torch.float32
        assert y.dtype == trained.dtype == dtype
        assert torch.equal(y, q(x.to(dtype)))
    conv, z = convolution(), torch.randn(2, 8, 7, 7)
    with torch.autocast("cpu", torch.bfloat16):
        assert conv(z).dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_meta_and_to_empty_models_run(scheme: pyquant.QScheme) -> None:
    model = nn.Sequential(layer(scheme))
    state, x = model.state_dict(), torch.randn(2, 32)
    want = model(x)
    assert model.to("meta")(x.to("meta")).shape == want.shape
    model.to_empty(device="cpu")
    if not scheme.is_static:
        with pytest.warns(UserWarning, match="after to_empty.. multiplies by zeros: load a state_dict"):
            assert model(x).shape == want.shape
    else:
        with pytest.raises(pyquant.ArgumentError, match="load a state_dict"):
            model(x)
    model.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(model(x), want)


def test_a_model_of_codes_has_parameters() -> None:
    model = nn.Sequential(nn.Embedding(9, 32), nn.Linear(32, 24))
    pyquant.quantize_(model, W8A8Dynamic(), embeddings=True, heads=True)
    keys = list(model.state_dict())
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        first = next(model.parameters())
        assert (first.dtype, first.device.type, first.requires_grad, first.numel()) == (dtype, "cpu", False, 0)
    assert [n for n, _ in model.named_parameters()] == ["0.stand_in", "1.stand_in"]
    assert next(copy.deepcopy(model).to("meta").parameters()).is_meta
    assert not any("stand_in" in key for key in keys)
    assert str(model.load_state_dict(model.state_dict())) == "<All keys matched successfully>"
    x = torch.tensor([1, 2])
    before = model(x)
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=1.0)
    optimiser.step()
    assert nn.utils.parameters_to_vector(model.parameters()).numel() == 0
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    assert torch.equal(model(x), before)
    assert torch.equal(average(x), before)


_DDP = """
import torch, torch.distributed as dist, pyquant
from torch import nn
dist.init_process_group("gloo", init_method="file://{file}", rank=0, world_size=1)
model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4))
pyquant.quantize_(model, pyquant.W8A8Dynamic(), filter_fn=lambda m, n: n == "1")
ddp = nn.parallel.DistributedDataParallel(model)
optimiser = torch.optim.SGD(ddp.parameters(), lr=0.1)
before = [p.detach().clone() for p in model.parameters()]
ddp(torch.randn(8, 32)).square().sum().backward()
optimiser.step()
changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters())]
assert changed == [True, True, False, True, True], changed
dist.destroy_process_group()
print("trained")
"""


def test_ddp_trains_around_codes(tmp_path: Path) -> None:
    script = _DDP.format(file=tmp_path / "store")
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=300)
    assert ran.stdout.strip().endswith("trained"), ran.stderr[-2000:]


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", [W8A8Dynamic(), W4A16(16)], ids=str)
def test_aot_inductor(scheme: pyquant.QScheme, tmp_path: Path) -> None:
    model, x = nn.Sequential(*(layer(scheme, 32, 32) for _ in range(10)), nn.ReLU()).eval(), torch.randn(3, 32)
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
        assert torch.equal(torch._inductor.aoti_load_package(path)(x), model(x))


class _Every(nn.Module):
    """A layer of each class, with results of the type that its op gives by default."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(20, 32), nn.Linear(32, 32)
        self.conv = nn.Conv2d(1, 8, 3, padding=1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.conv(self.linear(self.embedding(ids))[None, None])


@pytest.mark.nightly
def test_aot_inductor_of_every_class_of_layers(tmp_path: Path) -> None:
    model = pyquant.quantize_(_Every().eval(), W8A8Dynamic(), embeddings=True, check_speed=False)
    assert {type(layer).__name__ for layer in model.children()} == {"QEmbedding", "QLinear", "QConv2d"}
    ids = torch.arange(7)
    with torch.no_grad():
        exported = torch.export.export(model, (ids,), dynamic_shapes=({0: torch.export.Dim("n", min=2, max=64)},))
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
        loaded = torch._inductor.aoti_load_package(path)
        for rows in (ids, ids[:3]):
            assert torch.equal(loaded(rows), model(rows))


def test_layers_of_many_schemes_share_one_compiled_call() -> None:
    """No guard on a scheme: Python objects that differ from layer to layer recompile until torch gives up."""
    torch._dynamo.reset()
    model = nn.Sequential(*(layer(W8A8Dynamic(), 32, 32) for _ in range(12)))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        x = torch.randn(3, 32)
        assert torch.equal(compiled(x), model(x))
