"""Recommended recipes: every one runs, is written and read back, and keeps what its page says; wrong names are told."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path

import pytest
import torch
from float_models import tiny

import pyquant
from pyquant.errors import ArgumentError
from pyquant.recipe.recommended import NAMES

ROOT = Path(__file__).resolve().parents[2]
has_transformers = importlib.util.find_spec("transformers") is not None
IDS = [torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(i)) for i in range(4)]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_recipe_that_files_hold(name: str) -> None:
    recipe = pyquant.recommended(name)
    assert pyquant.Recipe.loads(recipe.dumps("json"), "json") == recipe
    assert recipe.heads is False
    scheme = recipe.default_scheme()
    assert scheme is not None
    if scheme.weights.bits == 4:
        assert scheme.weights.calibrator == "mse"
    bits = "16" if scheme.inputs is None else str(scheme.inputs.bits)
    assert name.endswith(f"-w{scheme.weights.bits}a{bits}")


@pytest.mark.skipif(not has_transformers, reason="transformers is a demo extra and not installed")
@pytest.mark.parametrize("name", NAMES)
def test_it_quantises_a_language_model_in_one_line(name: str) -> None:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny("llama").config).eval()
    want = model(IDS[0]).logits
    recipe = pyquant.recommended(name, num_batches=4)
    with warnings.catch_warnings():  # groups of 128 in layers of 32
        warnings.simplefilter("ignore", pyquant.QuantizationWarning)
        pyquant.quantize_(model, recipe, data=IDS if recipe.improve else None, check_speed=False)
    assert type(model.lm_head) is torch.nn.Linear
    got = model(IDS[0]).logits
    # of random weights with narrow layers nothing but sanity can be asked
    assert 0 < float((got - want).norm() / want.norm()) < 1.0


def test_a_wrong_name_is_told_with_the_list() -> None:
    with pytest.raises(ArgumentError, match=f"'name': got 'llm-w4a9'.*{', '.join(NAMES)}.*did you mean"):
        pyquant.recommended("llm-w4a9")
    with pytest.raises(ArgumentError, match="'num_batches'"):
        pyquant.recommended("llm-w4a8", num_batches=0)
    with pytest.raises(ArgumentError, match="'name'"):
        pyquant.recommended(4)  # type: ignore[arg-type]


def test_a_copy_does_not_change_the_next_one() -> None:
    assert pyquant.recommended("llm-w4a8") == pyquant.recommended("llm-w4a8")
    assert pyquant.recommended("llm-w4a8") is not pyquant.recommended("llm-w4a8")


def test_the_page_names_every_one() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`((?:llm|encoder|vision|cnn)-w\d+a\d+)`", page)) == set(NAMES)
