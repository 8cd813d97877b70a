"""quantize_: what is converted, what is kept, and that a failure leaves the model as it was."""

from __future__ import annotations

import copy
import gc
import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from heap import in_use
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

import pyquant
from pyquant.core.presets import FP16, W4A8, W4A16, W8A8, W8A16, W4A8Dynamic, W8A8Dynamic
from pyquant.nn import convert, parents, swap
from pyquant.nn.match import FqnConfig
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 32)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"fc1": nn.Linear(32, 64), "fc2": nn.Linear(64, 32)}) for _ in range(3)
        )
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 5, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block["fc2"](torch.relu(block["fc1"](x)))  # type: ignore[index]
        return self.head(self.norm(x))


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """All that a failed conversion must leave alone: modules, tensors, their bytes, hooks, flags, random state."""
    told: dict[str, Any] = {"random": torch.random.get_rng_state().tolist()}
    for name, module in model.named_modules(remove_duplicate=False):
        told[name] = (
            id(module),
            type(module),
            module.training,
            [len(d) for d in (module._forward_hooks, module._forward_pre_hooks)],
        )
        flags = {k: v for k, v in module.__dict__.items() if isinstance(v, (bool, int, float, str))}
        told[name + "#flags"] = flags
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                digest = hashlib.sha256(
                    tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
                ).hexdigest()
                told[f"{name}.{key}"] = (
                    id(tensor),
                    tensor.data_ptr(),
                    str(tensor.dtype),
                    str(tensor.device),
                    tensor.requires_grad,
                    digest,
                )
    return told


def kinds(model: nn.Module) -> dict[str, str]:
    return {
        n: str(m.scheme) if isinstance(m, QLinear) else type(m).__name__
        for n, m in model.named_modules()
        if isinstance(m, (nn.Linear, nn.Embedding, QLinear, QEmbedding))
    }


def test_every_linear_becomes_the_layer_that_from_float_makes() -> None:
    model, ids = Mlp(), torch.arange(12)
    reference = copy.deepcopy(model)
    assert pyquant.quantize_(model, W8A8Dynamic()) is model
    assert set(kinds(model).values()) == {"Embedding", "W8A8Dynamic"}
    for name, module in reference.named_modules():
        if isinstance(module, nn.Linear):
            want = QLinear.from_float(module, W8A8Dynamic())
            got = model.get_submodule(name)
            assert all(
                torch.equal(a, b) for a, b in zip(got.state_dict().values(), want.state_dict().values(), strict=True)
            )
    torch.testing.assert_close(model(ids), reference(ids), rtol=0.1, atol=0.1)
    assert not torch.equal(model(ids), reference(ids))


def test_config_filter_and_embeddings() -> None:
    config = FqnConfig(
        {"blocks.0.fc1": W4A8Dynamic(32), "re:blocks\\.[12]\\..*": W8A16(), "head": None, "_default": W8A8Dynamic()}
    )
    model = pyquant.quantize_(Mlp(), config, lambda module, name: name != "blocks.2.fc2", embeddings=True)
    assert kinds(model) == {
        "embed": "QEmbedding",
        "blocks.0.fc1": "W4A8Dynamic(group_size=32)",
        "blocks.0.fc2": "W8A8Dynamic",
        "blocks.1.fc1": "W8A16",
        "blocks.1.fc2": "W8A16",
        "blocks.2.fc1": "W8A16",
        "blocks.2.fc2": "Linear",
        "head": "Linear",
    }
    model = pyquant.quantize_(Mlp(), {nn.Embedding: None, nn.Linear: FP16()}, embeddings=True)
    assert set(kinds(model).values()) == {"Embedding", "FP16"}


def test_the_filter_sees_modules_and_names() -> None:
    seen: list[tuple[str, str]] = []

    def note(module: nn.Module, name: str) -> bool:
        seen.append((type(module).__name__, name))
        return True

    pyquant.quantize_(Mlp(), W8A8Dynamic(), note)
    assert ("Linear", "blocks.1.fc2") in seen
    assert len(seen) == 7


def test_static_schemes_take_input_scales() -> None:
    scales: dict[str, Any] = {name: 0.05 for name, module in Mlp().named_modules() if isinstance(module, nn.Linear)}
    scales["head"] = torch.tensor([0.1])
    model = pyquant.quantize_(Mlp(), W8A8(), input_scales=scales)
    head = model.get_submodule("head")
    assert isinstance(head, QLinear)
    assert head.input_scale.item() == torch.tensor(0.1).item()  # type: ignore[union-attr]
    for change, match in (
        ({"head": None}, "'input_scales'.*nothing for head"),
        ({"nothing": 1.0}, "names of no static layer: nothing"),
        ({"head": 0.0}, r"input_scales\['head'\].*0.0.*above 0"),
        ({"head": float("nan")}, r"input_scales\['head'\].*nan"),
        ({"head": torch.ones(3)}, r"input_scales\['head'\]"),
        ({"head": "1"}, r"input_scales\['head'\].*'1'"),
    ):
        changed = {k: v for k, v in {**scales, **change}.items() if v is not None}
        with pytest.raises(pyquant.ArgumentError, match=match):
            pyquant.quantize_(Mlp(), W8A8(), input_scales=changed)
    with pytest.raises(pyquant.ArgumentError, match=r"nothing for blocks.0.fc1.*and 1 more"):
        pyquant.quantize_(Mlp(), W8A8())
    told = r"nothing for 0: W4A8\(group_size=32\) has static input ranges.* W4A8Dynamic\(group_size=32\)"
    with pytest.raises(pyquant.ArgumentError, match=told):
        pyquant.quantize_(nn.Sequential(nn.Linear(64, 8)), "W4A8(group_size=32)")


@pytest.mark.parametrize("kept", ["as integers", "packed"])
def test_codes_of_another_library_are_named_as_such(kept: str) -> None:
    """As compressed-tensors, bitsandbytes and AutoGPTQ leave a Linear: integers or other tensors for its weight,
    and a forward that multiplies them."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    for layer in (model[0], model[2]):
        codes = torch.zeros(64, 64, dtype=torch.int8)
        if kept == "packed":
            del layer.weight
            layer.register_buffer("weight_packed", codes)
        else:
            layer.weight = nn.Parameter(codes, requires_grad=False)
        layer.forward = lambda x: x
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(pyquant.ArgumentError, match=r"another library has quantised already \(2 layers.*enable\(\)"):
        pyquant.quantize_(model, W8A8Dynamic())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.append(nn.Linear(64, 8))
    with pytest.warns(
        pyquant.QuantizationWarning, match=r"0 and 1 more \(Linear, .*\): holds codes of another library"
    ):
        pyquant.quantize_(model, W8A8Dynamic())
    assert isinstance(model[3], QLinear)
    assert type(model[0]) is nn.Linear


def test_a_quantised_model_is_told_from_one_without_layers() -> None:
    model = pyquant.quantize_(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), W8A8Dynamic())
    told = r"quantised already \(2 layers: '0', '2'\).*dequantize_"
    for again in (
        lambda: pyquant.quantize_(model, "W8A16"),
        lambda: pyquant.quantize_recipe_(model, {"layers": {"0": "W8A16"}}),
        lambda: pyquant.SelectiveQuantizer().quantize_module(model),
        lambda: pyquant.prepare_qat_(model, "W8A8Dynamic"),
        lambda: pyquant.sensitivity(model, [torch.randn(2, 8)], ("fp32", "int8")),
    ):
        with pytest.raises(pyquant.ArgumentError, match=told):
            again()
    assert all(isinstance(model[i], QLinear) for i in (0, 2))
    for empty in (nn.Sequential(), nn.Sequential(nn.ReLU())):
        with pytest.raises(pyquant.ArgumentError, match=r"a Sequential without nn\.Linear"):
            pyquant.quantize_(empty, W8A8Dynamic())


@pytest.mark.parametrize("put_in", [pyquant.prepare_qat_, pyquant.insert_fake_quantize_])
@pytest.mark.parametrize("data", [None, [torch.randn(4, 8)]])
def test_a_simulating_model_is_told_to_be_converted(put_in: Callable[..., nn.Module], data: Any) -> None:
    model = put_in(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), W8A8Dynamic())
    before = fingerprint(model)
    told = r"simulates its quantised layers \(2 layers: '0', '2'\).*convert_.*remove_fake_quantize_"
    for config in (W8A16(), W8A8(), FP16(), {"0": W8A16(), "2": W8A16()}):
        with pytest.raises(pyquant.ArgumentError, match=told):
            pyquant.quantize_(model, config, data=data)
    with pytest.raises(pyquant.ArgumentError, match=told):
        pyquant.quantize_recipe_(model, {"default": "W8A16"}, data)
    assert fingerprint(model) == before


def test_simulating_layers_that_a_config_leaves_are_in_nobodys_way() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    pyquant.prepare_qat_(model, {"0": W8A8Dynamic(), "2": None})
    with pytest.raises(pyquant.ArgumentError, match=r"simulates.*1 layer: '0'"):
        pyquant.quantize_(model, W8A16())
    assert type(model[2]) is nn.Linear
    pyquant.quantize_(model, W8A16(), filter_fn=lambda module, name: name == "2")
    assert [type(model[i]).__name__ for i in (0, 2)] == ["FakeQuantLinear", "QLinear"]
    pyquant.convert_(model)
    assert [type(model[i]).__name__ for i in (0, 2)] == ["QLinear", "QLinear"]


def test_a_model_of_float64_is_refused_and_a_part_of_it_is_left() -> None:
    for quantise in (
        lambda: pyquant.quantize_(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).double(), W8A8Dynamic()),
        lambda: pyquant.quantize_recipe_(nn.Sequential(nn.Linear(8, 8)).double(), {"default": "W8A8Dynamic"}),
    ):
        with pytest.raises(pyquant.ArgumentError, match="float64"):
            quantise()
    with pytest.raises(pyquant.ArgumentError, match=r"model\.float\(\) first"):
        pyquant.quantize_(nn.Sequential(nn.Linear(8, 8)).double(), W8A8Dynamic())
    mixed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2).double())
    with pytest.warns(pyquant.QuantizationWarning, match="float64"):
        pyquant.quantize_(mixed, W8A8Dynamic())
    assert isinstance(mixed[0], QLinear)
    skipped = nn.Sequential(nn.Linear(8, 8)).double()
    pyquant.quantize_(skipped, W8A8Dynamic(), filter_fn=lambda module, name: False)  # nothing was meant to be


# ---- sharing, hooks, flags


def test_shared_modules_stay_shared() -> None:
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.Linear(8, 8)})
    pyquant.quantize_(model, W8A8Dynamic())
    assert isinstance(model["a"], QLinear)
    assert model["a"] is model["b"][0]  # type: ignore[index]
    assert model["a"] is not model["c"]


def test_names_of_a_shared_module_must_agree() -> None:
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": shared, "b": shared})
    pyquant.quantize_(copy.deepcopy(model), FqnConfig({"a": W8A16(), "_default": W8A8Dynamic()}))
    with pytest.raises(pyquant.ArgumentError, match=r"one shared layer under several names"):
        pyquant.quantize_(model, FqnConfig({"a": W8A16(), "b": W8A8Dynamic()}))
    with pytest.raises(pyquant.ArgumentError, match=r"one shared layer under several names"):
        pyquant.quantize_(model, W8A8Dynamic(), lambda module, name: name == "a")
    assert model["a"] is model["b"] is shared


def test_linears_that_share_their_parameters_share_their_twin() -> None:
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    b.weight, b.bias = a.weight, a.bias
    model = pyquant.quantize_(nn.Sequential(a, b), W8A8Dynamic())
    assert model[0] is model[1]  # type: ignore[index]


def test_a_weight_tied_to_an_embedding_leaves_the_embedding_alone() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(9, 8), "head": nn.Linear(8, 9, bias=False)})
    model["head"].weight = model["embed"].weight
    before = model["embed"](torch.arange(9)).detach().clone()  # type: ignore[operator]
    pyquant.quantize_(model, W8A8Dynamic())
    assert torch.equal(model["embed"](torch.arange(9)), before)  # type: ignore[operator]
    assert isinstance(model["head"], QLinear)


def test_hooks_and_training_flags_are_carried_over() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    calls: list[str] = []
    handle = model[0].register_forward_hook(lambda *_: calls.append("after"))
    model[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    model[1].eval()
    pyquant.quantize_(model, W8A8Dynamic())
    model(torch.zeros(1, 8))
    assert calls == ["before", "after"]
    handle.remove()
    model(torch.zeros(1, 8))
    assert calls == ["before", "after", "before"]
    assert (model[0].training, model[1].training) == (True, False)


# ---- stock models


def test_a_transformer_encoder_leaves_torchs_fused_path() -> None:
    """The fused inference path reads linear1.weight instead of calling linear1; codes must never reach it."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    reference = copy.deepcopy(encoder)
    pyquant.quantize_(encoder, W8A8Dynamic())
    calls: list[int] = []
    for module in encoder.modules():
        if isinstance(module, QLinear):
            module.register_forward_hook(lambda *_: calls.append(1))
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[1, 5:] = True
    x = torch.randn(2, 7, 32)
    with torch.no_grad():
        got = encoder(x, src_key_padding_mask=mask)
        want = reference(x, src_key_padding_mask=mask)
    assert len(calls) == 12
    torch.testing.assert_close(got[~mask], want[~mask], rtol=0.1, atol=0.1)
    assert {r.reason for r in pyquant.quantization_report(encoder)} == {""}


def test_the_fused_path_is_left_without_hooks_too() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    reference = copy.deepcopy(layer)
    pyquant.quantize_(layer, W8A8Dynamic())
    with torch.no_grad():
        x = torch.randn(2, 7, 32)
        torch.testing.assert_close(layer(x), reference(x), rtol=0.1, atol=0.1)


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class OwnTensors(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.extra = nn.Parameter(torch.zeros(1))


def weight_normed() -> nn.Module:
    return torch.nn.utils.weight_norm(nn.Linear(8, 8))


def pruned() -> nn.Module:
    linear = nn.Linear(8, 8)
    prune.random_unstructured(linear, "weight", 0.5)
    return linear


def patched() -> nn.Module:
    linear = nn.Linear(8, 8)
    linear.forward = lambda x: x  # type: ignore[method-assign]
    return linear


class OwnCall(nn.Linear):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 5


class Standardised(nn.Conv2d):
    """nn.Conv2d's own place for what computes it."""

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super()._conv_forward(input, weight - weight.mean((1, 2, 3), keepdim=True), bias)


def tiling() -> nn.Module:
    conv = nn.Conv2d(8, 8, 3)
    conv._conv_forward = lambda x, w, b: functional.conv2d(functional.pad(x, (1, 1, 1, 1), "circular"), w, b)  # type: ignore[method-assign]
    return conv


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nn.LazyLinear(8), "is lazy.*forward pass"),
        (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), "computed weight"),
        (lambda: parametrizations.orthogonal(nn.Linear(8, 8)), "computed weight"),
        (weight_normed, "computed weight"),
        (pruned, "computed weight"),
        (OwnForward, "OwnForward with a forward of its own"),
        (lambda: OwnForward(8, 8), "OwnForward with a forward of its own"),
        (OwnTensors, "tensors of its own .extra"),
        (patched, "forward of its own"),
        (lambda: Standardised(8, 8, 3), "Standardised with a _conv_forward of its own"),
        (tiling, "Conv2d with a _conv_forward of its own"),
        (lambda: OwnCall(8, 8), "OwnCall with a __call__ of its own"),
        (lambda: nn.Linear(8, 8).double(), "float64"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(make: Callable[..., nn.Module], match: str) -> None:
    if make is OwnForward:
        make = lambda: OwnForward(8, 8, bias=False)  # noqa: E731
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "odd": make()})
    with pytest.raises(pyquant.ArgumentError, match=f"layer 'odd'.*{match}"):
        pyquant.quantize_(model, {"odd": W8A8Dynamic(), "first": W8A8Dynamic()})
    assert type(model["first"]) is nn.Linear
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)  # what was asked for needs no words
        pyquant.quantize_(model, W8A8Dynamic(), lambda module, name: name != "odd")
    assert isinstance(model["first"], QLinear)


@pytest.mark.parametrize(
    "make", [lambda: OwnForward(8, 8), OwnTensors, pruned, patched, tiling, lambda: weight_normed()]
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_cannot_be_converted_is_left_and_named_where_nobody_named_it(make: Callable[..., nn.Module]) -> None:
    model = nn.ModuleDict({"first": nn.Linear(8, 8), "odd": make()})
    with pytest.warns(pyquant.QuantizationWarning, match=r"odd \("):
        pyquant.quantize_(model, W8A8Dynamic())
    assert isinstance(model["first"], QLinear)
    assert not isinstance(model["odd"], QLinear)
    told = {r.name: r for r in pyquant.quantization_report(model)}
    assert told["odd"].scheme == "float"
    assert told["odd"].reason not in ("", "left alone")


def test_a_lazy_layer_is_refused_as_running_the_model_once_mends_it() -> None:
    with pytest.raises(pyquant.ArgumentError, match=r"layer '1' is lazy"):
        pyquant.quantize_(nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(8)), W8A8Dynamic())


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: pyquant.quantize_(None, W8A8Dynamic()), "model"),
        (lambda: pyquant.quantize_(nn.Linear(2, 2), W8A8Dynamic()), "model"),
        (lambda: pyquant.quantize_(nn.ReLU(), W8A8Dynamic()), "model"),
        (lambda: pyquant.quantize_(Mlp(), None), "config"),
        (lambda: pyquant.quantize_(Mlp(), b"W8A8"), "config"),
        (lambda: pyquant.quantize_(Mlp(), print), "config"),
        (lambda: pyquant.quantize_(Mlp(), W8A8Dynamic(), "head"), "filter_fn"),
        (lambda: pyquant.quantize_(Mlp(), W8A8Dynamic(), device="nowhere"), "device"),
        (lambda: pyquant.quantize_(Mlp(), W8A8Dynamic(), device=1.5), "device"),
        (lambda: pyquant.quantize_(Mlp(), W8A8(), input_scales=[1.0]), "input_scales"),
        (lambda: pyquant.quantize_(Mlp(), W4A8(), input_scales={}), "data"),
        (lambda: pyquant.quantize_(Mlp(), W4A8Dynamic(), on_indivisible="error"), "blocks.0.fc1: group_size"),
        (lambda: pyquant.quantize_(Mlp(), W4A8Dynamic(), on_indivisible="groups"), "on_indivisible"),
        (lambda: pyquant.quantize_(Mlp(), W4A8Dynamic(), heads="no"), "heads"),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], argument: str) -> None:
    with pytest.raises(pyquant.ArgumentError) as caught:
        call()
    assert caught.value.argument == argument
    assert caught.value.allowed


@pytest.mark.parametrize(
    ("scheme", "limit"), [(W8A8Dynamic(), 132104), (W8A8Dynamic(symmetric_inputs=False), 65793), (W4A16(), 0)]
)
def test_rows_whose_sums_might_overflow_stay_and_are_named(scheme: pyquant.QScheme, limit: int) -> None:
    """One wide layer stopped the whole model."""
    k = limit + 1 if limit else 132105
    model = nn.Sequential(nn.Linear(k, 1), nn.Linear(8, 8)).eval()
    if not limit:
        assert isinstance(pyquant.quantize_(model, scheme, check_speed=False)[0], QLinear)
        return
    with pytest.warns(pyquant.QuantizationWarning, match=rf"K = {k} is above {limit}, beyond which an int32"):
        pyquant.quantize_(model, scheme, check_speed=False)
    assert [type(m) for m in model] == [nn.Linear, QLinear]
    with pytest.raises(pyquant.ArgumentError, match=rf"layer '0': K = {k} is above {limit}"):
        pyquant.quantize_(nn.Sequential(nn.Linear(k, 1)), {"0": scheme})
    fits = pyquant.quantize_(nn.Sequential(nn.Linear(limit, 1)), scheme, check_speed=False)
    assert isinstance(fits[0], QLinear)


def test_a_layer_that_holds_nan_is_named() -> None:
    model = Mlp()
    model.blocks[1]["fc2"].weight.data[3, 4] = float("inf")  # type: ignore[index,union-attr]
    with pytest.raises(pyquant.NonFiniteError, match=r"'blocks.1.fc2: weight': got inf at \[3, 4\]"):
        pyquant.quantize_(model, W8A8Dynamic())


# ---- transactional


class Injected(BaseException):
    """Not an Exception: KeyboardInterrupt is not one either."""


def failing(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    count = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count > at:
            raise Injected
        return function(*args, **kwargs)

    return wrapped


SEAMS: list[tuple[Any, str]] = [
    (convert, "integer_twin"),
    (convert.QLinear, "from_float"),
    (convert.QEmbedding, "from_float"),
    (convert.obstacles, "why_not"),
    (convert.obstacles, "carry_hooks"),
    (swap, "put"),
    (swap, "tell_parents"),
    (parents, "_turn"),
]


def encoder_model() -> nn.Module:
    torch.manual_seed(3)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict(
        {"embed": nn.Embedding(9, 16), "encoder": encoder, "a": shared, "b": shared, "c": nn.Linear(16, 4)}
    )
    shared.register_forward_hook(lambda *_: None)
    return model.eval()


@pytest.mark.parametrize("seam", range(len(SEAMS)), ids=lambda i: SEAMS[i][1])
def test_a_failure_at_any_call_leaves_the_model_as_it_was(seam: int, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = SEAMS[seam]
    whole = getattr(owner, name)
    for k in range(90):
        model = encoder_model()
        before = fingerprint(model)
        monkeypatch.setattr(owner, name, failing(whole, k))
        try:
            pyquant.quantize_(model, W8A8Dynamic(), embeddings=True)
        except Injected:
            assert fingerprint(model) == before, f"changed by a failure at call {k} of {name}"
        else:
            assert k > 0, f"{name} was never called"
            break
        finally:
            monkeypatch.setattr(owner, name, whole)
    else:
        pytest.fail("the injection never ran out")


def test_a_failing_move_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving to the meta device succeeds; then a module fails half way."""
    model = encoder_model()
    pyquant.quantize_(model, FqnConfig({"c": W8A8Dynamic()}))
    model["a"](torch.ones(1, 16)).sum().backward()  # type: ignore[operator]
    grad, codes = model["a"].weight.grad.clone(), model["c"](torch.ones(1, 16))  # type: ignore[operator,union-attr]
    before = fingerprint(model)

    class Fails(nn.LayerNorm):
        def _apply(self, *args: Any, **kwargs: Any) -> Any:
            raise Injected

    broken = nn.ModuleDict({"model": model, "z": Fails(4)})
    with pytest.raises(Injected):
        pyquant.quantize_(broken, W8A8Dynamic(), device="meta", embeddings=True)
    assert fingerprint(model) == before
    assert torch.equal(model["a"].weight.grad, grad)  # type: ignore[arg-type]
    assert torch.equal(model["c"](torch.ones(1, 16)), codes)  # type: ignore[operator]


def test_a_raising_filter_changes_nothing() -> None:
    model = encoder_model()
    before = fingerprint(model)
    pyquant.quantize_(copy.deepcopy(model), W8A8Dynamic(), failing(lambda module, name: True, 100))
    for k in range(5):
        with pytest.raises(Injected):
            pyquant.quantize_(model, W8A8Dynamic(), failing(lambda module, name: True, k))
        assert fingerprint(model) == before


def test_device_moves_the_whole_model() -> None:
    model = pyquant.quantize_(Mlp(), W8A8Dynamic(), device="meta")
    assert {t.device.type for t in model.state_dict().values()} == {"meta"}
    model = pyquant.quantize_(Mlp(), W8A8Dynamic(), device="cpu")
    assert model(torch.arange(3)).shape == (3, 5)


def test_a_meta_model_can_be_planned() -> None:
    with torch.device("meta"):
        model = Mlp()
    pyquant.quantize_(model, W8A8Dynamic(), embeddings=True)
    assert {t.device.type for t in model.state_dict().values()} == {"meta"}


# ---- report and leaks


def test_the_report_counts_bytes() -> None:
    model = pyquant.quantize_(
        Mlp().half(), FqnConfig({"head": None, "blocks.0.*": W4A8Dynamic(32), "_default": W8A8Dynamic()})
    )
    told = {r.name: r for r in pyquant.quantization_report(model)}
    assert list(told) == ["embed", *(f"blocks.{i}.fc{j}" for i in range(3) for j in (1, 2)), "head"]
    assert (told["blocks.1.fc1"].bytes_before, told["blocks.1.fc1"].bytes_after) == (
        2 * (32 * 64 + 64),
        32 * 64 + 8 * 64,
    )
    assert told["blocks.0.fc2"].bytes_after == 32 * 64 // 2 + 4 * 32 * 2 + 4 * 32
    assert (told["head"].scheme, told["head"].bytes_before, told["head"].reason) == ("float", 320, "left alone")
    for name, record in told.items():
        if record.kind == "QLinear":
            state = model.get_submodule(name).state_dict()
            assert record.bytes_after == sum(t.numel() * t.element_size() for t in state.values())


def test_nothing_is_left_after_many_conversions() -> None:
    source, ids = Mlp(), torch.arange(6)

    def cycle() -> None:
        model = pyquant.quantize_(copy.deepcopy(source), W8A8Dynamic(), embeddings=True)
        model(ids)
        twin = copy.deepcopy(model)
        twin.load_state_dict(model.state_dict())
        with pytest.raises(pyquant.ArgumentError):
            pyquant.quantize_(Mlp(), {"nowhere": W8A8Dynamic()})

    def live() -> int:
        gc.collect()
        return sum(issubclass(type(o), nn.Module) for o in gc.get_objects())

    flags = torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype()
    for _ in range(60):
        cycle()
    modules, memory = live(), in_use()
    for _ in range(300):
        cycle()
    assert live() <= modules  # what earlier tests left may go meanwhile
    assert in_use() - memory <= 300 * 64, f"{in_use() - memory} bytes more after 300 cycles"
    assert (torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype()) == flags
    assert len(source.head._forward_hooks) == 0


def test_what_was_set_on_a_layer_is_found_on_its_twin() -> None:
    """peft's and many a model's own layers keep numbers there, which the module around reads."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.conv = nn.Linear(8, 8), nn.Conv2d(1, 1, 1)
            self.proj.scaling, self.proj.names, self.conv.gain = 2.0, ["a"], 3.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.proj(x) * self.proj.scaling
            return self.conv(y[None, None])[0, 0] * self.conv.gain

    model, x = Reads().eval(), torch.randn(4, 8)
    want, names = model(x), model.proj.names
    quantised = pyquant.quantize_(copy.deepcopy(model), W8A8Dynamic(), check_speed=False)
    assert isinstance(quantised.proj, QLinear)
    assert quantised.proj.scaling == 2.0
    assert quantised.proj.names == names
    assert torch.allclose(quantised(x), want, atol=0.2)
    assert (quantised.proj.in_features, quantised.proj.dtype) == (8, torch.float32)
    assert pyquant.dequantize_(quantised)(x).shape == want.shape
    assert type(quantised.proj) is nn.Linear
    assert quantised.proj.scaling == 2.0


def test_hooks_of_the_state_run_on_what_takes_a_layers_place() -> None:
    model, told = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).eval(), []
    handles = [
        model[0].register_state_dict_pre_hook(lambda *_: told.append("before saving")),
        model[0].register_state_dict_post_hook(lambda *_: told.append("saved")),
        model[0].register_load_state_dict_pre_hook(lambda module, *_: told.append(type(module).__name__)),
        model[0].register_load_state_dict_post_hook(lambda module, _: told.append(type(module).__name__)),
    ]

    def run() -> list[str]:
        told.clear()
        model.load_state_dict(model.state_dict())
        return list(told)

    for change, name in (
        (lambda: None, "Linear"),
        (lambda: pyquant.quantize_(model, "W8A8Dynamic", check_speed=False), "QLinear"),
        (lambda: pyquant.dequantize_(model), "Linear"),
        (lambda: pyquant.prepare_qat_(model, "W8A8Dynamic"), "FakeQuantLinear"),
        (lambda: pyquant.remove_fake_quantize_(model), "Linear"),
    ):
        change()
        assert run() == ["before saving", "saved", name, name]
    with pytest.raises(pyquant.errors.PyquantError):  # undone: the second layer does not divide
        pyquant.quantize_(model, {"0": "W8A8Dynamic", "2": "W8A8"}, check_speed=False)
    gc.collect()
    assert run()[-1] == "Linear"
    pyquant.quantize_(model, "W8A8Dynamic", check_speed=False)
    for handle in handles:
        handle.remove()
    assert run() == []
