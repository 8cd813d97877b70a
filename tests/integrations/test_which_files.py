"""Which of a folder's files are the model: those that transformers has chosen, whatever lies beside them."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import pyquant

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed (pip install transformers)", allow_module_level=True)

import pyquant.integrations.transformers as theirs

IDS = torch.tensor([[1, 5, 9, 2]])


@pytest.fixture(autouse=True)
def enabled() -> Any:
    theirs.enable()
    yield
    theirs.disable()


def quantised(seed: int, scheme: Any = "W8A8Dynamic", **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    return pyquant.quantize_(model, scheme, **options)


def out(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def load(folder: Path, **options: Any) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return out(AutoModelForCausalLM.from_pretrained(folder, **options))


def test_codes_and_floats_come_from_the_same_files(tmp_path: Path) -> None:
    one, other = quantised(1), quantised(9)
    one.save_pretrained(tmp_path / "one", max_shard_size="10KB")
    other.save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other/model.safetensors", tmp_path / "one")  # which transformers prefers to the index
    assert torch.equal(load(tmp_path / "one"), out(other))
    (tmp_path / "one/model.safetensors").unlink()
    other.save_pretrained(tmp_path / "other", variant="fp16")
    shutil.copy(tmp_path / "other/model.fp16.safetensors", tmp_path / "one")
    assert torch.equal(load(tmp_path / "one", variant="fp16"), out(other))
    assert torch.equal(load(tmp_path / "one"), out(one))


def test_a_save_over_another_and_a_copy_beside(tmp_path: Path) -> None:
    model = quantised(1)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    model.save_pretrained(tmp_path)  # the index of before stays
    assert torch.equal(load(tmp_path), out(model))
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "consolidated.safetensors")
    assert torch.equal(load(tmp_path), out(model))
