"""pyquant inside of from_pretrained and save_pretrained of transformers: the real library, bits compared."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import switches
import torch
from fresh import python, with_transformers
from safetensors.torch import load_file, save_file

import pyquant
from pyquant.integrations import transformers as ours

T = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None
IDS = torch.arange(4, 20)[None]
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}


_enabled = switches.on(ours)


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a float model with tied head, in several files."""
    folder = tmp_path_factory.mktemp("floats")
    llama().save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory, floats: Path) -> Path:
    """A directory that transformers wrote of the same model quantised: no manifest of pyquant is in it."""
    folder = tmp_path_factory.mktemp("codes")
    ours.enable()
    quantised(floats).save_pretrained(folder)
    ours.disable()
    return folder


def llama(**words: Any) -> Any:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "pad_token_id": 0}
    return T.LlamaForCausalLM(T.LlamaConfig(**SMALL | heads | words)).eval()


def quantised(folder: Path, scheme: Any = "W8A8Dynamic") -> Any:
    with warnings.catch_warnings(action="ignore", category=pyquant.QuantizationWarning):
        return pyquant.quantize_(T.AutoModelForCausalLM.from_pretrained(folder), scheme, check_speed=False)


def load(folder: Path, **words: Any) -> Any:
    return T.AutoModelForCausalLM.from_pretrained(folder, **words)


def out(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS)[0]


def layers(model: Any) -> int:
    return sum(isinstance(module, pyquant.QLinear) for module in model.modules())


def edit(source: Path, target: Path, words: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A copy of a directory with further words in its quantization_config, and with these tensors."""
    from safetensors.torch import save_file

    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] |= words
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_every_scheme_head_and_tie(tmp_path: Path) -> None:
    script = Path(__file__).with_name("transformers_takes_over.py")
    code = f"import sys; sys.path.insert(0, {str(script.parent)!r})\n" + script.read_text(encoding="utf-8")
    found = with_transformers(code, tmp_path)
    assert len(found) == 11
    for case, (more_layers, read, again, by_pyquant, error) in found.items():
        assert (more_layers, read, again, by_pyquant) == (0, True, True, True), case
        assert error < 0.02, (case, error)  # plain transformers rounds activations in its own way


def test_nothing_is_imported_before_enable(tmp_path: Path) -> None:
    code = "import json, sys, pyquant.integrations.transformers\nprint(json.dumps('transformers' in sys.modules))"
    assert python(code, tmp_path) is False


def test_enable_and_disable() -> None:
    from transformers.quantizers import auto

    mine, save = auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"], T.PreTrainedModel.save_pretrained
    ours.enable()
    assert auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"] is mine
    assert T.PreTrainedModel.save_pretrained is save
    ours.disable()
    assert auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"].__name__ == "CompressedTensorsHfQuantizer"
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"].__name__ == "CompressedTensorsConfig"
    assert not hasattr(T.PreTrainedModel.save_pretrained, "__wrapped__")
    ours.disable()
    ours.enable()
    assert auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"] is mine


def test_the_hooks_that_transformers_calls_are_there() -> None:
    from transformers.quantizers.base import HfQuantizer

    hooks = (
        "validate_environment get_new_dtype get_state_dict_and_metadata is_serializable is_trainable is_qat_trainable"
        " is_compileable _process_model_before_weight_loading _process_model_after_weight_loading _dequantize"
    )
    assert [hook for hook in hooks.split() if not hasattr(HfQuantizer, hook)] == []


@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W4A16(group_size=32)"])
def test_on_the_fly_is_quantize(floats: Path, scheme: str, tmp_path: Path) -> None:
    model = load(floats, quantization_config=ours.PyquantConfig(scheme, check_speed=False))
    assert layers(model) == 14
    assert model.lm_head.weight is model.model.embed_tokens.weight  # tied as before, in floating point
    assert torch.equal(out(model), out(quantised(floats, scheme)))
    model.save_pretrained(tmp_path)
    assert torch.equal(out(load(tmp_path)), out(model))
    words = json.loads((tmp_path / "config.json").read_text())
    assert words["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (tmp_path / "generation_config.json").exists()


def test_on_the_fly_by_patterns_and_by_the_path_of_a_recipe(floats: Path, tmp_path: Path) -> None:
    model = load(floats, quantization_config=ours.PyquantConfig({"re:.*down_proj": "W8A8Dynamic"}))
    assert layers(model) == 2
    json.dumps(model.config.to_dict())
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"default": "W8A8Dynamic", "heads": False}))
    assert torch.equal(out(load(floats, quantization_config=ours.PyquantConfig(path))), out(quantised(floats)))


RECIPES: dict[str, dict[str, Any]] = {
    "defaults": {"default": "W8A8Dynamic", "selective_quantizer_params": {"skip_modules": ["model.layers.0.mlp"]}},
    "everything": {"default": "W4A16(group_size=32)", "embeddings": True, "heads": True},
    "calibrators": {"default": "W4A16", "layers": {"re:.*_proj": {"weights": {"calibrator": "mse"}}}, "heads": None},
    "mixed": {
        "default": "W4A16(group_size=48)",
        "layers": {"re:.*q_proj": "W8A8Dynamic", "model.layers.1.self_attn.k_proj": None, "re:.*o_proj": "FP16"},
        "heads": False,
    },
}


@pytest.mark.filterwarnings("ignore::pyquant.QuantizationWarning")
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", ["Llama", "Llama, tied", "Qwen3Moe"])
def test_a_recipe_is_read_layer_by_layer(kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyquant.integrations.transformers.float_files import FloatFiles

    sizes: dict[str, Any] = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"tie_word_embeddings": kind == "Llama, tied"}
    if kind == "Qwen3Moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    family = kind.partition(",")[0]
    torch.manual_seed(0)
    getattr(T, f"{family}ForCausalLM")(getattr(T, f"{family}Config")(**sizes, pad_token_id=0)).save_pretrained(tmp_path)
    recipe = pyquant.Recipe.from_dict(RECIPES[name])
    read: list[bool] = []
    finish = FloatFiles.finish
    monkeypatch.setattr(FloatFiles, "finish", lambda self, *rest: (read.append(self.is_whole), finish(self, *rest))[1])
    model = load(tmp_path, quantization_config=ours.PyquantConfig(recipe, check_speed=False))
    want = pyquant.quantize_(load(tmp_path), recipe, check_speed=False)
    # what is quantised, and whose weight another has too, is loaded by transformers
    assert read == [kind != "Llama, tied" or name == "mixed" or name == "calibrators"]
    assert str(model) == str(want)
    assert not any(module.training for one in (model, want) for module in one.modules())
    found, wanted = model.state_dict(), want.state_dict()
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key].as_subclass(torch.Tensor), tensor.as_subclass(torch.Tensor)), key
    assert torch.equal(out(model), out(want))


def test_a_recipe_is_refused_as_by_quantize(floats: Path) -> None:
    """Options beside it, keys that mean nothing, schemes that need data."""
    for data, options, words in (
        ({"default": "W8A8Dynamic"}, {"heads": True}, "'heads': got True; allowed: nothing beside a recipe"),
        ({"layers": {"nowhere": None}, "default": "W8A8Dynamic"}, {}, "nowhere"),
        ({}, {}, "'data': got None"),
    ):
        config = ours.PyquantConfig(pyquant.Recipe.from_dict(data), **options)
        with pytest.raises(pyquant.PyquantError, match=words):
            load(floats, quantization_config=config)


def test_what_cannot_be_read_layer_by_layer_is_quantised_too(floats: Path, tmp_path: Path) -> None:
    """The same results: names of the caller, numbers of the caller, filters that look at numbers, weights that no file
    has."""
    want, config = out(quantised(floats)), ours.PyquantConfig("W8A8Dynamic")
    tensors = {name: t for file in floats.glob("*.safetensors") for name, t in load_file(file).items()}
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    (renamed / "config.json").write_text((floats / "config.json").read_text())
    body = {name.replace("model.", "body.", 1): t for name, t in tensors.items()}
    save_file(body, renamed / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(out(load(renamed, key_mapping={"^body\\.": "model."}, quantization_config=config)), want)
    assert torch.equal(
        out(
            T.LlamaForCausalLM.from_pretrained(
                None, config=llama().config, state_dict=tensors, quantization_config=config
            )
        ),
        want,
    )

    def is_small(module: torch.nn.Module, name: str) -> bool:
        return module.weight.abs().max().item() < 1e9

    by_numbers = ours.PyquantConfig("W8A8Dynamic", filter_fn=is_small)
    assert torch.equal(out(load(floats, quantization_config=by_numbers)), want)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, renamed / "model.safetensors", metadata={"format": "pt"})
    model = load(renamed, quantization_config=config)
    assert layers(model) == 14
    assert not torch.equal(out(model), want)
    for name, tensor in quantised(floats).state_dict().items():
        if "layers.1.mlp.up_proj" not in name:
            assert torch.equal(torch.Tensor(model.state_dict()[name]), torch.Tensor(tensor)), name


def test_static_schemes_need_data(floats: Path) -> None:
    with pytest.raises(pyquant.PyquantError, match="data"):
        load(floats, quantization_config=ours.PyquantConfig("W8A8"))
    with pytest.raises(pyquant.ArgumentError, match=r"options.: got data.*allowed: embeddings, heads"):
        ours.PyquantConfig("W8A8", data=[IDS])


def test_experts_are_quantised_one_by_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    words = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    config = T.Qwen3MoeConfig(**SMALL, **words, moe_intermediate_size=32, head_dim=16)
    T.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "a")
    model = load(tmp_path / "a", quantization_config=ours.PyquantConfig("W8A8Dynamic"))
    assert layers(model) == 2 * (4 + 4 * 2)
    assert torch.equal(out(model), out(quantised(tmp_path / "a")))
    pyquant.save_pretrained(model, tmp_path / "c")
    again = pyquant.load_pretrained(tmp_path / "c", lambda: T.Qwen3MoeForCausalLM(config).eval())
    assert torch.equal(out(again), out(model))


def test_a_mixture_with_float_experts_is_read_again_from_what_transformers_saves(tmp_path: Path) -> None:
    """Its files name the experts one by one, which transformers joins, and would decompress before that."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = T.MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=64, num_local_experts=3)
    model = T.MixtralForCausalLM(config).eval()
    schemes = {"*.experts*": None, "lm_head": None, "_default": pyquant.W8A8Dynamic()}
    pyquant.quantize_(model, schemes, check_speed=False).save_pretrained(tmp_path)
    again = T.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(isinstance(module, pyquant.QLinear) for module in again.modules()) == 4
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_experts_of_another_tools_file_run_in_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    words = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 2, "num_experts_per_tok": 1}
    config = T.Qwen3MoeConfig(**SMALL | {"num_hidden_layers": 1}, **words, moe_intermediate_size=32, head_dim=16)
    model = T.Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    tensors = {}
    for name, tensor in tensors_of(tmp_path).items():
        if ".experts." in name:
            scale = tensor.abs().amax(1, keepdim=True) / 127
            tensors |= {name: (tensor / scale).round().to(torch.int8), f"{name}_scale": scale}
        else:
            tensors[name] = tensor
    config = json.loads((tmp_path / "config.json").read_text())
    args = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["re:.*experts.*"],
        "weights": args | {"strategy": "channel"},
        "input_activations": args | {"strategy": "token", "dynamic": True},
    }
    method = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
    config["quantization_config"] = method | {"config_groups": {"g": group}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = edit(tmp_path, tmp_path, {}, tensors)
    read = load(folder)
    assert layers(read) == 4
    want = pyquant.load_quantized_(T.Qwen3MoeForCausalLM(model.config).eval(), folder)
    assert torch.equal(out(read), out(want))


def test_a_folder_that_pyquant_alone_reads_says_so(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = T.MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=40, num_local_experts=2)
    model = pyquant.quantize_(T.MixtralForCausalLM(config).eval(), "W8A8Dynamic", check_speed=False)
    with pytest.warns(pyquant.QuantizationWarning, match="cannot read this folder"):
        pyquant.save_pretrained(model, tmp_path)
    ours.enable()
    with pytest.raises(pyquant.CheckpointError, match=r"MixtralExperts there: read it with pyquant\.load_pretrained"):
        T.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_deep_encoder_comes_back(tmp_path: Path) -> None:
    """Its layers' names are too many for one pattern of a checkpoint's configuration."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 40}
    model = BertModel(BertConfig(**sizes, num_hidden_layers=12)).eval()
    pyquant.quantize_(model, "W8A8Dynamic", check_speed=False)
    ours.enable()
    try:
        model.save_pretrained(tmp_path)
        again = BertModel.from_pretrained(tmp_path).eval()
    finally:
        ours.disable()
    layers = [name for name, module in model.named_modules() if isinstance(module, pyquant.QLinear)]
    assert len(layers) >= 72
    assert [name for name, module in again.named_modules() if isinstance(module, pyquant.QLinear)] == layers
    ids = torch.randint(1, 40, (1, 9))
    assert torch.equal(again(ids).last_hidden_state, model(ids).last_hidden_state)


@pytest.mark.skipif(not HAS_ACCELERATE, reason="a device map needs accelerate")
@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}])
def test_device_maps(floats: Path, codes: Path, device_map: Any) -> None:
    want = out(quantised(floats))
    fly = load(floats, device_map=device_map, quantization_config=ours.PyquantConfig("W8A8Dynamic"))
    assert torch.equal(out(fly), want)
    assert torch.equal(out(load(codes, device_map=device_map)), want)


@pytest.mark.skipif(not HAS_ACCELERATE, reason="a device map needs accelerate")
def test_a_device_map_that_is_still_to_be_made_counts_codes(floats: Path) -> None:
    from accelerate.hooks import AlignDevicesHook
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.integrations.accelerate import compute_module_sizes

    from pyquant.integrations.transformers.held import keep_hook
    from pyquant.integrations.transformers.on_the_fly import PyquantHfQuantizer

    quantizer = PyquantHfQuantizer(ours.PyquantConfig("W4A16(group_size=32)", check_speed=False), pre_quantized=False)
    files = sorted(map(str, floats.glob("*.safetensors")))
    with torch.device("meta"):
        model = llama()
    quantizer.preprocess_model(model=model, dtype=torch.float32, device_map="auto", checkpoint_files=files)
    get_model_conversion_mapping(model, None, quantizer)
    place = "model.layers.0.mlp.up_proj"
    assert compute_module_sizes(model, quantizer)[0][place] == 64 * 128 // 2
    quantizer.validate_environment(device_map={"": "cpu"})
    assert compute_module_sizes(model, quantizer)[0].get(place, 0) == 0
    held = model.get_submodule(place)
    held._hf_hook = hook = AlignDevicesHook("cpu")
    layer = pyquant.QLinear(64, 128)
    keep_hook(held, layer)
    assert layer._hf_hook is hook
    assert layer(torch.ones(1, 64)).shape == (1, 128)


@pytest.mark.parametrize("config", [None, "W8A8Dynamic"])
def test_offloading_is_refused(floats: Path, codes: Path, config: str | None, tmp_path: Path) -> None:
    given = {} if config is None else {"quantization_config": ours.PyquantConfig(config)}
    where = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(pyquant.UnsupportedError, match="device_map places layers on cpu, disk"):
        load(floats if config else codes, device_map=where, offload_folder=tmp_path, **given)


def test_a_body_takes_its_layers_from_the_files_of_the_whole(floats: Path, codes: Path) -> None:
    body = T.AutoModel.from_pretrained(codes)
    assert layers(body) == 14
    assert torch.equal(out(body), out(quantised(floats).model))


def test_files_are_links_into_a_cache(floats: Path, codes: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, file in enumerate(sorted(codes.iterdir())):
        blob = tmp_path / "blobs" / str(number)
        blob.write_bytes(file.read_bytes())
        (tmp_path / "snapshot" / file.name).symlink_to(blob)
    assert torch.equal(out(load(tmp_path / "snapshot")), out(quantised(floats)))


def test_another_dtype_than_the_files(floats: Path, codes: Path) -> None:
    model = load(codes, dtype=torch.bfloat16)
    assert out(model).dtype == torch.bfloat16
    assert torch.equal(
        model.model.layers[0].mlp.up_proj.weight_scale, load(codes).model.layers[0].mlp.up_proj.weight_scale
    )
    want = out(quantised(floats))
    assert (out(model).float() - want).norm() < 0.03 * want.norm()


def test_scales_of_a_key_value_cache_are_left_alone(codes: Path, tmp_path: Path) -> None:
    cache = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    scales = {f"model.layers.{i}.self_attn.{which}_scale": torch.ones(1) for i in range(2) for which in "kv"}
    folder = edit(codes, tmp_path, {"kv_cache_scheme": cache}, tensors_of(codes) | scales)
    model, log = load(folder, output_loading_info=True)
    assert not log["unexpected_keys"]
    assert torch.equal(out(model), out(load(codes)))


def test_codes_of_a_layer_under_another_name_are_never_weights(codes: Path, tmp_path: Path) -> None:
    renamed = {name.replace("model.", "body.", 1): tensor for name, tensor in tensors_of(codes).items()}
    targets = json.loads((codes / "config.json").read_text())["quantization_config"]["config_groups"]
    targets["group_0"]["targets"] = ["Linear"]
    folder = edit(codes, tmp_path, {"config_groups": targets}, renamed)
    with pytest.raises(pyquant.CheckpointError, match="codes of type I8 for a parameter in floating point"):
        load(folder, key_mapping={"^body\\.": "model."})


def test_a_layer_that_lacks_a_tensor_is_an_error(codes: Path, tmp_path: Path) -> None:
    tensors = tensors_of(codes)
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    with pytest.raises(pyquant.CheckpointError):
        load(edit(codes, tmp_path, {}, tensors))


def test_what_is_left_to_transformers(codes: Path) -> None:
    model = load(codes, quantization_config=T.CompressedTensorsConfig(dequantize=True))
    assert layers(model) == 0
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32


def test_two_configs_are_refused_by_transformers(codes: Path) -> None:
    with pytest.raises(ValueError, match="quantized with CompressedTensorsConfig but you are passing a PyquantConfig"):
        load(codes, quantization_config=ours.PyquantConfig("W8A8Dynamic"))


def test_a_file_that_names_the_method_pyquant_is_refused(codes: Path, tmp_path: Path) -> None:
    with pytest.raises(pyquant.UnsupportedError, match=r"config\.json with quant_method 'pyquant'"):
        load(edit(codes, tmp_path, {"quant_method": "pyquant"}, tensors_of(codes)))


def test_float_again(codes: Path, tmp_path: Path) -> None:
    model = load(codes)
    want = pyquant.dequantize_(load(codes))
    assert torch.equal(out(model.dequantize()), out(want))
    for number, one in enumerate((model, want)):
        one.save_pretrained(tmp_path / str(number))
        assert "quantization_config" not in json.loads((tmp_path / str(number) / "config.json").read_text())
        assert torch.equal(out(load(tmp_path / str(number))), out(want))


def test_pyquant_saves_what_transformers_loaded(codes: Path, tmp_path: Path) -> None:
    model = load(codes)
    pyquant.save_pretrained(model, tmp_path)
    assert torch.equal(out(load(tmp_path)), out(model))
    assert torch.equal(out(pyquant.load_pretrained(tmp_path, llama)), out(model))


def test_a_model_quantised_by_hand_is_as_before_after_saving(floats: Path, tmp_path: Path) -> None:
    model = quantised(floats, {"re:.*proj": "W8A8Dynamic"})
    before = model.config.to_dict(), set(model.__dict__)
    model.save_pretrained(tmp_path)
    assert (model.config.to_dict(), set(model.__dict__)) == before
    assert torch.equal(out(load(tmp_path)), out(model))


def test_generate_is_that_of_the_model_loaded_by_pyquant(codes: Path, floats: Path) -> None:
    words = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(load(codes).generate(IDS, **words), quantised(floats).generate(IDS, **words))


SEQ2SEQ = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
SEQ2SEQ |= {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 40, "pad_token_id": 1}
TIED = {
    "BartForConditionalGeneration": SEQ2SEQ,
    "M2M100ForConditionalGeneration": SEQ2SEQ,
    "MarianMTModel": SEQ2SEQ | {"decoder_start_token_id": 1},  # whose positions are not stored
    "T5ForConditionalGeneration": {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    | {"vocab_size": 40, "decoder_start_token_id": 0},
}


@pytest.mark.parametrize("how", [{"heads": True}, {"embeddings": True}, {"heads": True, "embeddings": True}], ids=str)
@pytest.mark.parametrize("name", TIED)
def test_embeddings_that_share_memory_come_back(name: str, how: dict[str, bool], tmp_path: Path) -> None:
    """A quantised head is tied no more, and a file then says so of all that one key ties: encoder and decoder read
    their tables under names of their own, by whoever wrote the file."""
    kind = getattr(T, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**TIED[name])).eval()
    with warnings.catch_warnings(action="ignore", category=pyquant.QuantizationWarning):
        pyquant.quantize_(model, "W8A8Dynamic", check_speed=False, **how)
    inputs = {"input_ids": torch.arange(2, 12)[None], "decoder_input_ids": torch.arange(4, 9)[None]}
    with torch.no_grad():
        want = model(**inputs).logits
    ours.enable()
    try:
        for writer, save in (("theirs", type(model).save_pretrained), ("ours", pyquant.save_pretrained)):
            save(model, tmp_path / writer)
            with torch.no_grad():
                assert torch.equal(kind.from_pretrained(tmp_path / writer).eval()(**inputs).logits, want)
    finally:
        ours.disable()
    again = pyquant.load_pretrained(tmp_path / "ours", lambda: kind(kind.config_class(**TIED[name]))).eval()
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, want)
