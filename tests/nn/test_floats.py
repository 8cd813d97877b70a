"""Nothing stays in floating point in silence: every matrix of other people's models is quantised, or named with why."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant import W4A8Dynamic, W8A8Dynamic

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is a demo extra and not installed"
)
needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="peft is not installed (pip install peft)"
)

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


def llama(**more: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, bos_token_id=1, eos_token_id=2, **more)
    return transformers.LlamaForCausalLM(config).eval()


def mixtral() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=4, bos_token_id=1, eos_token_id=2
    )
    return transformers.MixtralForCausalLM(config).eval()


def matrices(model: nn.Module) -> int:
    """Bytes of all floating-point parameters with two dimensions, each once."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if sum(s > 1 for s in p.shape) > 1)


def assert_all_told(model: nn.Module) -> None:
    """The report accounts for every byte of every float matrix, and says why."""
    records = [r for r in pyquant.quantization_report(model) if r.scheme == "float"]
    biases = sum(
        m.bias.numel() * 4 for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d)) and m.bias is not None
    )
    assert sum(r.bytes_after for r in records) == matrices(model) + biases
    assert all(r.reason for r in records)
    assert sum(r.share for r in pyquant.quantization_report(model)) == pytest.approx(1)


@needs_transformers
def test_stacked_experts_are_named_with_their_share() -> None:
    model = mixtral()
    assert_all_told(model)
    for layer in model.model.layers:  # type: ignore[union-attr, operator]
        layer.mlp.experts.forward = layer.mlp.experts.forward  # patched: nobody knows what it computes
    with pytest.warns(pyquant.QuantizationWarning, match=r"experts and 1 more \(MixtralExperts, \d\d\.\d%\): stacked"):
        pyquant.quantize_(model, W8A8Dynamic())
    assert_all_told(model)
    told = {r.name: r for r in pyquant.quantization_report(model)}
    assert "gate_up_proj [4, 256, 64]" in told["model.layers.0.mlp.experts"].reason
    assert told["model.layers.0.mlp.experts"].share > 0.3


@needs_transformers
def test_the_warning_comes_once_and_from_the_callers_line() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pyquant.quantize_(mixtral(), W8A8Dynamic())
    told = [w for w in caught if issubclass(w.category, pyquant.QuantizationWarning)]
    assert [w.filename for w in told] == [__file__]


@needs_transformers
@pytest.mark.parametrize(
    "call",
    [
        lambda m: pyquant.quantize_(m, W8A8Dynamic(), heads=False),
        lambda m: pyquant.quantize_(m, W8A8Dynamic(), heads=True),
        lambda m: pyquant.quantize_(m, {"lm_head": None, "_default": W8A8Dynamic()}),
        lambda m: pyquant.quantize_(m, W8A8Dynamic(), lambda _, name: name != "lm_head"),
    ],
)
def test_what_was_asked_for_needs_no_words(call: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        call(llama())


@needs_transformers
def test_a_warning_made_an_error_leaves_the_model_as_it_was() -> None:
    model = mixtral()
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        with pytest.raises(pyquant.QuantizationWarning):
            pyquant.quantize_(model, W8A8Dynamic())
    assert not any(isinstance(m, pyquant.QLinear) for m in model.modules())


# ---- heads


@needs_transformers
def test_an_output_head_stays_unless_it_is_asked_for() -> None:
    model = llama()
    with pytest.warns(pyquant.QuantizationWarning, match=r"lm_head \(Linear.*an output head.*heads=True"):
        pyquant.quantize_(model, W8A8Dynamic())
    assert type(model.lm_head) is nn.Linear
    for config in ({"lm_head": W8A8Dynamic()}, {"re:.*head": W8A8Dynamic()}, {"*": W8A8Dynamic()}):
        assert isinstance(pyquant.quantize_(llama(), config).lm_head, pyquant.QLinear)
    assert isinstance(pyquant.quantize_(llama(), W8A8Dynamic(), heads=True).lm_head, pyquant.QLinear)


@needs_transformers
def test_a_tied_head_stays_tied() -> None:
    model = llama(tie_word_embeddings=True)
    assert_all_told(model)
    with pytest.warns(pyquant.QuantizationWarning, match="output head"):
        pyquant.quantize_(model, W8A8Dynamic(), embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    told = {r.name: r for r in pyquant.quantization_report(model)}
    assert told["model.embed_tokens"].reason == "tied to an output head that stays in floating point"
    assert told["model.embed_tokens"].bytes_before == 0  # counted once, at the head that multiplies by it
    pyquant.quantize_(again := llama(tie_word_embeddings=True), W8A8Dynamic(), embeddings=True, heads=True)
    assert isinstance(again.model.embed_tokens, pyquant.QEmbedding)
    assert torch.equal(again.model.embed_tokens.weight_scale, again.lm_head.weight_scale)


def test_a_layer_that_is_called_head_and_is_none_is_quantised() -> None:
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 4)})
    pyquant.quantize_(model, W8A8Dynamic())
    assert isinstance(model["head"], pyquant.QLinear)


# ---- adapters


class LoRA(nn.Module):
    """A hand-written adapter: base(x) + up(down(x)), the base frozen."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def test_trainable_adapters_of_any_make_stay_trainable() -> None:
    model = nn.Sequential(LoRA(nn.Linear(64, 64)), nn.ReLU(), LoRA(nn.Linear(64, 64)))
    before = {n for n, p in model.named_parameters() if p.requires_grad}
    with pytest.warns(pyquant.QuantizationWarning, match=r"0\.down and 3 more \(Linear.*trainable in a model whose"):
        pyquant.quantize_(model, W8A8Dynamic())
    assert {n for n, p in model.named_parameters() if p.requires_grad} == before
    assert isinstance(model[0].base, pyquant.QLinear)
    model(torch.randn(3, 64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("rows", [16, 150])  # 20 %, and the 70 % of a detector's backbone
def test_frozen_weights_make_no_adapters_of_as_large_ones(rows: int) -> None:
    model = nn.ModuleDict({"table": nn.Embedding(rows, 64).requires_grad_(False), "fc": nn.Linear(64, 64)})
    assert isinstance(pyquant.quantize_(model, W8A8Dynamic())["fc"], pyquant.QLinear)


@needs_transformers
@needs_peft
@pytest.mark.parametrize("trainable", [True, False])
def test_peft_adapters_are_left_and_their_base_is_quantised(trainable: bool) -> None:
    import peft

    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    model = peft.get_peft_model(llama(), config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable and "lora_" in name)
    wanted = {n: p for n, p in model.named_parameters() if "lora_" in n}
    reference, ids = copy.deepcopy(model), torch.arange(12)[None]
    with pytest.warns(pyquant.QuantizationWarning, match="an adapter of a layer that wraps another"):
        pyquant.quantize_(model, W8A8Dynamic())
    assert {n: id(p) for n, p in model.named_parameters() if "lora_" in n} == {n: id(p) for n, p in wanted.items()}
    assert sum(p.requires_grad for p in model.parameters()) == trainable * len(wanted)
    attention = model.base_model.model.model.layers[0].self_attn
    assert isinstance(attention.q_proj.base_layer, pyquant.QLinear)
    with torch.no_grad():
        a, b = model(ids).logits, reference(ids).logits
    assert 20 * torch.log10(b.norm() / (a - b).norm()) > 25
    if trainable:
        model(ids).logits.sum().backward()
        assert all(p.grad is not None for p in wanted.values())


@needs_transformers
@needs_peft
def test_dora_adapters_are_left_alone_and_named() -> None:
    import peft

    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, use_dora=True, init_lora_weights=False)
    model = peft.get_peft_model(llama(), config).eval()
    wanted, ids = {n: id(p) for n, p in model.named_parameters() if "lora_" in n}, torch.arange(12)[None]
    assert any("magnitude" in n for n in wanted)
    with torch.no_grad():
        want = model(ids).logits
    with pytest.warns(pyquant.QuantizationWarning, match="an adapter of a layer that wraps another"):
        pyquant.quantize_(model, W8A8Dynamic())
    assert {n: id(p) for n, p in model.named_parameters() if "lora_" in n} == wanted
    told = {r.name.rpartition("q_proj.")[2]: r for r in pyquant.quantization_report(model) if "0.self_attn.q" in r.name}
    assert told["base_layer"].scheme == "W8A8Dynamic"
    assert {told[f"lora_{part}.default"].reason for part in "AB"} == {
        "an adapter of a layer that wraps another (LoRA and the like)"
    }
    logits = model(ids).logits
    assert 20 * torch.log10(want.norm() / (logits - want).norm()) > 25
    logits.sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if n in wanted)


# ---- group sizes that do not divide


def narrow() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 192), nn.ReLU(), nn.Linear(192, 256), nn.ReLU(), nn.Linear(256, 8))


def test_a_group_size_that_does_not_divide_gives_a_scale_a_channel() -> None:
    model, x = narrow(), torch.randn(4, 256)
    reference = model(x)
    with pytest.warns(pyquant.QuantizationWarning, match=r"1 layer\(s\) got another scheme: 2 .*128 does not divide K"):
        pyquant.quantize_(model, W4A8Dynamic())
    assert [str(m.scheme) for m in model if isinstance(m, pyquant.QLinear)] == [
        "W4A8Dynamic(group_size=128)",
        "W4A8Dynamic(group_size=None)",
        "W4A8Dynamic(group_size=128)",
    ]
    told = {r.name: r.reason for r in pyquant.quantization_report(model)}
    assert told == {"0": "", "2": "group size 128 does not divide K = 192: one scale a channel", "4": ""}
    assert (model(x) - reference).norm() < 0.5 * reference.norm()


def test_or_it_is_left_or_refused() -> None:
    with pytest.warns(pyquant.QuantizationWarning, match=r"2 \(Linear"):
        model = pyquant.quantize_(narrow(), W4A8Dynamic(), on_indivisible="skip")
    assert type(model[2]) is nn.Linear
    assert isinstance(model[0], pyquant.QLinear)
    with pytest.raises(pyquant.SchemeError, match=r"2: group_size.*128.*divisor of in_features = 192"):
        pyquant.quantize_(narrow(), W4A8Dynamic(), on_indivisible="error")


@pytest.mark.parametrize("stem", [(3, 16, 3), (3, 16, 4), (3, 16, 7), (3, 16, 14)])
def test_an_image_stem_does_not_fail_a_four_bit_model(stem: tuple[int, int, int]) -> None:
    model = nn.Sequential(nn.Conv2d(*stem), nn.ReLU(), nn.Conv2d(16, 32, 4))
    with pytest.warns(pyquant.QuantizationWarning, match="got another scheme"):
        pyquant.quantize_(model, W4A8Dynamic())
    assert model(torch.randn(1, 3, 28, 28)).isfinite().all()


@pytest.mark.parametrize("way", ["weight_norm", "spectral_norm"])
def test_parametrised_weights_are_counted_once(way: str) -> None:
    """As their layer's: what they are made of is no matrix beside it."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    getattr(torch.nn.utils.parametrizations, way)(model[0])
    with pytest.warns(pyquant.QuantizationWarning, match="50% of the weight bytes"):
        pyquant.quantize_(model, W8A8Dynamic(), check_speed=False)
    rows = pyquant.quantization_report(model)
    assert [row.name for row in rows] == ["0", "1"]
    assert rows[1].share == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("kind", ["Conv1d", "LSTM"])
def test_what_a_module_without_a_twin_is_computed_from_is_named_as_its_own(kind: str) -> None:
    """Not as stacked matrices of the module that keeps them."""
    module: nn.Module = nn.Conv1d(4, 8, 3) if kind == "Conv1d" else nn.LSTM(4, 8)
    tensors = ("weight",) if kind == "Conv1d" else ("weight_ih_l0", "weight_hh_l0")
    for tensor in tensors:
        torch.nn.utils.parametrizations.weight_norm(module, tensor)
    model = nn.ModuleDict({"a": module, "b": nn.Linear(64, 64)})
    with pytest.warns(pyquant.QuantizationWarning, match=rf"\ba \(Parametrized{kind}"):
        pyquant.quantize_(model, W8A8Dynamic(), check_speed=False)
    rows = pyquant.quantization_report(model)
    assert [row.name for row in rows] == ["a", "b"]
    assert "only Conv2d" in rows[0].reason or "ParametrizedLSTM" in rows[0].reason
    assert "expert" not in rows[0].reason
