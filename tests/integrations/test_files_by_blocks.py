"""Float folders of transformers quantised with data block by block: the bytes of from_pretrained, quantize_, a save."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from sample import sampled

import pyquant
from pyquant.cli.main import main
from pyquant.cli.models import empty_model

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
LLAMA = {**SIZES, "num_key_value_heads": 1}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
VIT = {**SIZES, "image_size": 16, "patch_size": 8}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
# class: its configuration's class, and what is in it, its type, the config, what is done
CASES: dict[str, tuple[str, dict[str, Any], torch.dtype, Any, dict[str, Any]]] = {
    "LlamaForCausalLM": (
        "LlamaConfig",
        {**LLAMA, "tie_word_embeddings": True},
        torch.bfloat16,
        "W4A8(group_size=16)",
        {"improve": ["gptq"]},
    ),
    "Qwen3ForCausalLM": (
        "Qwen3Config",
        {**LLAMA, "head_dim": 16},
        torch.float32,
        "W4A8Dynamic(group_size=16)",
        {"improve": ["bias_correction"]},
    ),
    "MistralForCausalLM": (
        "MistralConfig",
        {**LLAMA, "tie_word_embeddings": True, "intermediate_size": 96},
        torch.bfloat16,
        "W4A4Dynamic(group_size=16, symmetric_inputs=False)",
        {"improve": ["rotate_online", "gptq"]},
    ),
    "Qwen2ForCausalLM": (
        "Qwen2Config",
        LLAMA,
        torch.bfloat16,
        "W8A8",
        {"improve": ["equalize", "smooth", "rotate", "bias_correction"]},
    ),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        {**LLAMA, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        torch.float32,
        "W4A8(group_size=16)",
        {"improve": ["search_scales"]},
    ),
    "MixtralForCausalLM": (
        "MixtralConfig",
        {**LLAMA, "num_local_experts": 4},
        torch.bfloat16,
        "W8A8",
        {"improve": ["smooth"]},
    ),
    "GPT2LMHeadModel": ("GPT2Config", GPT2, torch.float32, "W8A8", {"embeddings": True}),
    "OPTForCausalLM": (
        "OPTConfig",
        {**{k: v for k, v in SIZES.items() if k != "intermediate_size"}, "ffn_dim": 64, "word_embed_proj_dim": 16},
        torch.float32,
        "W8A8",
        {},
    ),
    "ViTForImageClassification": (
        "ViTConfig",
        VIT,
        torch.float32,
        {"*": pyquant.W8A8(), "*projection": None},
        {"heads": True},
    ),
    "T5ForConditionalGeneration": ("T5Config", T5, torch.float32, "W8A8", {}),
}
BATCHES = 3


def written(name: str, folder: Path) -> Any:
    """A folder in several files with the weights of a new model; -> its class."""
    torch.manual_seed(0)
    config, words, dtype, *_ = CASES[name]
    kind = getattr(transformers, name)
    model = kind._from_config(getattr(transformers, config)(**words, dtype=dtype), dtype=dtype)
    model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return kind


def batches(name: str) -> list[dict[str, torch.Tensor]]:
    """Sequences of more than one length; images."""
    generator = torch.Generator().manual_seed(1)
    if name.startswith("ViT"):
        return [{"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)} for _ in range(BATCHES)]
    ids = [torch.randint(64, (2, 7 + i % 2), generator=generator) for i in range(BATCHES)]
    return [{"input_ids": i, **({"decoder_input_ids": i} if name.startswith("T5") else {})} for i in ids]


@pytest.mark.parametrize("name", sampled(list(CASES), len(CASES) // 2, "files by blocks"))
def test_the_saved_files_are_those_of_loading_the_model_whole(name: str, tmp_path: Path) -> None:
    kind, (*_, config, options) = written(name, tmp_path / "float"), CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pyquant.QuantizationWarning)
        data = batches(name)
        model = empty_model(tmp_path / "float", "PATH")
        pyquant.quantize_files(model, tmp_path / "float", tmp_path / "files", config, data=data, **options)
        whole = kind.from_pretrained(tmp_path / "float").eval()
        pyquant.quantize_(whole, config, data=data, check_speed=False, **options)
        pyquant.save_pretrained(whole, tmp_path / "whole")
    one, other = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("files", "whole"))
    assert one == other


@pytest.mark.filterwarnings("ignore::pyquant.QuantizationWarning")
@pytest.mark.parametrize("how", [["encoder-w8a8", "--improve", "bias_correction"], ["llm-w4a4", "--batches", "3"]])
def test_convert_with_data_writes_what_quantize_writes(
    how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "float"
    written("Qwen3ForCausalLM", path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    (tmp_path / "windows.py").write_text(
        f"from {Path(__file__).stem} import batches as of\n\ndef batches():\n    return of('Qwen3')\n"
    )
    monkeypatch.chdir(tmp_path)
    words = [str(path), "--preset", *how, "--data", "windows:batches"]
    words += ["--skip", "*.q_proj"]
    assert main(["quantize", *words, "--out", str(tmp_path / "one")]) == 0
    assert main(["convert", words[0], str(tmp_path / "other"), *words[1:], "--cache", str(tmp_path)]) == 0
    assert f"{how[0]} -> " in capsys.readouterr().out
    one, other = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("one", "other"))
    assert one == other
    assert main(["verify", str(tmp_path / "other")]) == 0
    capsys.readouterr()
    data = ["--data", "windows:batches"]
    for wrong, said in (
        (["--scheme", "W8A8Dynamic", "--improve", "gptq"], "'--improve': got given without --data"),
        (["--preset", "llm-w4a8"], "'--data': got none, with --preset"),
        (
            ["--scheme", "W8A8", *data, "--improve", "rotate", "rotate_online"],
            "'--improve': got rotate and rotate_online",
        ),
        (["--scheme", "W8A8", *data, "--skip", "nothing"], "argument '--skip'"),
        (["--preset", "nothing", *data], "argument '--preset'"),
        (data, "--data"),
    ):
        assert main(["convert", str(path), str(tmp_path / "none"), *wrong]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
