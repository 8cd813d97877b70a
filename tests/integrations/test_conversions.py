"""Float folders of transformers quantised from their files: the bytes of from_pretrained, quantize_ and a save."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import pyquant
from pyquant.cli.main import main
from pyquant.cli.models import empty_model

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
LLAMA = {**SIZES, "num_key_value_heads": 1}
# name of a class: what is special about its files, and the configuration
CASES: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "LlamaForCausalLM": ("tied", {**LLAMA, "tie_word_embeddings": True}, torch.bfloat16),
    "MixtralForCausalLM": ("experts one by one", {**LLAMA, "num_local_experts": 3}, torch.float32),
    "GPT2LMHeadModel": ("Conv1D", {"vocab_size": 96, "n_embd": 32, "n_layer": 1, "n_head": 2}, torch.float32),
    "T5ForConditionalGeneration": (
        "float32 among float16",
        {"vocab_size": 96, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2},
        torch.float16,
    ),
    "Gemma3ForCausalLM": ("an embedding with a buffer", {**LLAMA, "head_dim": 16}, torch.bfloat16),
    "BertForMaskedLM": ("a bias under two names", SIZES, torch.float32),
    "VideoMAEForVideoClassification": (
        "biases under names that are not their layers'",
        {**{k: v for k, v in SIZES.items() if k[0] not in "vm"}, "image_size": 16, "patch_size": 8, "num_frames": 4},
        torch.float32,
    ),
    "CLIPTextModel": ("an initialisation of a block that fills the embeddings in it", SIZES, torch.float32),
    "CLIPVisionModel": (
        "one that fills layers",
        {**{k: v for k, v in SIZES.items() if k[0] not in "vm"}, "image_size": 16, "patch_size": 8},
        torch.float32,
    ),
}
CONFIGS = {
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "T5ForConditionalGeneration": "T5Config",
    "GPT2LMHeadModel": "GPT2Config",
    "CLIPTextModel": "CLIPTextConfig",
    "CLIPVisionModel": "CLIPVisionConfig",
}


def written(name: str, folder: Path) -> Any:
    """A folder in several files with the weights of a new model; -> its class."""
    torch.manual_seed(0)
    _, words, dtype = CASES[name]
    kind = getattr(transformers, name)
    config = getattr(transformers, CONFIGS.get(name, name.split("For")[0] + "Config"))(**words, dtype=dtype)
    kind._from_config(config, dtype=dtype).save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return kind


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_saved_model_is_that_of_loading_it_whole(name: str, everything: bool, tmp_path: Path) -> None:
    path, options = tmp_path / "float", {"embeddings": True, "heads": True} if everything else {}
    kind = written(name, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pyquant.QuantizationWarning)
        whole = pyquant.quantize_(kind.from_pretrained(path).eval(), "W4A16(group_size=16)", **options)
        model = pyquant.quantize_checkpoint_(empty_model(path, "PATH"), path, "W4A16(group_size=16)", **options)
        digests = [pyquant.save_pretrained(one, tmp_path / str(i)) for i, one in enumerate((whole, model))]
    assert digests[0] == digests[1]
    buffers = [dict(one.named_buffers()) for one in (whole, model)]
    assert buffers[0].keys() == buffers[1].keys()
    assert all(torch.equal(t, buffers[1][key]) for key, t in buffers[0].items())  # those too that no file holds


def test_the_head_of_a_body_is_named(tmp_path: Path) -> None:
    written("LlamaForCausalLM", tmp_path / "tied")
    config = transformers.LlamaConfig(**LLAMA)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "float")
    with torch.device("meta"):
        body = transformers.LlamaModel(config)
    with pytest.warns(pyquant.QuantizationWarning, match="LlamaModel has no place for the tensors lm_head.weight"):
        pyquant.quantize_checkpoint_(body.eval(), tmp_path / "float", "W8A8Dynamic")
    assert type(body.layers[0].mlp.up_proj) is pyquant.QLinear


@pytest.mark.filterwarnings("ignore::pyquant.QuantizationWarning")
def test_convert_writes_what_quantize_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "float"
    written("MixtralForCausalLM", path)
    words = [str(path), "--scheme", "W8A8Dynamic", "--skip", "*.q_proj", "--embeddings"]
    assert main(["quantize", *words, "--out", str(tmp_path / "one")]) == 0
    assert main(["convert", words[0], str(tmp_path / "other"), *words[1:]]) == 0
    assert "W8A8Dynamic -> " in capsys.readouterr().out
    one, other = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("one", "other"))
    assert one == other
    assert main(["verify", str(tmp_path / "other")]) == 0
    for wrong, said in (
        (["--scheme", "W8A8"], "argument '--data': got none, with --scheme W8A8; allowed: package.module:callable"),
        (["--scheme", "W8A8Dynamic", "--skip", "nothing"], "argument '--skip'"),
        (["--scheme", "W8A8Dynamic", "--activations", "int8"], "--activations"),
        (["--heads"], "--heads"),
        ([], "a model in floating point needs quantize_checkpoint_, or --scheme"),
    ):
        assert main(["convert", str(path), str(tmp_path / "none"), *wrong]) == (2 if wrong else 1)
        assert said in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
