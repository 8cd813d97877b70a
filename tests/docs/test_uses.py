"""README's table of what people already use: every row's line runs, with a small model and without a download."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyquant

README = Path(__file__).resolve().parents[2] / "README.md"
HEADING = "## With what you use"


def rows() -> dict[str, str]:
    """The first words of each row -> the line in its second cell."""
    section = README.read_text(encoding="utf-8").split(HEADING)[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    found = {}
    for first, second, _ in cells:
        line = re.fullmatch(r"`([^`]+)`", second)
        assert line, f"{first}: {second} is no line of code"
        found[first] = line[1]
    return found


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=96)).eval()


def codes() -> str:
    model = pyquant.quantize_(llama(), "W4A16(group_size=32)", check_speed=False)
    pyquant.save_pretrained(model, "quantised")
    tokenizer().save_pretrained("quantised")
    return "quantised"


def tokenizer() -> Any:
    """Which vLLM asks for; a word is a token."""
    tokenizers, transformers = (importlib.import_module(name) for name in ("tokenizers", "transformers"))
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), unk_token="w0")


def codes_of_others() -> str:
    """The same as another tool leaves it: what says that pyquant wrote it is gone."""
    (Path(codes()) / "manifest.json").unlink()
    return "quantised"


def weights() -> str:
    llama().save_pretrained("float")
    return "float"


def dit() -> str:
    model = importlib.import_module("diffusers").DiTTransformer2DModel
    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "num_layers": 1, "sample_size": 8}
    model(**sizes, patch_size=2, norm_num_groups=2).save_pretrained("dit")
    return "dit"


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10)).eval()


def peft() -> Any:
    return importlib.import_module("pyquant.integrations.peft")


def mesh() -> Any:
    dist = importlib.import_module("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (1,))


def distributed(name: str) -> Any:
    return getattr(importlib.import_module("pyquant.integrations.distributed"), name)


# What a line may name, made when it does.
NAMES: dict[str, Callable[[], Any]] = {
    "model": small,
    "quantised": lambda: pyquant.quantize_(small(), "W8A8Dynamic", check_speed=False),
    "batch": lambda: torch.randn(8, 64),
    "path": weights,
    "quantised_path": codes,
    "others_path": codes_of_others,
    "llama": llama,
    "quantised_llama": lambda: pyquant.quantize_(llama(), "W4A16(group_size=32)", check_speed=False),
    "pyquant_peft": peft,
    "pyquant_transformers": lambda: importlib.import_module("pyquant.integrations.transformers"),
    "accelerate": lambda: importlib.import_module("accelerate"),
    "os": lambda: os,
    "AutoModelForCausalLM": lambda: importlib.import_module("transformers").AutoModelForCausalLM,
    "PyquantConfig": lambda: importlib.import_module("pyquant.integrations.transformers").PyquantConfig,
    "LoraConfig": lambda: importlib.import_module("peft").LoraConfig,
    "get_peft_model": lambda: importlib.import_module("peft").get_peft_model,
    "dit_path": dit,
    "DiTTransformer2DModel": lambda: importlib.import_module("diffusers").DiTTransformer2DModel,
    "diffusers": lambda: importlib.import_module("pyquant.integrations.diffusers"),
    "mesh": mesh,
    "parallelize_module": lambda: importlib.import_module("torch.distributed.tensor.parallel").parallelize_module,
    "PyquantColwise": lambda: distributed("PyquantColwise"),
    "PyquantRowwise": lambda: distributed("PyquantRowwise"),
    "vllm": lambda: importlib.import_module("vllm"),
    "torch": lambda: torch,
    "pyquant": lambda: pyquant,
}
PACKAGES = {
    "transformers": ("transformers", "compressed_tensors"),
    "GPTQ": ("transformers",),
    "vLLM": ("vllm",),  # runs in `make nightly-vllm`'s environment
    "diffusers": ("diffusers",),
    "accelerate": ("accelerate",),
    "PEFT": ("peft", "transformers"),
    "onnxruntime": ("onnx", "onnxruntime", "onnxscript"),
}


@pytest.mark.parametrize("use", list(rows()))
def test_the_line_of_a_row_runs(use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES.get(re.split(r"\W", use)[0], ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    for name, value in (("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_ENABLE_V1_MULTIPROCESSING", "0")):
        monkeypatch.setenv(name, value)  # a small cache, and no processes that begin by importing pytest
    monkeypatch.setenv("PYQUANT_SGLANG", "off")  # a line sets it
    line = rows()[use]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = {name: make() for name, make in NAMES.items() if re.search(rf"\b{name}\b", line)}
        if "pyquant.integrations.onnx" in line:
            importlib.import_module("pyquant.integrations.onnx")
        try:
            exec(line, given)
        finally:
            for switch in {"pyquant_peft", "pyquant_transformers"} & given.keys():
                given[switch].disable()
            if "mesh" in given:
                torch.distributed.destroy_process_group()


def test_every_use_has_a_row() -> None:
    """What the package integrates is in the table, and a page is named that exists."""
    text = README.read_text(encoding="utf-8").split(HEADING)[1].split("\n## ")[0]
    folders = {file.parent.name for file in (README.parent / "pyquant" / "integrations").glob("*/__init__.py")}
    assert folders >= {"transformers", "vllm", "sglang", "onnx", "compile", "distributed", "peft", "diffusers"}
    for name in (*folders, "checkpoints", "peft.md#4-accelerate"):
        assert f"](docs/{name.removesuffix('.md')}.md)" in text or f"](docs/{name})" in text, name
