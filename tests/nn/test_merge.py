"""merge_: one product for layers that read one tensor, with equal bits, whoever is called when and with what."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from qlayers import INTEGER, calibration
from torch import Tensor, nn

import pyquant
from pyquant import ops
from pyquant.errors import ArgumentError
from pyquant.nn.merge import SIBLINGS
from pyquant.nn.merged_linear import MergedLinear
from pyquant.nn.qlinear import QLinear

NAMES = ("q_proj", "k_proj", "v_proj")


class Heads(nn.Module):
    """Three projections of one tensor, of different widths, and one of another."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 40, bias), nn.Linear(32, 16, bias)
        self.v_proj, self.out = nn.Linear(32, 7, bias), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def quantised(scheme: pyquant.QScheme, bias: bool = True) -> Heads:
    model = Heads(bias).eval()
    for name, linear in list(model.named_children()):
        own = pyquant.W8A8Dynamic() if name == "out" else scheme
        setattr(model, name, QLinear.from_float(linear, own, **calibration(own)))
    return model


def count_products(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    calls: list[object] = []
    whole = model.q_proj._group.whole
    forward = whole.forward
    monkeypatch.setitem(whole.__dict__, "forward", lambda *a: calls.append(a) or forward(*a))
    model(x)
    return len(calls)


@pytest.mark.parametrize("rows", [0, 1, 3, 17])
@pytest.mark.parametrize("scheme", INTEGER, ids=str)
def test_the_bits_are_those_of_the_layers_apart(scheme: pyquant.QScheme, rows: int) -> None:
    apart = quantised(scheme)
    merged = pyquant.merge_(copy.deepcopy(apart))
    assert [type(merged.get_submodule(n)) for n in (*NAMES, "out")] == [MergedLinear] * 3 + [QLinear]
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, rows, 32, dtype=dtype)
        for name, one, other in zip(NAMES, merged(x), apart(x), strict=True):
            assert one.is_contiguous()
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
            assert torch.equal(merged.get_submodule(name).reference(x), other)


def test_a_tensor_is_quantised_and_multiplied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pyquant.merge_(quantised(pyquant.W8A8Dynamic()))
    assert count_products(model, torch.randn(3, 32), monkeypatch) == 1
    assert model.q_proj._group._seen is None  # nothing is kept once everybody has been served


def test_another_tensor_a_write_or_new_weights_are_seen() -> None:
    apart = quantised(pyquant.W8A8Dynamic())
    model = pyquant.merge_(copy.deepcopy(apart))
    x, y = torch.randn(3, 32), torch.randn(3, 32)
    model.q_proj(x)
    assert torch.equal(model.k_proj(y), apart.k_proj(y))
    model.q_proj(x)
    x.mul_(-2)
    assert torch.equal(model.k_proj(x), apart.k_proj(x))
    assert torch.equal(model.k_proj(x), apart.k_proj(x))  # a second time
    model.q_proj(x)
    apart.v_proj.bias = model.v_proj.bias = torch.ones(7)
    assert torch.equal(model.v_proj(x), apart.v_proj(x))
    model.q_proj(x)
    del x
    assert model.q_proj._group._seen is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inference_mode_saves_as_much_and_sees_every_write(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = quantised(pyquant.W8A8Dynamic())
    model = pyquant.merge_(copy.deepcopy(apart))
    writes: list[Callable[[Tensor], object]] = [
        lambda x: x.add_(1),
        lambda x: x[2].neg_(),  # through a view
        lambda x: x.T.flip(0).copy_(x.T),
        lambda x: x.data.mul_(3),
        lambda x: x.numpy().__setitem__((1, 5), 7) if dtype == torch.float32 else x.zero_(),  # past torch
        lambda x: x.set_(torch.randn(5, 32, dtype=dtype)),
        lambda x: x.__setitem__((0, 0), float("nan")),
    ]
    with torch.inference_mode():
        for write in writes:
            x = torch.randn(3, 32, dtype=dtype)
            assert x.is_inference()
            model.q_proj(x)
            write(x)
            for name in ("k_proj", "v_proj", "q_proj", "k_proj"):
                one, other = model.get_submodule(name)(x), apart.get_submodule(name)(x)
                assert torch.equal(one.nan_to_num(), other.nan_to_num())
        x = torch.randn(3, 32, dtype=dtype)
        assert all(torch.equal(a, b) for a, b in zip(model(x), apart(x), strict=True))
        assert count_products(model, torch.randn(3, 32, dtype=dtype), monkeypatch) == 1
        assert model.q_proj._group._seen is None
        model.q_proj(x)
    with torch.no_grad():  # a tensor from there, here
        assert torch.equal(model.k_proj(x), apart.k_proj(x))


def test_an_example_of_inference_mode_shows_who_reads_it() -> None:
    with torch.inference_mode():
        x = torch.randn(2, 32)
    assert pyquant.merge_report(quantised(pyquant.W8A8Dynamic()), x)[0].names == NAMES


@pytest.mark.skipif(not ops.native_available(), reason="needs the compiled library")
@pytest.mark.parametrize("scheme", [pyquant.W8A16(), pyquant.W4A16(32)], ids=str)
def test_weight_only_layers_have_their_bits_in_wider_products(scheme: pyquant.QScheme) -> None:
    for sizes in ((8, 8), (40, 16, 7), (100, 33), (256, 64, 64), (64, 300)):
        for rows in (0, 1, 3, 8, 33, 130):
            layers = nn.ModuleDict({name: nn.Linear(96, n) for name, n in zip(NAMES, sizes, strict=False)}).eval()
            apart = pyquant.quantize_(layers, scheme, check_speed=False)
            model = pyquant.merge_(copy.deepcopy(apart))
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(rows, 96, dtype=dtype)
                for name in layers:
                    assert isinstance(model[name], MergedLinear)
                    assert torch.equal(model[name](x), apart[name](x)), (sizes, rows, dtype)


def test_gradients() -> None:
    apart = quantised(pyquant.W8A8Dynamic())
    model = pyquant.merge_(copy.deepcopy(apart))
    with torch.enable_grad():
        grads = []
        for one in (model, apart):
            x = torch.ones(2, 32, requires_grad=True)
            for y in one(x):
                y.sum().backward()  # one after the other: no graph is shared
            grads.append(x.grad)
    assert torch.allclose(*grads, rtol=1e-5)
    residual = torch.randn(2, 40)
    assert torch.equal(model.q_proj(x.detach(), residual), apart.q_proj(x.detach(), residual))


@pytest.mark.parametrize("scheme", [INTEGER[1], INTEGER[7], INTEGER[9]], ids=str)
def test_state_files_and_ways_back(scheme: pyquant.QScheme, tmp_path) -> None:
    apart, x = quantised(scheme), torch.randn(3, 32)
    model = pyquant.merge_(copy.deepcopy(apart))
    before, after = apart.state_dict(), model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(after[name], before[name]) for name in before)
    report = [(r.name, r.scheme, r.bytes_before, r.bytes_after) for r in pyquant.quantization_report(model)]
    assert report == [(r.name, r.scheme, r.bytes_before, r.bytes_after) for r in pyquant.quantization_report(apart)]
    other = quantised(scheme)
    model.load_state_dict(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model(x), other(x), strict=True))
    pyquant.save_pretrained(model, tmp_path)
    again = pyquant.load_pretrained(tmp_path, Heads).eval()
    assert all(torch.equal(a, b) for a, b in zip(again(x), other(x), strict=True))
    copied = copy.deepcopy(model).to(torch.bfloat16)
    assert copied.q_proj._group is copied.v_proj._group is not model.q_proj._group
    assert copied.k_proj.weight.dtype == torch.bfloat16
    assert torch.equal(model.k_proj.weight + 0, other.k_proj.weight + 0)
    relu = model.k_proj.with_activation("relu")
    assert type(relu) is QLinear
    assert torch.equal(relu(x), other.k_proj.with_activation("relu")(x))
    floats, wanted = pyquant.dequantize_(model), pyquant.dequantize_(other)
    assert all(torch.equal(a, b) for a, b in zip(floats.parameters(), wanted.parameters(), strict=True))


def test_a_static_scale_of_one_member_is_refused() -> None:
    model = pyquant.merge_(quantised(pyquant.W8A8()))
    with pytest.raises(ArgumentError, match="one for all members of a group"):
        model.k_proj.input_scale = torch.tensor([0.5])
    with pytest.raises(RuntimeError, match="one for all members"):
        model.load_state_dict({n: t * 2 if n.endswith("input_scale") else t for n, t in model.state_dict().items()})


def test_what_stays_apart_and_why() -> None:
    def reasons(change) -> list[tuple[str, str]]:
        model = quantised(pyquant.W8A8())
        change(model)
        records = pyquant.merge_report(model)
        x = torch.randn(2, 32)
        before = model(x)
        pyquant.merge_(model)
        assert all(torch.equal(a, b) for a, b in zip(model(x), before, strict=True))
        return [(" ".join(r.names), r.reason or r.state) for r in records]

    def scaled(model: Heads) -> None:
        model.v_proj.input_scale = torch.tensor([0.5])

    def of(name: str, scheme: pyquant.QScheme, **more):
        return lambda m: setattr(
            m, name, QLinear.from_float(m.get_submodule(name).to_float(), scheme, **calibration(scheme), **more)
        )

    pair = [("q_proj k_proj", "mergeable")]
    assert reasons(lambda m: None) == [("q_proj k_proj v_proj", "mergeable")]
    assert reasons(scaled) == [*pair, ("v_proj", "their static input scales differ")]
    assert "schemes differ" in reasons(of("v_proj", pyquant.W8A8Dynamic()))[1][1]
    assert "schemes differ" in reasons(of("v_proj", pyquant.W8A16()))[1][1]
    assert "floating point" in reasons(of("v_proj", pyquant.FP16()))[1][1]
    assert "activations differ" in reasons(of("v_proj", pyquant.W8A8(), activation="silu"))[1][1]
    hooked = reasons(lambda m: m.v_proj.register_forward_hook(lambda *a: None))
    assert hooked == [*pair, ("v_proj", "it has hooks")]
    assert reasons(lambda m: setattr(m, "again", m.v_proj))[1] == ("v_proj", "it stands in several places of the model")


def test_a_run_finds_what_no_name_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 8) for _ in range(3))
            self.first, self.second = nn.Linear(32, 8), nn.Linear(32, 8)

        def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
            return [self.q_proj(x), self.k_proj(y), self.v_proj(y), self.first(x + y), self.second(x + y)]

    model = pyquant.quantize_(Cross().eval(), "W8A8Dynamic", check_speed=False)
    inputs = torch.randn(3, 32), torch.randn(3, 32)
    before = model(*inputs)
    records = pyquant.merge_report(model, inputs)
    assert [(r.names, r.state) for r in records] == [(("k_proj", "v_proj"), "mergeable")]
    pyquant.merge_(model, inputs)
    assert type(model.q_proj) is QLinear
    assert pyquant.merge_report(model, inputs)[0].state == "merged"
    members = [model.k_proj, model.v_proj]
    assert [pyquant.merge_(model, inputs).k_proj, model.v_proj] == members
    assert all(torch.equal(a, b) for a, b in zip(model(*inputs), before, strict=True))


def test_models_without_layers_and_in_training() -> None:
    with pytest.raises(ArgumentError, match="without QLinear"):
        pyquant.merge_(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ArgumentError, match="itself"):
        pyquant.merge_(QLinear(4, 4))
    with pytest.raises(ArgumentError, match="training mode"):
        pyquant.merge_(quantised(pyquant.W8A8Dynamic()).train(), torch.randn(2, 32))


def test_a_llama_generates_the_same_tokens_with_a_product_less() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = pyquant.quantize_(transformers.LlamaForCausalLM(config).eval(), "W8A8Dynamic", check_speed=False)
    ids = torch.arange(6)[None]

    def tokens() -> Tensor:
        return model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)

    before, logits = tokens(), model(ids).logits
    assert {len(r.names) for r in pyquant.merge_report(model, ids)} == {2, 3}
    assert pyquant.merge_report(model, ids) == pyquant.merge_report(model)
    pyquant.merge_(model)
    assert sum(isinstance(m, MergedLinear) for m in model.modules()) == 10
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(tokens(), before)
    assert set(SIBLINGS) >= {NAMES, ("gate_proj", "up_proj")}
