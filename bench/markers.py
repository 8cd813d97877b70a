"""Results in documents: the text between two markers of a Markdown file is what a command printed."""

from __future__ import annotations

from pathlib import Path

from pyquant.errors import ArgumentError
from pyquant.report.render import write_text


def put(path: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- name -->` and `<!-- end of name -->`.

    Raises ArgumentError where the file does not hold both, in this order.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    head, _, tail = _parts(path, name)
    write_text(path, f"{head}{begin}\n\n{text.strip()}\n\n{end}{tail}")


def get(path: Path, name: str) -> str:
    """What stands between the two. Raises ArgumentError as put does: before a long measurement, not after it."""
    return _parts(path, name)[1].strip()


def _parts(path: Path, name: str) -> tuple[str, str, str]:
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    head, found, rest = path.read_text(encoding="utf-8").partition(begin)
    text, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ArgumentError("path", f"{path.name} without '{begin}' and '{end}'", "a document with both markers")
    return head, text, tail
