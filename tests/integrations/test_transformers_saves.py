"""What save_pretrained of transformers writes of quantised models beyond plain Linears, and what it refuses."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import architecture_table
import pytest
import switches
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import pyquant
from pyquant import W4A8, W8A8
from pyquant.integrations import transformers as ours
from pyquant.io.pretrained.expert_files import matrices_of

T = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
IDS = torch.arange(4, 20)[None]
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MIXTURES = {
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
    "Mixtral": {"num_local_experts": 3},
}


_enabled = switches.on(ours)


def build(kind: str, **words: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(T, f"{kind}Config")(**SMALL | HEADS | MIXTURES.get(kind, {}) | words)
    return getattr(T, f"{kind}ForCausalLM")(config).eval()


def quantised(model: Any, scheme: Any, **words: Any) -> Any:
    with warnings.catch_warnings(action="ignore", category=pyquant.QuantizationWarning):
        return pyquant.quantize_(model, scheme, check_speed=False, **words)


def out(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def layers(model: Any) -> int:
    return sum(isinstance(module, pyquant.QLinear) for module in model.modules())


def names_in(folder: Path) -> set[str]:
    return {name for file in folder.glob("*.safetensors") for name in safe_open(file, "pt").keys()}  # noqa: SIM118


@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W4A8Dynamic(group_size=32)", "W4A16(group_size=16)", "W8A16"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_are_written_one_by_one_and_read_by_all(kind: str, scheme: str, tmp_path: Path) -> None:
    model = quantised(build(kind), scheme)
    model.save_pretrained(tmp_path)
    up, down = ("gate_proj", "down_proj") if kind == "Qwen3Moe" else ("w1", "w2")
    block = "mlp" if kind == "Qwen3Moe" else "block_sparse_moe"
    packed = "_packed" if scheme != "W8A8Dynamic" else ""
    wanted = {f"model.layers.1.{block}.experts.2.{name}.weight{packed}" for name in (up, down)}
    assert wanted <= names_in(tmp_path)
    assert not [name for name in names_in(tmp_path) if "gate_up" in name]

    again, log = T.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(log.values()), log
    assert layers(again) == layers(model)
    assert torch.equal(out(again), out(model))
    assert torch.equal(out(pyquant.load_quantized_(build(kind), tmp_path)), out(model))
    again.save_pretrained(tmp_path / "twice")
    assert names_in(tmp_path / "twice") == names_in(tmp_path)
    assert torch.equal(out(T.AutoModelForCausalLM.from_pretrained(tmp_path / "twice")), out(model))

    ours.disable()  # plain transformers
    if packed:
        plain = T.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert layers(plain) == 0
        assert (out(plain) - out(model)).norm() < (0.04 if "A8" in scheme else 1e-5) * out(model).norm()
    else:  # it decompresses packed experts alone, and says so
        with pytest.raises(RuntimeError, match="automatic conversion of the weights"):
            T.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_targets_of_experts_are_few(tmp_path: Path) -> None:
    """Readers try every target on every module, and there may be thousands of experts."""
    quantised(build("Qwen3Moe", num_experts=32), "W8A16").save_pretrained(tmp_path)
    groups = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]
    (group,) = groups.values()
    assert len(group["targets"]) == 1
    assert group["targets"][0].count("experts") == 2 * 3


def test_static_inputs_of_experts_come_back(tmp_path: Path) -> None:
    model = quantised(build("Qwen3Moe"), W8A8(symmetric_inputs=False), data=[IDS, IDS.flip(1) + 40])
    model.save_pretrained(tmp_path)
    assert torch.equal(out(T.AutoModelForCausalLM.from_pretrained(tmp_path)), out(model))


def test_experts_that_transformers_quantised_while_it_loaded_them(tmp_path: Path) -> None:
    build("Qwen3Moe").save_pretrained(tmp_path / "floats")
    config = ours.PyquantConfig("W4A8Dynamic(group_size=32)", check_speed=False)
    model = T.AutoModelForCausalLM.from_pretrained(tmp_path / "floats", quantization_config=config)
    model.save_pretrained(tmp_path / "codes")
    assert torch.equal(out(T.AutoModelForCausalLM.from_pretrained(tmp_path / "codes")), out(model))


def test_a_half_that_took_the_rows_of_the_other_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: gate and up exchanged, of which every shape is right."""
    model = quantised(build("Qwen3Moe"), "W8A8Dynamic")
    honest = ours.rows_in_files

    def exchanged(*given: Any) -> Any:
        told, n = honest(*given), given[-1]
        return [(e, name, pattern, (rows + n // 2) % n if len(rows) < n else rows) for e, name, pattern, rows in told]

    monkeypatch.setattr(ours, "rows_in_files", exchanged)
    model.save_pretrained(tmp_path)
    assert not torch.equal(out(T.AutoModelForCausalLM.from_pretrained(tmp_path)), out(model))


def test_every_row_of_every_expert_is_in_one_matrix() -> None:
    for kind in MIXTURES:
        model = quantised(build(kind), "W8A16")
        for layer, found in matrices_of(model).items():
            rows = torch.cat([one.rows for one in found]).sort()[0]
            assert torch.equal(rows, torch.arange(model.get_submodule(layer).out_features))
            assert len(found) == (2 if layer.endswith("gate_up_proj") else 1)
    assert matrices_of(quantised(build("Llama"), "W8A16")) == {}


def gpt2() -> Any:
    config = T.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=96)
    return quantised(T.GPT2LMHeadModel(config).eval(), "W8A8Dynamic")


def vision(scheme: Any = "W8A8Dynamic", **words: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return quantised(T.ViTModel(T.ViTConfig(**sizes, image_size=16, patch_size=8)).eval(), scheme, **words)


@pytest.mark.parametrize("scheme", [pyquant.W8A8Dynamic(), W8A8()], ids=str)
def test_layers_that_have_another_name_in_files(scheme: Any, tmp_path: Path) -> None:
    """ViT's have since transformers 5; nor has its configuration a word about ties, before a save and after it."""
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    model = vision({"*patch_embeddings*": None, "_default": scheme}, data=[{"pixel_values": pixels}])
    assert not hasattr(model.config, "tie_word_embeddings")
    model.save_pretrained(tmp_path)
    assert not hasattr(model.config, "tie_word_embeddings")
    again = T.AutoModel.from_pretrained(tmp_path)
    pixels = pixels * 100  # beyond static ranges, so that the lowest code is met
    assert layers(again) == layers(model) > 0
    assert torch.equal(again(pixels).last_hidden_state, model(pixels).last_hidden_state)


THEIRS = [name for name in architecture_table.QUICK if not name.startswith(("torchvision", "timm", "GPT-2", "SigLIP"))]


@pytest.mark.nightly
@pytest.mark.parametrize("name", THEIRS)
def test_every_architecture_comes_back(name: str, tmp_path: Path) -> None:
    """Of the classes that the format knows: their Linears, under the names of model and files."""
    torch.manual_seed(0)
    model, inputs = architecture_table.QUICK[name]()
    quantised(model, "W8A8Dynamic", heads=True, filter_fn=lambda module, _: type(module) is torch.nn.Linear)
    model.save_pretrained(tmp_path)
    again, log = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(log.values()), log
    assert layers(again) == layers(model)
    assert torch.equal(again.eval()(**inputs)[0], model(**inputs)[0])


def llama4() -> Any:
    words = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16, "intermediate_size_mlp": 64}
    torch.manual_seed(0)
    config = T.Llama4TextConfig(**SMALL | HEADS, **words, interleave_moe_layer_step=1)
    return quantised(T.Llama4ForCausalLM(config).eval(), {"*.experts.*": "W8A16", "_default": None})


def qwen3_vl_moe() -> Any:
    """Whether files hold its experts turned round depends on the shape of a parameter that is gone."""
    text = SMALL | HEADS | MIXTURES["Qwen3Moe"]
    seen = {"depth": 1, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64}
    torch.manual_seed(0)
    config = T.Qwen3VLMoeConfig(text_config=text, vision_config=seen | {"deepstack_visual_indexes": [0]})
    model = T.Qwen3VLMoeForConditionalGeneration(config).eval()
    return quantised(model, {"*.experts.*": "W8A16", "_default": None})


def two_schemes() -> Any:
    schemes = {"*.0.mlp.experts.*": "W8A16", "*.1.mlp.experts.*": "W8A8Dynamic", "_default": None}
    return quantised(build("Qwen3Moe"), schemes)


def biased() -> Any:
    model = quantised(build("Mixtral"), "W8A16")
    bank = model.model.layers[1].mlp.experts
    down = bank.expert(1)[1]
    new = pyquant.QLinear.from_codes(down.codes, down.weight_scale, scheme=down.scheme, bias=torch.ones(64))
    bank.get_submodule("1").down_proj = new
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "Conv1D": (gpt2, "is a Conv1D there"),
    "convolution": (vision, "is a Conv2d there"),
    "experts in one tensor": (llama4, "hold 'gate_up_proj' of all experts as one"),
    "experts in one tensor, turned round": (qwen3_vl_moe, "hold 'gate_up_proj' of all experts as one"),
    "two schemes": (two_schemes, "one integer scheme for all experts of the model"),
    "half in floating point": (
        lambda: quantised(build("Mixtral"), {"*.experts.*.down_proj": "W8A16", "_default": None}),
        "experts in .*floating point",
    ),
    "zero points": (
        lambda: quantised(build("Mixtral"), "W4A16(group_size=32, symmetric=False)"),
        "take: symmetric integer weights",
    ),
    "biases": (biased, "experts with biases"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_format_cannot_hold_is_refused_with_what_to_call(case: str, tmp_path: Path) -> None:
    make, told = REFUSED[case]
    model = make()
    with pytest.raises(pyquant.UnsupportedError, match=told) as error:
        model.save_pretrained(tmp_path / "theirs")
    assert "pyquant.save_pretrained(model, directory) writes" in str(error.value)
    assert not list((tmp_path / "theirs").iterdir())
    with warnings.catch_warnings(action="ignore", category=pyquant.QuantizationWarning):
        pyquant.save_pretrained(model, tmp_path / "ours")
    again = pyquant.load_pretrained(tmp_path / "ours", lambda: type(model)(model.config).eval())
    assert layers(again) == layers(model)


@pytest.mark.parametrize("scheme", [W4A8(32), W4A8(None, symmetric_inputs=False), W4A8(16), W8A8()], ids=str)
def test_static_schemes_are_taken_over(scheme: pyquant.QScheme, tmp_path: Path) -> None:
    """4 bits with static inputs too, which other readers have no integer kernel for."""
    model = quantised(build("Llama"), scheme, data=[IDS, IDS.flip(1) + 40])
    model.save_pretrained(tmp_path / "theirs")
    pyquant.save_pretrained(model, tmp_path / "ours")
    for folder in ("theirs", "ours"):
        read, log = T.AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(log.values()), log
        assert layers(read) == layers(model)
        assert {str(m.scheme.inputs) for m in read.modules() if isinstance(m, pyquant.QLinear)} != {"None"}
        assert torch.equal(out(read), out(model))


@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
def test_a_tied_head_is_stored_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's Gemma has no place for the head; files that hold both names, as they did before, are read too."""
    from pyquant.io.pretrained import save

    model = quantised(build(kind, tie_word_embeddings=True), "W8A8Dynamic")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    pyquant.save_pretrained(model, tmp_path / "once")
    monkeypatch.setattr(save, "_stored_before", lambda model, quantised: set())
    pyquant.save_pretrained(model, tmp_path / "twice")
    head = {"lm_head.weight"}
    assert names_in(tmp_path / "twice") - names_in(tmp_path / "once") == head
    for folder in ("once", "twice"):
        for start in ("cpu", "meta"):
            with torch.device(start):
                empty = build(kind, tie_word_embeddings=True)
            again = pyquant.load_pretrained(tmp_path / folder, empty).eval()
            assert again.lm_head.weight is again.model.embed_tokens.weight
            assert torch.equal(out(again), out(model))
    theirs = T.AutoModelForCausalLM.from_pretrained(tmp_path / "once").eval()
    assert torch.equal(theirs.lm_head.weight, model.lm_head.weight)
    with pytest.raises(pyquant.CheckpointError, match=r"missing in the checkpoint lm_head\.weight"):
        pyquant.load_pretrained(tmp_path / "once", build(kind, tie_word_embeddings=False))


JOINED = {"Gte": "attention.qkv_proj", "NomicBert": "attn.Wqkv"}  # several layers' weights in the files of floats


@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W4A16(group_size=32)"])
@pytest.mark.parametrize("kind", JOINED)
def test_layers_whose_floats_are_joined_in_files_are_written_one_by_one(kind: str, scheme: str, tmp_path: Path) -> None:
    """transformers joins, and takes apart, weights alone; and of floats only."""
    torch.manual_seed(0)
    config = getattr(T, f"{kind}Config")(**SMALL, num_attention_heads=4)
    floats = getattr(T, f"{kind}Model")(config).eval()
    floats.save_pretrained(tmp_path / "floats")
    joined = {name for name in names_in(tmp_path / "floats") if JOINED[kind] in name}
    assert joined
    made = model = quantised(floats, scheme)
    for folder in ("codes", "again"):  # of one that was made, and of one that was read
        model.save_pretrained(tmp_path / folder)
        assert not any(JOINED[kind] in name for name in names_in(tmp_path / folder))
        again, log = T.AutoModel.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(log.values()), log
        assert layers(again) == layers(model)
        with torch.no_grad():
            assert torch.equal(again(IDS)[0], model(IDS)[0])
        model = again
    pyquant.dequantize_(made).save_pretrained(tmp_path / "floats again")
    assert names_in(tmp_path / "floats again") == names_in(tmp_path / "floats")
    T.AutoModel.from_pretrained(tmp_path / "floats again")


@pytest.mark.parametrize("config", [{"*.q_proj": "W8A8Dynamic"}, {"*.v_proj": "W4A16(group_size=32)"}], ids=str)
@pytest.mark.parametrize("kind", JOINED)
def test_one_of_several_layers_that_are_joined_is_written_alone(
    kind: str, config: dict[str, str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    floats = getattr(T, f"{kind}Model")(getattr(T, f"{kind}Config")(**SMALL, num_attention_heads=4)).eval()
    model = quantised(floats, config | {"_default": None})
    model.save_pretrained(tmp_path)
    again, log = T.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(log.values()), log
    with torch.no_grad():
        assert torch.equal(again(IDS)[0], model(IDS)[0])


@pytest.mark.parametrize("scheme", ["W4A16(group_size=16)", "W8A16", "W8A8Dynamic"])
@pytest.mark.parametrize("lost", ["weight_scale", "weight"])
def test_codes_that_lack_a_part_are_no_float_layer(scheme: str, lost: str, tmp_path: Path) -> None:
    quantised(build("Llama"), scheme).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.q_proj."
    packed = f"{name}{lost}_packed"
    del tensors[packed if packed in tensors else f"{name}{lost}"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(pyquant.CheckpointError, match="q_proj"):
        T.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_codes_that_were_joined_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pyquant let transformers write them: their layers would begin with random weights."""
    model = quantised(T.GteModel(T.GteConfig(**SMALL, num_attention_heads=4)).eval(), "W4A16(group_size=32)")
    monkeypatch.setattr("pyquant.integrations.transformers.saving.keep_names", lambda *_: None)
    model.save_pretrained(tmp_path)
    with pytest.raises(pyquant.CheckpointError, match=r"qkv_proj.*joined or parted; allowed: layers under the model's"):
        T.AutoModel.from_pretrained(tmp_path)


def test_biases_that_files_call_by_another_name_stay_with_their_codes(tmp_path: Path) -> None:
    """VideoMAE's floats have `attention.q_bias` beside `attention.query.weight`."""
    sizes = {"image_size": 16, "patch_size": 8, "num_frames": 4, "intermediate_size": 96, "num_attention_heads": 4}
    config = T.VideoMAEConfig(hidden_size=64, num_hidden_layers=1, **sizes)
    kind = T.VideoMAEForVideoClassification
    torch.manual_seed(0)
    kind(config).save_pretrained(tmp_path / "float")
    for model in (kind(config).eval(), kind.from_pretrained(tmp_path / "float").eval()):
        quantised(model, "W8A8Dynamic")
        model.save_pretrained(tmp_path / "codes")
        read, x = kind.from_pretrained(tmp_path / "codes"), torch.randn(1, 4, 3, 16, 16)
        assert type(read.videomae.encoder.layer[0].attention.attention.query) is pyquant.QLinear
        with torch.no_grad():
            assert torch.equal(read(x).logits, model(x).logits)
    pyquant.dequantize_(model).save_pretrained(tmp_path / "float again")
    names = [set(load_file(tmp_path / name / "model.safetensors")) for name in ("float", "float again")]
    assert names[0] == names[1]
