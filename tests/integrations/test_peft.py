"""LoRA of the real peft around quantised layers: bits, gradients, files, merging, and what is refused."""

from __future__ import annotations

import copy
import importlib
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import switches
import torch
from fresh import python, with_transformers
from torch import nn

import pyquant
from pyquant.integrations import peft as ours
from pyquant.integrations.peft import merging

P = pytest.importorskip("peft")
T = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::pyquant.QuantizationWarning")
SCHEMES = [
    "W8A8",
    "W8A8Dynamic",
    "W8A8Dynamic(symmetric_inputs=False)",
    "W4A8(group_size=32)",
    "W4A8Dynamic(group_size=32)",
    "W4A8TwoLevelDynamic(group_size=32)",
    "W4A4Dynamic",
    "W4A16(group_size=32)",
    "W4A16(group_size=32, symmetric=False)",
    "W8A16",
    "FP16",
    "FP16(dtype='bfloat16')",
]
X = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(5))
IDS = torch.arange(4, 20)[None]


_enabled = switches.on(ours)


def net(scheme: Any = "W8A8Dynamic", *, bias: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    """Two quantised layers and nothing else: no parameter in floating point."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias), nn.ReLU(), nn.Linear(48, 32, bias)).to(dtype).eval()
    data = [X.to(dtype)] if pyquant.scheme_from_name(scheme).is_static else None
    return pyquant.quantize_(model, scheme, data=data, check_speed=False, on_indivisible="per_channel")


def config(**words: Any) -> Any:
    return P.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ["0", "2"]} | words)


def shaken(model: Any, adapter: str = "default", size: float = 0.2) -> Any:
    """Adapters with numbers, as if they had been trained."""
    generator = torch.Generator().manual_seed(len(adapter))
    for name, parameter in model.named_parameters():
        if f".{adapter}." in name:
            parameter.data.normal_(std=size, generator=generator)
    return model.eval()


def adapted(scheme: Any = "W8A8Dynamic", **words: Any) -> Any:
    return shaken(P.get_peft_model(net(scheme), config(**words)))


def wrappers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, ours.PyquantLoraLinear)]


def codes_of(model: Any) -> dict[str, torch.Tensor]:
    """Every number of the quantised layers."""
    return {
        f"{name}.{key}": tensor.clone()
        for name, module in model.named_modules()
        if isinstance(module, pyquant.QLinear)
        for key, tensor in module.state_dict().items()
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def change(layer: Any, adapter: str = "default") -> torch.Tensor:
    return layer.lora_B[adapter].weight.float() @ layer.lora_A[adapter].weight.float() * layer.scaling[adapter]


def llama(scheme: str = "W4A16(group_size=32)", **words: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    model = T.LlamaForCausalLM(T.LlamaConfig(**sizes | heads | words)).eval()
    return pyquant.quantize_(model, scheme, check_speed=False)


# ---- forward and backward


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_adapter_is_added_to_the_bits_of_the_layer(scheme: str) -> None:
    alone = net(scheme)
    expected = alone(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Unsupported layer type ... proceed at your own risk" of peft
        model = P.get_peft_model(alone, config()).eval()
    assert len(wrappers(model)) == 2
    assert torch.equal(model(X), expected)  # B is zero
    for layer, x in zip(wrappers(shaken(model)), (X, X[..., :48]), strict=True):
        low = layer.lora_B["default"](layer.lora_A["default"](x))
        assert torch.equal(layer(x), layer.base_layer(x) + low * 1.5)
    with model.disable_adapter():
        assert torch.equal(model(X), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_the_adapter_and_of_the_input(dtype: torch.dtype) -> None:
    layer = wrappers(shaken(P.get_peft_model(net(dtype=dtype), config(target_modules=["0"]))))[0]
    x = X.to(dtype, copy=True).requires_grad_()
    y = layer(x)
    assert y.dtype == dtype
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (y * weight).sum().backward()

    twin = nn.Sequential(copy.deepcopy(layer.lora_A["default"]), copy.deepcopy(layer.lora_B["default"]))
    real = layer.base_layer.dequantised_weight()
    free = X.to(dtype).to(torch.float32, copy=True).requires_grad_()
    ((twin(free) * 1.5 + free @ real.T) * weight.float()).sum().backward()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for mine, other in ((layer.lora_A["default"], twin[0]), (layer.lora_B["default"], twin[1])):
        torch.testing.assert_close(mine.weight.grad, other.weight.grad, rtol=tolerance, atol=tolerance)
    assert x.grad is not None
    error = (x.grad.float() - free.grad).norm() / free.grad.norm()
    assert error < tolerance
    assert [name for name, p in layer.base_layer.named_parameters() if p.grad is not None or p.requires_grad] == []


def test_autocast_and_the_type_of_the_adapters() -> None:
    model = adapted()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(X)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for n, p in model.named_parameters() if "lora_" in n)
    halves = P.get_peft_model(net(dtype=torch.bfloat16), config(), autocast_adapter_dtype=False)
    assert {p.dtype for n, p in halves.named_parameters() if "lora_" in n} == {torch.bfloat16}
    assert {p.dtype for n, p in P.get_peft_model(net(dtype=torch.bfloat16), config()).named_parameters()} == {
        torch.float32,
        torch.bfloat16,  # the stand-ins of the layers
    }


def test_qlora_of_a_language_model_learns_and_a_new_process_reads_it(tmp_path: Path) -> None:
    base = P.prepare_model_for_kbit_training(llama())
    pyquant.save_pretrained(base, tmp_path / "base")
    model = P.get_peft_model(base, config(target_modules="all-linear", task_type="CAUSAL_LM"))
    assert len(wrappers(model)) == 7
    before, optimizer = codes_of(model), torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 2e-2)
    losses = []
    for _ in range(20):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
    assert same(codes_of(model), before)  # the codes are frozen
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        sum_of_bits = model.eval()(IDS).logits.view(torch.int32).sum().item()
    code = f"""
import json, peft, pyquant, torch, transformers
from pyquant.integrations import peft as ours
ids, sums = torch.tensor({IDS.tolist()}), []
for way in ("enable", "register"):
    base = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained("base")).eval()
    base = pyquant.load_pretrained("base", base)
    if way == "enable":
        ours.enable()
        model = peft.PeftModel.from_pretrained(base, "adapter")
    else:
        ours.disable()
        config = ours.register(peft.LoraConfig.from_pretrained("adapter"))
        model = peft.PeftModel.from_pretrained(base, "adapter", config=config)
    with torch.no_grad():
        sums.append(model(ids).logits.view(torch.int32).sum().item())
print(json.dumps(sums))
"""
    assert with_transformers(code, tmp_path) == [sum_of_bits] * 2


def test_trainer_and_the_adapters_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = llama("W8A8Dynamic")
    model.add_adapter(config(target_modules=["q_proj", "down_proj"]))
    words = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    arguments = T.TrainingArguments(str(tmp_path), max_steps=8, learning_rate=2e-2, logging_steps=1, **words)
    data = [{"input_ids": IDS[0], "labels": IDS[0]}] * 8
    trainer = T.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1
    model.save_pretrained(tmp_path)
    again = llama("W8A8Dynamic")
    again.load_adapter(str(tmp_path))
    assert torch.equal(again(IDS).logits, model.eval()(IDS).logits)


# ---- several adapters


def test_several_adapters_one_by_one_together_and_in_one_batch(tmp_path: Path) -> None:
    model = adapted()
    model.add_adapter("b", config(r=2))
    assert all("b" in layer.lora_A for layer in wrappers(shaken(model, "b")))
    results = {}
    for name in ("default", "b"):
        model.set_adapter(name)
        results[name] = model(X)
    assert not torch.equal(results["default"], results["b"])
    mixed = model(X, adapter_names=["default", "b"])
    # Of fewer rows torch's float products of the adapters may round otherwise, and a code of the next layer turn.
    off = (mixed - torch.stack([results["default"][0], results["b"][1]])).abs().max()
    assert off < 0.02 * min((results["default"] - results["b"])[i].abs().max() for i in (0, 1))
    model.base_model.set_adapter(["default", "b"])
    layer = wrappers(model)[0]
    both = layer.base_layer(X)
    for name in ("default", "b"):
        both = both + layer.lora_B[name](layer.lora_A[name](X)) * layer.scaling[name]
    assert torch.equal(layer(X), both)
    model.save_pretrained(tmp_path)
    again = P.PeftModel.from_pretrained(net(), tmp_path)
    again.load_adapter(tmp_path / "b", "b")
    again.set_adapter("b")
    assert torch.equal(again.eval()(X), results["b"])
    again.delete_adapter("b")
    assert again.active_adapters == ["default"]
    assert torch.equal(again(X), results["default"])


# ---- merging


@pytest.mark.parametrize("scheme", SCHEMES)
def test_merged_weights_are_as_near_as_the_scheme_allows_and_unmerge_restores_every_bit(scheme: str) -> None:
    model = adapted(scheme)
    before, y = codes_of(model), model(X)
    wanted = [layer.base_layer.dequantised_weight() + change(layer) for layer in wrappers(model)]
    model.merge_adapter()
    found = ours.merge_errors(model)
    assert list(found) == ["base_model.model.0.base_layer", "base_model.model.2.base_layer"]
    for layer, real, error in zip(wrappers(model), wanted, found.values(), strict=True):
        base, linear = layer.base_layer, nn.Linear(layer.in_features, layer.out_features, bias=False)
        linear.weight.data = real
        noise = (base.dequantised_weight() - real).double().norm().item()
        best = pyquant.QLinear.from_float(
            linear, replace(base.scheme, inputs=None) if base.scheme.is_static else base.scheme
        )
        assert noise <= (best.dequantised_weight() - real).double().norm().item() * (1 + 1e-6)
        assert error.relative == pytest.approx(noise / real.double().norm().item(), rel=1e-5)
        assert error.sqnr_db == pytest.approx(-20 * math.log10(error.relative))
        assert error.of_adapter == pytest.approx(noise / change(layer).double().norm().item(), rel=1e-5)
        assert error.adapters == ("default",)
        limit = 1e-2 if base.scheme.weights is None or base.scheme.weights.bits > 4 else 0.12
        assert 0 < error.relative < limit
    assert not same(codes_of(model), before)
    model.unmerge_adapter()
    assert same(codes_of(model), before)
    assert torch.equal(model(X), y)
    assert ours.merge_errors(model) == {}
    model.merge_adapter()
    with model.disable_adapter():  # peft unmerges for it
        model(X)
    assert same(codes_of(model), before)


def test_an_adapter_of_zeros_keeps_the_codes_whatever_made_them() -> None:
    torch.manual_seed(0)
    codes = torch.randint(-8, 8, (32, 64), dtype=torch.int8)
    wide = replace(pyquant.W4A16(group_size=32), weights=replace(pyquant.W4A16(32).weights, narrow_range=False))
    odd = pyquant.QLinear.from_codes(codes, torch.rand(32, 2) + 0.5, scheme=wide)
    fixed = replace(wide, weights=replace(wide.weights, calibrator="fixed"))
    given = pyquant.QLinear.from_codes(codes.clone(), torch.rand(32, 2) + 0.5, scheme=fixed)
    model = P.get_peft_model(nn.ModuleDict({"a": odd, "b": given}), config(target_modules=["a", "b"]))
    before = codes_of(model)
    model.merge_adapter()
    assert same(codes_of(model), before)
    assert {e.relative for e in ours.merge_errors(model).values()} == {0.0}
    assert {e.of_adapter for e in ours.merge_errors(model).values()} == {0.0}


def test_only_rows_that_changed_get_other_codes() -> None:
    model = P.get_peft_model(net(), config(target_modules=["0"], init_lora_weights=False))
    layer = wrappers(model)[0]
    layer.lora_B["default"].weight.data[1:] = 0
    layer.lora_B["default"].weight.data[0] = 3
    before = layer.base_layer.codes.clone(), layer.base_layer.weight_scale.clone()
    model.merge_adapter()
    assert torch.equal(layer.base_layer.codes[1:], before[0][1:])
    assert torch.equal(layer.base_layer.weight_scale[1:], before[1][1:])
    assert layer.base_layer.weight_scale[0] > before[1][0]


def test_one_scale_for_a_tensor_stays_one() -> None:
    scheme = replace(pyquant.W8A16(), weights=replace(pyquant.W8A16().weights, granularity="per_tensor"))
    torch.manual_seed(0)
    net = nn.ModuleDict({"a": pyquant.QLinear.from_float(nn.Linear(64, 32), scheme)})
    model = P.get_peft_model(net, config(target_modules=["a"]))
    layer = wrappers(shaken(model))[0]
    layer.lora_B["default"].weight.data[1:] = 0  # of one row alone; the others would be better off with their own scale
    model.merge_adapter()
    assert layer.base_layer.weight_scale.unique().numel() == 1


def test_adapters_merged_one_after_the_other_are_rounded_once() -> None:
    def two() -> Any:
        model = adapted("W4A8Dynamic(group_size=32)")
        model.add_adapter("b", config())
        return shaken(model, "b")

    once, twice = two(), two()
    once.merge_adapter(adapter_names=["default", "b"])
    before = codes_of(twice)
    twice.merge_adapter(adapter_names=["default"])
    twice.merge_adapter(adapter_names=["b"])
    assert same(codes_of(once), codes_of(twice))
    assert next(iter(ours.merge_errors(twice).values())).adapters == ("default", "b")
    twice.unmerge_adapter()
    assert same(codes_of(twice), before)
    assert wrappers(twice)[0].merged_adapters == []


def test_merge_and_unload_gives_a_quantised_model_that_is_saved(tmp_path: Path) -> None:
    model = shaken(P.get_peft_model(llama(), config(target_modules="all-linear")))
    y = model(IDS).logits
    merged = model.merge_and_unload(safe_merge=True)
    assert wrappers(merged) == []
    assert len(ours.merge_errors(merged)) == 7
    error = (merged(IDS).logits - y).norm() / y.norm()
    assert 0 < error < 0.3
    pyquant.save_pretrained(merged, tmp_path)
    again = pyquant.load_pretrained(tmp_path, T.LlamaForCausalLM(merged.config).eval())
    assert torch.equal(again(IDS).logits, merged(IDS).logits)


def test_the_bias_of_an_adapter_is_merged_exactly() -> None:
    model = adapted(lora_bias=True)
    layer = wrappers(model)[0]
    expected = layer.base_layer.bias_ + layer.lora_B["default"].bias * 1.5
    before = codes_of(model)
    model.merge_adapter()
    assert torch.equal(layer.base_layer.bias_, expected)
    model.unmerge_adapter()
    assert same(codes_of(model), before)
    bare = shaken(P.get_peft_model(net(bias=False), config(lora_bias=True)))
    with pytest.raises(pyquant.ArgumentError, match="lora_bias"):
        bare.merge_adapter()


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize(
    ("number", "scheme"), [(math.nan, "W4A16(group_size=32)"), (math.inf, "W8A8Dynamic"), (1e7, "FP16")]
)
def test_broken_adapters_are_refused_and_nothing_is_changed(safe: bool, number: float, scheme: str) -> None:
    model = adapted(scheme)
    layer = wrappers(model)[0]
    before = codes_of(model)
    layer.lora_B["default"].weight.data[3, 1] = number
    with pytest.raises(pyquant.NonFiniteError, match="adapter_names"):
        model.merge_adapter(safe_merge=safe)
    assert same(codes_of(model), before)
    assert not layer.merged


def test_what_a_merge_says() -> None:
    def said(model: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("default")
            model.merge_adapter()
        return [str(one.message) for one in found if issubclass(one.category, pyquant.QuantizationWarning)]

    (usual,) = said(adapted())  # once, not once a layer
    assert "merge_errors" in usual
    small = shaken(P.get_peft_model(net("W4A16(group_size=32)"), config()), size=0.003)
    assert any("takes away more than half" in text for text in said(small))
    assert all(0.5 < error.of_adapter <= 1 for error in ours.merge_errors(small).values())
    assert any("static input range" in text for text in said(adapted("W8A8")))


def test_layers_that_become_float_again_are_merged_exactly() -> None:
    model = adapted("W4A16(group_size=32)")
    pyquant.dequantize_(model)
    layer = wrappers(model)[0]
    expected = layer.base_layer.weight + change(layer)
    model.merge_adapter()
    assert torch.equal(layer.base_layer.weight, expected)
    assert ours.merge_errors(model) == {}


def test_a_merged_model_is_copied_moved_and_cast() -> None:
    model = adapted()
    before = codes_of(model)
    model.merge_adapter()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(X), model(X))
    assert twin.bfloat16()(X.bfloat16()).dtype == torch.bfloat16
    twin.unmerge_adapter()
    assert same(codes_of(twin), before)
    assert not same(codes_of(model), before)


# ---- which layers


def test_all_linear_means_quantised_layers_and_a_second_adapter_finds_them_again() -> None:
    model = P.get_peft_model(llama(tie_word_embeddings=False), config(target_modules="all-linear"))
    model.add_adapter("b", config(target_modules="all-linear"))
    assert len(wrappers(model)) == 7
    assert model.peft_config["b"].target_modules == model.peft_config["default"].target_modules
    assert not isinstance(model.base_model.model.lm_head, ours.PyquantLoraLinear)
    heads = P.get_peft_model(pyquant.quantize_(llama(), "W8A8Dynamic", heads=True), config(target_modules="all-linear"))
    assert len(wrappers(heads)) == 7
    pairs = T.LlamaForSequenceClassification(llama().config)
    pyquant.quantize_(pairs, {"score": None, "re:.*": "W8A8Dynamic"}, check_speed=False)
    words = config(target_modules="all-linear", task_type="SEQ_CLS")
    classifier = P.get_peft_model(pairs, words)
    assert len(wrappers(classifier)) == 7
    assert classifier.base_model.model.score.modules_to_save["default"].weight.requires_grad  # peft trains it
    pyquant.quantize_(again := T.LlamaForSequenceClassification(llama().config), "W8A8Dynamic", check_speed=False)
    with pytest.raises(pyquant.ArgumentError, match="modules_to_save"):
        P.get_peft_model(again, words)


def test_conv1d_attention_experts_and_merged_layers() -> None:
    gpt2 = T.GPT2LMHeadModel(T.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=96, n_positions=32)).eval()
    encoder = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    experts = T.MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=96, num_local_experts=4)
    together = pyquant.merge_(llama("W8A8Dynamic"))
    cases = [
        (gpt2, ["c_attn", "c_proj"], IDS, 3),
        (encoder, "all-linear", X, 6),
        (T.MixtralForCausalLM(experts).eval(), ["gate_up_proj", "down_proj"], IDS, 8),
        (together, "all-linear", IDS, 7),
    ]
    for model, targets, x, count in cases:
        if model is not together:
            pyquant.quantize_(model, "W8A8Dynamic", check_speed=False)
        out = getattr(first := model(x), "logits", first)
        words = {"fan_in_fan_out": True} if model is gpt2 else {}
        adapter = P.get_peft_model(model, config(target_modules=targets, **words)).eval()
        assert len(wrappers(adapter)) == count
        for layer in wrappers(adapter):  # [out, in], though the float Conv1D was the other way round
            assert layer.get_delta_weight("default").shape == (layer.out_features, layer.in_features)
        with torch.no_grad():
            assert torch.equal(getattr(again := adapter(x), "logits", again), out)
            y = getattr(result := shaken(adapter, size=0.05)(x), "logits", result)
            assert not torch.equal(y, out)
            before = codes_of(adapter)
            adapter.merge_adapter()
            merged = getattr(result := adapter(x), "logits", result)
            assert (merged - y).norm() / y.norm() < 0.03
        adapter.unmerge_adapter()
        assert same(codes_of(adapter), before)


# By the families' own names peft and transformers turn adapters of experts into those of stacked parameters.
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_have_adapters_that_files_bring_back(family: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    made = getattr(T, f"{family}Config")(**sizes, num_key_value_heads=2, vocab_size=96, **MIXTURES[family])
    torch.manual_seed(0)
    base = pyquant.quantize_(getattr(T, f"{family}ForCausalLM")(made).eval(), "W8A8Dynamic", check_speed=False)
    layers = {name for name, module in base.named_modules() if isinstance(module, pyquant.QLinear)}
    assert len([name for name in layers if "experts.3" in name]) == 2
    words = config(target_modules="all-linear", task_type="CAUSAL_LM")

    one = shaken(P.get_peft_model(copy.deepcopy(base), copy.deepcopy(words)))
    assert {n.removeprefix("base_model.model.") for n, m in one.named_modules() if m in wrappers(one)} == layers
    one.save_pretrained(tmp_path / "peft")
    again = P.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "peft").eval()
    assert same(P.get_peft_model_state_dict(one), P.get_peft_model_state_dict(again))
    torch.testing.assert_close(again(input_ids=IDS).logits, one(input_ids=IDS).logits)

    other = copy.deepcopy(base)
    other.add_adapter(copy.deepcopy(words))
    shaken(other).save_pretrained(tmp_path / "transformers")
    read = copy.deepcopy(base)
    read.load_adapter(str(tmp_path / "transformers"))
    assert len(wrappers(read)) == len(layers)
    torch.testing.assert_close(read.eval()(input_ids=IDS).logits, other(input_ids=IDS).logits)


def test_experts_that_stay_floats_are_peft_s_own() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    made = T.Qwen3MoeConfig(**sizes, num_key_value_heads=2, vocab_size=96, **MIXTURES["Qwen3Moe"])
    floats = P.get_peft_model(T.Qwen3MoeForCausalLM(made).eval(), config(target_modules="all-linear"))
    assert {"gate_up_proj", "down_proj"} <= set(floats.peft_config["default"].target_parameters)


def test_fusing_and_merging_products_leave_adapted_layers_alone() -> None:
    model = shaken(P.get_peft_model(llama("W8A8Dynamic"), config(target_modules="all-linear")))
    y = model(IDS).logits
    pyquant.fuse_(model)
    pyquant.merge_(model)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, y)


# ---- refusals


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights"),
        ({"init_lora_weights": "corda"}, "init_lora_weights"),
        ({"init_lora_weights": "mica"}, "init_lora_weights"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights"),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4, "loftq_iter": 1}}, "init_lora_weights"),
        ({"bias": "all"}, "bias"),
        ({"bias": "lora_only"}, "bias"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_configurations_that_need_float_weights(words: dict[str, Any], named: str) -> None:
    model = net()
    before = codes_of(model)
    with pytest.raises(pyquant.ArgumentError) as error:
        P.get_peft_model(model, config(**words))
    assert error.value.argument == named
    assert same(codes_of(model), before)
    if named != "bias":
        with pytest.raises(pyquant.ArgumentError):
            ours.register(config(**words))


def test_every_variant_and_every_way_to_begin_of_this_peft_is_known() -> None:
    """A version of peft with another one: look at it, then say here and in refusals what becomes of it."""
    import dataclasses
    import typing

    variants = {f.name for f in dataclasses.fields(P.LoraConfig) if f.metadata.get("is_lora_variant")}
    known = "use_dora velora_config alora_invocation_tokens monteclora_config use_bdlora arrow_config kasa_config"
    assert variants == set(known.split())
    kind = typing.get_type_hints(P.LoraConfig)["init_lora_weights"]
    (names,) = [typing.get_args(one) for one in typing.get_args(kind) if typing.get_origin(one) is typing.Literal]
    refused = {"olora", "pissa", "pissa_niter_[number of iters]", "corda", "loftq", "mica"}
    assert set(names) - refused == {"gaussian", "eva", "orthogonal"}


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "eva"])
@pytest.mark.filterwarnings("ignore:`init_lora_weights`")
def test_ways_to_begin_that_read_no_weights(init: Any) -> None:
    alone = net()
    y = alone(X)
    model = P.get_peft_model(alone, config(init_lora_weights=init)).eval()
    assert torch.equal(model(X), y) is (init not in (False, "orthogonal"))


def test_layers_that_take_no_adapter() -> None:
    fused = pyquant.fuse_(net())
    with pytest.raises(pyquant.UnsupportedError, match="layer '0' computes relu too"):
        P.get_peft_model(fused, config())
    linked = pyquant.link_(net("W8A8"), X) if hasattr(pyquant, "link_") else None
    if linked is not None and linked[0].scheme.outputs is not None:
        with pytest.raises(pyquant.UnsupportedError, match="gives codes"):
            P.get_peft_model(linked, config())
    with pytest.raises(pyquant.UnsupportedError, match="an adapter takes floats"):
        wrappers(adapted())[0](pyquant.QTensor(torch.zeros(2, 64, dtype=torch.int8), torch.ones(1)))
    turned = nn.ModuleDict({"down": pyquant.HadamardLinear.from_linear(nn.Linear(64, 32))})
    pyquant.quantize_(turned, "W8A8Dynamic", check_speed=False)
    with pytest.raises(pyquant.UnsupportedError, match=r"name these in target_modules: down\.linear"):
        P.get_peft_model(turned, config(target_modules=["down"]))
    assert len(wrappers(P.get_peft_model(turned, config(target_modules="all-linear")))) == 1
    for layer in (pyquant.QEmbedding(10, 4), pyquant.QConv2d.from_float(nn.Conv2d(4, 4, 1), pyquant.W8A8Dynamic())):
        with pytest.raises(pyquant.UnsupportedError, match=type(layer).__name__):
            P.get_peft_model(nn.ModuleDict({"a": layer}), config(target_modules=["a"]))
    with pytest.raises(pyquant.ArgumentError, match="modules_to_save"):
        P.get_peft_model(net(), config(target_modules=["0"], modules_to_save=["2"]))


def test_other_methods_of_peft_refuse_by_themselves() -> None:
    for other in (P.IA3Config(target_modules=["0"], feedforward_modules=[]), P.LoHaConfig(target_modules=["0"])):
        with pytest.raises((ValueError, TypeError), match="not supported"):
            P.get_peft_model(net(), other)


# ---- the switch


def test_enable_and_disable() -> None:
    from peft.tuners import tuners_utils
    from peft.tuners.lora import LoraModel

    ours.enable()
    mine = LoraModel._create_new_module
    ours.disable()
    assert LoraModel._create_new_module is not mine
    assert isinstance(LoraModel.__dict__["_create_new_module"], staticmethod)
    assert tuners_utils._maybe_include_all_linear_layers.__module__ == "peft.tuners.tuners_utils"
    assert P.utils.ModulesToSaveWrapper.check_module.__module__ == "peft.utils.other"
    of_experts = importlib.import_module("peft.utils.transformers_weight_conversion")
    users = (of_experts, importlib.import_module("transformers.integrations.peft"))
    assert all(not hasattr(user.get_model_conversion_mapping, "__wrapped__") for user in users)
    assert not hasattr(of_experts._convert_peft_config_moe, "__wrapped__")
    with pytest.raises(ValueError, match="is not supported"):
        P.get_peft_model(net(), config())
    model = P.get_peft_model(net(), ours.register(config()))
    assert len(wrappers(model)) == 2
    for wrong, named in ((config(target_modules="all-linear"), "target_modules"), ("q_proj", "config")):
        with pytest.raises(pyquant.ArgumentError) as error:
            ours.register(wrong)
        assert error.value.argument == named
    ours.disable()
    ours.enable()
    assert len(wrappers(P.get_peft_model(net(), config()))) == 2


def test_float_layers_are_left_to_peft() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    kinds = {type(m) for m in P.get_peft_model(model, config(target_modules="all-linear")).modules()}
    assert P.tuners.lora.Linear in kinds
    assert ours.PyquantLoraLinear not in kinds


def test_nothing_is_imported_before_it_is_asked_for(tmp_path: Path) -> None:
    code = """
import json, sys, pyquant.integrations.diffusers, pyquant.integrations.peft
print(json.dumps([name for name in ("peft", "diffusers", "transformers", "accelerate") if name in sys.modules]))
"""
    assert python(code, tmp_path) == []


def test_a_merge_error_without_weights() -> None:
    zero = torch.zeros(2, 2)
    assert merging.error_of(["a"], zero, zero, zero) == ours.MergeError(("a",), 0.0, math.inf, 0.0)
    assert merging.error_of(["a"], zero, zero, zero + 1).relative == math.inf


def test_the_files_load_onto_the_float_model_and_checkpointing_changes_no_gradient(tmp_path: Path) -> None:
    model = shaken(P.get_peft_model(llama("W8A8Dynamic"), config(target_modules="all-linear")), size=0.05)
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    floats = P.PeftModel.from_pretrained(T.LlamaForCausalLM(model.get_base_model().config).eval(), tmp_path)
    assert (floats(IDS).logits - model(IDS).logits).norm() < 0.05 * floats(IDS).logits.norm()
    gradients = []
    for _ in range(2):
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
        model.get_base_model().gradient_checkpointing_enable()
    assert len(gradients[0]) == 14
    assert same(*gradients)
