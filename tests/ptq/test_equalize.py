"""equalize_: the equations of the paper, the function to rounding, and no pair where something else looks on."""

from __future__ import annotations

import copy
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from float_models import randomise, tiny
from torch import Tensor, nn
from torch.nn import functional as F

import pyquant
from pyquant import ArgumentError, NonFiniteError, Recipe, W8A8Dynamic, equalize_, insert_fake_quantize_
from pyquant.ptq.improve import equalize, equalize_pairs
from pyquant.ptq.improve.smooth import smooth_
from pyquant.ptq.improve.smooth_rules import register_smoothing

has_transformers = importlib.util.find_spec("transformers") is not None


class Residual(nn.Module):
    """A block as ResNets have it, called by functions; only the inner pair may be scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.conv2(F.relu(self.conv1(x))))


class Net(nn.Module):
    """Pooling, a depthwise convolution, groups, a residual block, and a head behind flattened channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU())
        self.inner = nn.Sequential(
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.ReLU()), nn.Conv2d(6, 6, 1)
        )
        self.block, self.grouped = Residual(), nn.Conv2d(6, 8, 3, groups=2)
        self.pool, self.head, self.last = nn.MaxPool2d(2), nn.Linear(8 * 9, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.block(self.inner(self.stem(x))))
        x = self.pool(F.leaky_relu(x, 0.1))
        return self.last(self.head(x.view(x.size(0), -1)).relu())


def mlp(*between: nn.Module) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(8, 12)]
    for module in between:
        layers += [module, nn.Linear(12, 12)]
    return nn.Sequential(*layers)


def spread(model: nn.Module, seed: int = 3) -> nn.Module:
    """Rows of every layer between 1/16 and 16 times as large: what equalisation is for."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                factor = torch.exp2(8 * torch.rand(len(module.weight), generator=g) - 4).to(module.weight.dtype)
                module.weight.mul_(factor.view(-1, *[1] * (module.weight.dim() - 1)))
    return model


MODELS: tuple[tuple[Callable[[], nn.Module], tuple[int, ...], list[str]], ...] = (
    (lambda: mlp(nn.ReLU(), nn.Identity(), nn.LeakyReLU(0.2), nn.PReLU(12)), (20, 8), ["0", "2", "4", "6"]),
    (lambda: mlp(nn.Dropout(0.5), nn.GELU(), nn.ReLU()), (3, 5, 8), ["0", "4"]),
    (Net, (2, 3, 8, 8), ["stem.0", "inner.0.0", "block.conv1", "grouped", "head"]),
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)), (2, 3, 8, 8), ["0"]),
)


@pytest.mark.parametrize(("make", "shape", "producers"), MODELS, ids=["mlp", "gelu", "net", "flatten"])
def test_the_function_stays(make: Callable[[], nn.Module], shape: tuple[int, ...], producers: list[str]) -> None:
    model = spread(randomise(make())).double().eval()
    x = torch.randn(*shape, dtype=torch.float64)
    want, modules = model(x).detach(), list(model.modules())
    found = equalize_(model)
    assert list(found) == producers
    assert min(found.values()) > 1.2
    assert list(model.modules()) == modules
    assert float((model(x).detach() - want).norm() / want.norm()) < 1e-12


@pytest.mark.parametrize("kinds", list(itertools.product("lcd", repeat=2)), ids="".join)
def test_both_sides_have_the_geometric_mean(kinds: tuple[str, str]) -> None:
    """Equations 9 to 11, against a loop over channels: Linears, convolutions, depthwise ones."""
    torch.manual_seed(0)

    def layer(kind: str) -> nn.Module:
        return nn.Linear(6, 6) if kind == "l" else nn.Conv2d(6, 6, 3, groups=6 if kind == "d" else 1)

    first, second = (layer(kind) for kind in kinds)
    model = spread(nn.Sequential(first, nn.ReLU(), second))
    link = equalize_pairs.Link("0", ("2",), dict(model.named_modules()))
    weight, bias, readers = (copy.deepcopy(t.detach()) for t in (first.weight, first.bias, second.weight))

    def reading(weights: Tensor, i: int) -> Tensor:
        return weights[i] if kinds[1] == "d" else weights[:, i]

    with torch.no_grad():
        equalize._apply(link, equalize._factors([link])["0"])
    for i in range(6):
        r1, r2 = float(weight[i].abs().max()), float(reading(readers, i).abs().max())
        s = (r1 * r2) ** 0.5 / r2
        torch.testing.assert_close(first.weight[i].detach(), weight[i] / s, rtol=1e-5, atol=0)
        torch.testing.assert_close(first.bias[i].detach(), bias[i] / s, rtol=1e-5, atol=0)
        torch.testing.assert_close(reading(second.weight.detach(), i), reading(readers, i) * s, rtol=1e-5, atol=0)


def test_chains_are_swept_until_they_settle() -> None:
    model = spread(randomise(mlp(*(nn.ReLU() for _ in range(5)))))
    equalize_(model)
    for first, second in itertools.pairwise(model[::2]):
        rows, columns = first.weight.detach().abs().amax(1), second.weight.detach().abs().amax(0)
        torch.testing.assert_close(rows, columns, rtol=1e-3, atol=0)
    before = copy.deepcopy(model.state_dict())
    assert max(equalize_(model).values()) < 1.001
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=1e-3, atol=1e-7)


class Branching(nn.Module):
    """One layer that two read; one whose result also leaves, is added, or is read by a function."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x).relu()
        if self.how == "two":
            return self.b(y) + self.c(y)
        if self.how == "result":
            return self.b(y), y
        if self.how == "function":
            return self.b(y) * y.amax(1, keepdim=True)
        if self.how == "second":
            return self.b(torch.relu(y)) + torch.add(self.c(x @ self.a.weight.T), 1)
        return self.b(y) + self.b(y * 2)  # called twice


def test_all_readers_are_scaled_together() -> None:
    model = spread(randomise(Branching("two"))).double()
    x = torch.randn(9, 4, dtype=torch.float64)
    want = model(x)
    assert list(equalize_(model)) == ["a"]
    torch.testing.assert_close(model(x), want, rtol=1e-12, atol=1e-12)
    readers = torch.maximum(model.b.weight.abs().amax(0), model.c.weight.abs().amax(0))
    torch.testing.assert_close(model.a.weight.abs().amax(1), readers, rtol=1e-4, atol=0)


@pytest.mark.parametrize("how", ["result", "function", "twice"])
def test_no_pair_where_something_else_reads(how: str) -> None:
    model = randomise(Branching(how))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ArgumentError, match="shows a Linear or Conv2d that feeds"):
        equalize_(model)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


@pytest.mark.parametrize(
    "between", [nn.BatchNorm1d(12), nn.GELU(), nn.Hardtanh(), nn.ReLU6(), nn.LayerNorm(12), nn.Softmax(1)], ids=repr
)
def test_no_pair_through_what_is_not_homogeneous(between: nn.Module) -> None:
    with pytest.raises(ArgumentError, match="shows a Linear or Conv2d that feeds"):
        equalize_(mlp(between))


def test_batchnorms_in_between_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    with pytest.raises(ArgumentError, match="allowed: fold_batch_norm_ first, as BatchNorms stand between"):
        equalize_(model)


def test_no_pair_of_shared_tied_or_watched_layers() -> None:
    shared = nn.Linear(8, 8)
    tied = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    tied[2].weight = tied[0].weight
    watched = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    watched[0].register_forward_hook(lambda *_: None)
    mixed = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Flatten(0), nn.Linear(16, 8))  # rows and channels become one
    tokens = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8))  # channels are not runs
    for model in (nn.Sequential(shared, nn.ReLU(), shared), tied, watched, mixed, tokens):
        with pytest.raises(ArgumentError, match="shows a Linear or Conv2d that feeds"):
            equalize_(model)


def test_what_cannot_be_traced_has_the_rules() -> None:
    class Depends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp(nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x if x.sum() > 0 else -x)

    model = spread(randomise(Depends()))
    x = torch.randn(6, 8)
    want = model(x)
    assert list(equalize_(model, example_inputs=x)) == ["layers.0"]
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_first", [True, False])
def test_encoders_of_torch(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, "relu", batch_first=True, norm_first=norm_first)
    model = spread(randomise(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))).eval()
    x = torch.randn(3, 5, 16)
    want = model(x)
    assert list(equalize_(model, example_inputs=x)) == ["layers.0.linear1", "layers.1.linear1"]
    torch.testing.assert_close(model(x), want, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not has_transformers, reason="transformers is a demo extra and not installed")
@pytest.mark.parametrize(("family", "pairs"), [("bert", 1), ("llama", 2), ("llama_gqa", 1), ("qwen3", 2)])
def test_models_of_transformers(family: str, pairs: int) -> None:
    model = randomise(tiny(family)).eval()
    batch = {"input_ids": torch.randint(50, (2, 9))}
    want = model(**batch).last_hidden_state
    assert len(equalize_(model, example_inputs=batch)) == 2 * pairs
    torch.testing.assert_close(model(**batch).last_hidden_state, want, rtol=1e-3, atol=1e-4)


def test_registered_convolutions() -> None:
    class Untraced(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if len(x) else x

    register_smoothing(Untraced, "conv1", ["conv2"])
    model, x = spread(randomise(Untraced())), torch.randn(2, 6, 5, 5)
    want = model(x)
    assert list(equalize_(model)) == ["conv1"]
    torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ArgumentError, match="no rule finds a pair"):  # smooth_ knows no convolutions
        smooth_(model, [x], 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    model = spread(randomise(mlp(nn.ReLU()))).to(dtype)
    equalize_(model, example_inputs=torch.randn(30, 8).to(dtype))
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_channels_without_weights_are_left_alone() -> None:
    model = mlp(nn.ReLU())
    with torch.no_grad():
        model[0].weight[1], model[2].weight[:, 2] = 0, 0
    old = copy.deepcopy(model.state_dict())
    equalize_(model)
    assert torch.equal(model[0].weight[1:3], old["0.weight"][1:3])
    assert torch.equal(model[0].bias[1:3], old["0.bias"][1:3])
    assert torch.equal(model[2].weight[:, 1], old["2.weight"][:, 1])


def test_numbers_that_a_type_does_not_hold_are_refused() -> None:
    model = mlp(nn.ReLU()).half()
    with torch.no_grad():
        model[0].weight[0], model[0].bias[0], model[2].weight[:, 0] = 1e-6, 60000, 100
    old = copy.deepcopy(model.state_dict())
    with pytest.raises(NonFiniteError, match="0 after equalisation"):
        equalize_(model)
    assert all(torch.equal(old[name], t) for name, t in model.state_dict().items())


def test_a_wrong_pair_is_found_out_and_undone() -> None:
    model = spread(randomise(Branching("function")))
    before, x = copy.deepcopy(model.state_dict()), torch.randn(9, 4)
    with pytest.raises(ArgumentError, match=r"moved by.*everything is undone"):
        equalize_(model, [("a", ["b"])], example_inputs=x)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    equalize_(model, [("a", "b")])  # whoever gives no inputs knows best


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("0", ["9"])], "'9'; allowed: names of modules"),
        ([("1", ["0"])], "a ReLU; allowed: Linears and Conv2ds"),
        ([("0", ["0"])], "'0' of 8 inputs after 12 channels"),
        ([("0", [])], "no consumer of '0'"),
        (["0"], "name of the producer"),
    ],
)
def test_pairs_that_are_none_are_refused(pairs: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        equalize_(mlp(nn.ReLU()), pairs)


def test_other_models_are_refused() -> None:
    with pytest.raises(ArgumentError, match="equalize before quantising"):
        equalize_(pyquant.quantize_(mlp(nn.ReLU()), W8A8Dynamic()))
    with pytest.raises(ArgumentError, match="equalize before quantising"):
        equalize_(insert_fake_quantize_(mlp(nn.ReLU()), W8A8Dynamic()))
    with pytest.raises(ArgumentError, match="meta device"):
        equalize_(mlp(nn.ReLU()).to("meta"))
    with pytest.raises(ArgumentError, match="model"):
        equalize_([])  # type: ignore[arg-type]


def test_one_scale_for_a_layer_costs_less_after_it() -> None:
    scheme = W8A8Dynamic()
    scheme = replace(scheme, weights=replace(scheme.weights, granularity="per_tensor"))
    torch.manual_seed(1)
    model = mlp(*(nn.ReLU() for _ in range(4)))
    with torch.no_grad():  # the same function in the form that folded BatchNorms give it
        for first, second in itertools.pairwise(model[::2]):
            factor = torch.exp2(8 * torch.rand(12) - 4)
            first.weight *= factor[:, None]
            first.bias *= factor
            second.weight /= factor
    x = torch.randn(200, 8)
    want = model(x).detach()

    @torch.no_grad()
    def error(m: nn.Module) -> float:
        return float((insert_fake_quantize_(copy.deepcopy(m), scheme)(x) - want).norm() / want.norm())

    naive = error(model)
    equalize_(model)
    assert error(model) < naive / 4


def test_it_is_an_improver_by_name() -> None:
    data = [torch.randn(16, 8) for _ in range(4)]
    model = spread(randomise(mlp(nn.ReLU(), nn.ReLU()))).eval()
    want = copy.deepcopy(model)
    equalize_(want)
    pyquant.quantize_(want, W8A8Dynamic(), check_speed=False)
    recipe = Recipe.from_dict(
        {"default": "W8A8Dynamic", "improve": ["equalize"], "calib_params": {"num_calib_batches": 4}}
    )
    for config, names in ((W8A8Dynamic(), ["equalize"]), (recipe, [])):
        got = pyquant.quantize_(copy.deepcopy(model), config, data=data, improve=names, check_speed=False)
        assert all(torch.equal(value, want.state_dict()[name]) for name, value in got.state_dict().items())
    failing = copy.deepcopy(model)
    with pytest.raises(ArgumentError):  # after equalisation: no rule turns this class
        pyquant.quantize_(failing, W8A8Dynamic(), data=data, improve=["equalize", "rotate"])
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in failing.state_dict().items())


@pytest.mark.parametrize(
    ("name", "change", "check"),
    [
        (
            "the bias stays",
            lambda m: m.setattr(nn.Linear, "parameters", lambda self, recurse=True: iter([self.weight])),
            lambda: test_the_function_stays(*MODELS[0]),
        ),
        (
            "nothing is undone",
            lambda m: m.setattr(equalize, "partial", lambda *_: lambda: None),
            test_a_wrong_pair_is_found_out_and_undone,
        ),
        (
            "everything passes a factor on",
            lambda m: m.setattr(equalize_pairs, "_passes", lambda node, layers: True),
            lambda: test_no_pair_through_what_is_not_homogeneous(nn.GELU()),
        ),
        (
            "one sweep is enough",
            lambda m: m.setattr(equalize, "_SWEEPS", 1),
            test_chains_are_swept_until_they_settle,
        ),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_planted_bugs_are_caught(name: str, change: Any, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        change(m)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check()
