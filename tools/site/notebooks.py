"""Runs the notebooks of docs/notebooks and writes their output into them: python tools/site/notebooks.py [--check].

Committed notebooks hold their output, and nothing of the run that made it: no times, no counters, no kernel's version.
--check writes nothing and fails where an output has another form than the committed one (numbers may differ).
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def run(path: Path) -> Any:
    """The notebook with the output of its cells, executed one after the other in a fresh kernel."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(path, as_version=4)
    # what a cell prints arrives in one piece or in several, as the moment will have it
    how: dict[str, Any] = {"timeout": 600, "kernel_name": "python3", "coalesce_streams": True}
    NotebookClient(book, **how, resources={"metadata": {"path": str(path.parent)}}).execute()
    return plain(book)


def plain(book: Any) -> Any:
    """Without what changes from run to run."""
    book.metadata = METADATA
    for number, cell in enumerate(book.cells):
        cell.metadata, cell.id = {}, f"cell-{number}"
        if cell.cell_type == "code":
            cell.execution_count = None
            for output in cell.outputs:
                output.pop("execution_count", None)
                output.metadata = {} if "metadata" in output else None
                if output.metadata is None:
                    del output["metadata"]
                if output.output_type == "execute_result":
                    output["execution_count"] = None
    return book


def form(book: Any) -> list[list[str]]:
    """What the cells give, numbers aside: of each output its text, or the kinds of data that it holds."""
    found = []
    for cell in book["cells"]:
        outputs = cell.get("outputs", [])
        found.append([_form(output) for output in outputs])
    return found


def _form(output: Any) -> str:
    text = output.get("text")
    if text is None:
        data = output.get("data", {})
        text = " ".join(sorted(data)) if "image/png" in data else data.get("text/plain", output["output_type"])
    words = "".join(text) if isinstance(text, list) else text
    return re.sub(r"[ -]+", " ", re.sub(r"[\d.]+(?:e-?\d+)?", "#", words)).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    is_check = parser.parse_args().check
    import nbformat

    status = 0
    for path in sorted(FOLDER.glob("*.ipynb")):
        done = run(path)
        if not is_check:
            nbformat.write(done, path)
        elif form(done) != form(nbformat.read(path, as_version=4)):
            print(f"pyquant: {path.name}: its output is another one now")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
