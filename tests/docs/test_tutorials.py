"""Runs the blocks of documents: Python in one namespace a page, YAML into files, commands as commands."""

from __future__ import annotations

import platform
import re
import shlex
import sys
import types
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from fences import Fence, fences

import pyquant as pq
from pyquant.cli.main import main
from pyquant.simulate.kinds import is_simulated

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "from-the-tutorials",
    "quickstart",
    "selective",
    "sensitivity",
    "latency",
    "search",
    "mixed-precision",
    "formats",
    "calibration",
    "reconstruction",
    "qat",
    "compile",
    "onnx",
    "transformers",
    "peft",
    "diffusers",
    "distributed",
)
DOCUMENTS = [*(ROOT / "docs" / f"{name}.md" for name in PAGES), ROOT / "README.md"]
PAGE = DOCUMENTS[0]
PACKAGES = {
    "onnx": ("onnx", "onnxruntime", "onnxscript", "transformers"),
    "transformers": ("transformers", "compressed_tensors", "accelerate"),
    "peft": ("peft", "transformers", "accelerate"),
    "diffusers": ("diffusers", "accelerate"),
    "distributed": ("transformers",),
}
# Of single blocks, where they are installed: make nightly-recipes.
RARE = ("sentence_transformers", "lm_eval")


class Reader:
    """One document: a namespace that its Python blocks share, in a scratch directory of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module = types.ModuleType("tutorial")
        self.module.__spec__ = ModuleSpec("tutorial", None)  # importable, as the command line asks for
        self.failed = ""

    def run(self, block: Fence, path: Path) -> None:
        if block.language == "python":
            # of training a tenth of the steps; the lines keep their numbers, so that an error points into the document
            text = block.text.replace("500", "50") if path.stem == "qat" else block.text
            exec(compile("\n" * (block.line - 1) + text, str(path), "exec"), self.module.__dict__)
        elif block.language == "yaml":
            name = re.match(r"# (\S+\.yaml)\n", block.text)
            assert name, f"{path}:{block.line}: a YAML block begins with '# name.yaml'"
            Path(name[1]).write_text(block.text)
        elif block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["pyquant"]:
                    assert main(words[1:]) == 0, line


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Path, Reader]]:
    yield {path: Reader(tmp_path_factory.mktemp(path.stem)) for path in DOCUMENTS}
    sys.modules.pop("tutorial", None)


CASES = [
    pytest.param(path, block, id=f"{path.stem}:{block.line}")
    for path in DOCUMENTS
    if path.is_file()
    for block in fences(path)
    if block.language in ("python", "yaml", "bash")
]


@pytest.mark.parametrize(("path", "block"), CASES)
def test_the_block_runs(path: Path, block: Fence, readers: dict[Path, Reader], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    for package in PACKAGES.get(path.stem, ()):
        pytest.importorskip(package)
    for package in RARE:
        if re.search(rf"^from {package}\b", block.text, re.M):
            pytest.importorskip(package)
    reader = readers[path]
    if reader.failed:
        pytest.skip(f"the block at line {reader.failed} failed")
    reader.failed = str(block.line)
    monkeypatch.chdir(reader.folder)
    monkeypatch.setitem(sys.modules, "tutorial", reader.module)  # for commands that name tutorial:function
    monkeypatch.syspath_prepend(str(ROOT))  # the page imports from examples/
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if path.stem == "qat":  # the page on training begins as it advises to
            warnings.simplefilter("error", pq.QATWarning)
        reader.run(block, path)
    if path.stem == "qat":
        check_of_qat(reader.module.__dict__)
    reader.failed = ""


def check_of_qat(names: dict[str, Any]) -> None:
    """Whatever a block of docs/qat.md has trained, prepared or converted gives finite numbers."""
    inputs = names["loader"][0][0]
    model = names.get("model") or names["trained_model"]()
    if all(f.is_calibrated for m in model.modules() if is_simulated(m) for f in m.fake_quantizers().values()):
        assert model(inputs).isfinite().all()


def test_a_page_that_trains_into_nan_is_seen() -> None:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, torch.nan)
    with pytest.raises(AssertionError):
        check_of_qat({"loader": [(torch.ones(1, 2), None)], "model": model})


def test_every_snippet_of_the_documents_has_its_counterpart() -> None:
    headings = {block.heading for block in fences(PAGE) if block.language == "python"}
    wanted = [f"{n}.{i}" for n, count in ((1, 3), (2, 3), (3, 3), (4, 5)) for i in range(1, count + 1)]
    assert sorted({h.split(" ")[0] for h in headings if re.match(r"\d\.\d ", h)}) == wanted


def test_every_row_of_what_they_get_wrong_names_a_test_that_exists() -> None:
    table = PAGE.read_text(encoding="utf-8").split("## What the tutorials get wrong")[1]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith(("| Where", "|--"))]
    assert len(rows) >= 21
    for row in rows:
        named = re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", row)
        assert named, row
        for file, name in named:
            text = (ROOT / (file or "tests/ptq/test_tutorial_defects.py")).read_text(encoding="utf-8")
            assert f"def {name}(" in text, name
    defects = re.findall(r"^def (test_\w+)", (ROOT / "tests/ptq/test_tutorial_defects.py").read_text(), re.M)
    assert not [name for name in defects if f"`{name}`" not in table], "a test that no row names"


def test_the_example_of_the_three_modes_prints_the_table_of_its_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the last digit, on the Python whose library is the data of the page; elsewhere what does not depend on it."""
    monkeypatch.syspath_prepend(str(ROOT))
    from examples import selective

    page = (ROOT / "docs" / "selective.md").read_text(encoding="utf-8")
    is_that_python = f"Python {platform.python_version()} " in page
    rows = {name: rest for name, *rest in selective.main(*(() if is_that_python else (1,)))}
    assert {name: tuple(rest[2:]) for name, rest in rows.items()} == {
        "float32": (0, 3),
        "naive": (8, 3),
        "hybrid": (6, 3),
        "selective": (8, 0),
    }
    assert rows["selective"][1] > rows["naive"][1]
    table = capsys.readouterr().out
    assert (table if is_that_python else table.splitlines()[0]) in page


def test_a_block_that_fails_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# t\n\ntext\n\n```python\nx = 1\nraise ValueError(x)\n```\n")
    (block,) = fences(page)
    assert (block.line, block.heading) == (6, "t")
    with pytest.raises(ValueError, match="1") as error:
        Reader(tmp_path).run(block, page)
    assert error.traceback[-1].lineno == 6  # counted from 0: line 7 of the page
    page.write_text("```python\nx")
    with pytest.raises(ValueError, match="not closed"):
        fences(page)
