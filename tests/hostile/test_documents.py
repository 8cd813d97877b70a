"""No document under 1 MB takes more than a second or 100 MB, and what is wrong with it is said by our errors alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hostile import manifest_memory

from pyquant.errors import ArgumentError
from pyquant.recipe import Recipe, yaml_document
from pyquant.recipe.documents import parse

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("yaml", reason="PyYAML is not installed")


def run_limits(module: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/support")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "hostile.limits", module],
        capture_output=True,
        text=True,
        cwd=ROOT / "tests",
        env=environment,
    )


def test_every_hostile_document_is_read_or_refused_within_the_limits() -> None:
    run = run_limits("hostile.document_cases")
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert "cases, 0 failed" in run.stdout


def test_the_limits_catch_what_they_are_for() -> None:
    """Planted: a case that computes, one that allocates, one that raises ValueError; none of them passes."""
    run = run_limits("hostile.planted_cases")
    assert run.returncode == 1
    for name, told in (("computes", "SIGXCPU"), ("allocates", "not pyquant's"), ("raises", "not pyquant's")):
        assert any(line.startswith(f"{name}: ") and told in line for line in run.stdout.splitlines()), run.stdout
    assert "4 cases, 3 failed" in run.stdout
    assert "MemoryError" in run.stderr
    assert "ValueError" in run.stderr


def memory_of(*cases: str) -> list[int]:
    """MiB, in a fresh process: what a process freed before would be room for what is read."""
    command = [sys.executable, "-m", "hostile.manifest_memory", *cases]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT / "tests", env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return [int(figure) for figure in re.findall(r"text, (\d+) MiB", run.stdout)]


def test_memory_of_the_largest_manifests() -> None:
    """What SECURITY.md says; the whole table: python -m hostile.manifest_memory."""
    assert min(memory_of("the most texts", "the most lists")) > 10, "nothing was measured"


@pytest.mark.nightly
def test_memory_of_every_large_manifest() -> None:
    assert len(memory_of()) == len(manifest_memory.CASES)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:30", "1:30"),
        ("2001-12-14", "2001-12-14"),
        ("12", 12),
        ("-7", -7),
        ("1_000", 1000),
        ("0x1F", 31),
        ("0", 0),
        ("1.5", 1.5),
        ("1e-3", 1e-3),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("yes", True),
        ("off", False),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("1.2.3", "1.2.3"),
        ("+", "+"),
        ("-", "-"),
        ("re:a.*", "re:a.*"),
        (".5x", ".5x"),
    ],
)
def test_words_of_yaml(text: str, value: object) -> None:
    """The numbers of YAML 1.2 and the words of 1.1; base 60 and dates are text."""
    if text == "-":
        text = "'-'"
    found = parse(f"a: {text}", "yaml", "x")["a"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["010", "0b1", "0o7", "-012"])
def test_numbers_that_readers_disagree_about_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="decimal numbers without leading zeros"):
        parse(f"a: {text}", "yaml", "x")


def test_yaml_reads_the_same_without_libyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = yaml_document.library()
    text = "layers: {'a.b': {scheme: W4A8, group_size: 64}, 're:.*x': null}\nresiduals: float # c\nptq_only: yes\n"
    want = Recipe.loads(text)
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    assert Recipe.loads(text) == want
    with pytest.raises(ArgumentError, match="without libyaml"):
        Recipe.loads("#" * (yaml_document.MAX_BYTES_OF_SLOW_YAML + 1))
