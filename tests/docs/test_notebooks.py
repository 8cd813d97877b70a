"""The notebooks run as they stand, and their committed output is what the cells give now, numbers aside."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
TASKS = ("quantise_and_deploy", "quantisation_aware_training", "mixed_precision_search")


def tool() -> Any:
    """tools/site/notebooks.py, which is part of no package."""
    path = ROOT / "tools" / "site" / "notebooks.py"
    spec = importlib.util.spec_from_file_location("site_notebooks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def said(cell: dict[str, Any]) -> str:
    """What a cell printed, as committed."""
    return "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")


def test_every_task_has_one() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(TASKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_says_what_is_committed(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("sklearn", "matplotlib", "yaml"):
        pytest.importorskip(package)
    import matplotlib as mpl

    mpl.use("Agg")
    monkeypatch.chdir(tmp_path)
    form = tool()._form
    names: dict[str, Any] = {"__name__": "notebook"}
    seed = torch.get_rng_state()
    try:
        for number, cell in enumerate(json.loads(path.read_text())["cells"]):
            if cell["cell_type"] != "code":
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"{path.stem}, cell {number}", "exec"), names)
            assert form({"text": printed.getvalue()}) == form({"text": said(cell)}), f"cell {number}"
    finally:
        torch.set_rng_state(seed)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_of_the_run_is_committed(path: Path) -> None:
    """No counters, times or versions; and output that is there: `python tools/site/notebooks.py` writes it."""
    book = json.loads(path.read_text())
    assert book["metadata"] == tool().METADATA
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert all(cell["execution_count"] is None and not cell["metadata"] for cell in cells)
    assert sum(bool(cell["outputs"]) for cell in cells) >= 4
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds <= {"stream", "display_data"}, kinds
    pairs = [pair for cell in cells for pair in zip(cell["outputs"], cell["outputs"][1:])]
    assert not any(one["output_type"] == other["output_type"] == "stream" for one, other in pairs), "in pieces"
    assert not any(output.get("name") == "stderr" for cell in cells for output in cell["outputs"])
    assert book["cells"][0]["source"][0].startswith("# ")


@pytest.mark.nightly
def test_they_run_in_a_kernel_of_jupyter() -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    words = [sys.executable, str(ROOT / "tools" / "site" / "notebooks.py"), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
