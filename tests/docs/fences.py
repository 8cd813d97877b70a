"""The fenced blocks of a Markdown file, as they stand, in order."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fence:
    """language, text, line of its first line, and the heading that it stands under."""

    language: str
    text: str
    line: int
    heading: str


def fences(path: Path) -> list[Fence]:
    """Every fenced block of a file."""
    found, heading, start, language = [], "", 0, ""
    lines = path.read_text(encoding="utf-8").splitlines()
    inside: list[str] | None = None
    for number, line in enumerate(lines, 1):
        if inside is not None:
            if line.strip() == "```":
                found.append(Fence(language, "\n".join(inside) + "\n", start, heading))
                inside = None
            else:
                inside.append(line)
        elif match := re.fullmatch(r"```(\w*)", line.strip()):
            inside, language, start = [], match[1], number + 1
        elif line.startswith("#"):
            heading = line.lstrip("# ")
    if inside is not None:
        raise ValueError(f"{path}: the block at line {start} is not closed")
    return found
