"""Docstrings in the house's form as reStructuredText: names in a column, what they mean beside them, `->`, examples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

# Names, then at least two spaces, then what they mean. A column of names is narrow.
_ITEM = re.compile(r"(?P<names>->|[\w.*'\[\]]+(?:,? (?:or |and )?[\w.*'\[\]]+){0,11}?) {2,}(?P<text>\S.*)")
# A second item on the same line, which the house writes for short ones.
_SECOND = re.compile(r"(?<=\S) {4,}(?=[\w]+(?:, \w+)* {2,}\S)")
_CODE = re.compile(r"`+([^`]+)`+")
_SPECIAL = re.compile(r"([\\*_|`<>])")


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Sphinx's event: rewrites the lines of a docstring where they stand."""
    lines[:] = [*rst(lines), ""] if lines else []


def rst(lines: list[str]) -> list[str]:
    """A docstring without its indentation -> reStructuredText."""
    return list(_blocks(lines))


def _blocks(lines: list[str]) -> Iterator[str]:
    lines, at = [part for line in lines for part in _split(line)], 0
    while at < len(lines):
        line = lines[at]
        if not line.strip():
            at += 1
        elif line.strip() in ("Example:", "Examples:"):
            body, at = _deeper(lines, at)
            yield from (
                "",
                ".. rubric:: Example",
                "",
                *_indented([".. code-block:: pycon", "", *_indented(body)], 0),
                "",
            )
        elif line.lstrip().startswith(">>>"):
            body, at = _until_blank(lines, at)
            yield from ("", ".. code-block:: pycon", "", *_indented(body), "")
        elif line.startswith(("- ", "* ")):
            body, at = _deeper(lines, at)
            yield from ("", f"- {text(line[2:])}", *_indented([text(more) for more in body], 2), "")
        elif match := _ITEM.fullmatch(line):
            body, at = _deeper(lines, at)
            yield from _item(match["names"], [match["text"], *body])
        elif at + 1 < len(lines) and _width(lines[at + 1]) > _width(line) and lines[at + 1].strip():
            body, at = _deeper(lines, at)
            yield from ("", text(line), "", *_indented(_blocks(body)), "")
        else:
            yield text(line)
            at += 1
            if (at < len(lines) and _ITEM.fullmatch(lines[at])) or (at < len(lines) and not lines[at].strip()):
                yield ""


def _item(names: str, body: list[str]) -> Iterator[str]:
    """A term and its meaning. Deeper lines that are items themselves are a list in the list."""
    first = next((i for i, line in enumerate(body) if i and _ITEM.fullmatch(line)), len(body))
    term = "**Returns**" if names == "->" else f"``{names}``"
    yield from ("", term, *_indented([text(line) for line in body[:first]]))
    if first < len(body):
        yield from _indented(_blocks(body[first:]))
    yield ""


def _deeper(lines: list[str], at: int) -> tuple[list[str], int]:
    """The lines below that are indented further, without that indentation, and where they end."""
    width, end = _width(lines[at]), at + 1
    while end < len(lines) and (not lines[end].strip() or _width(lines[end]) > width):
        end += 1
    while end > at + 1 and not lines[end - 1].strip():
        end -= 1
    body = lines[at + 1 : end]
    least = min((_width(line) for line in body if line.strip()), default=0)
    return [line[least:] for line in body], end


def _until_blank(lines: list[str], at: int) -> tuple[list[str], int]:
    end = at
    while end < len(lines) and lines[end].strip():
        end += 1
    return lines[at:end], end


def _split(line: str) -> list[str]:
    """Items of one line as lines of their own."""
    if not _ITEM.fullmatch(line.strip()):
        return [line]
    indent = " " * _width(line)
    parts = _SECOND.split(line.strip())
    return [indent + part for part in parts]


def _width(line: str) -> int:
    return len(line) - len(line.lstrip())


def _indented(lines: Any, by: int = 4) -> list[str]:
    return [" " * by + line if line else "" for line in lines]


def text(line: str) -> str:
    """Words as they are; what stands in backticks as code."""
    parts, at = [], 0
    for match in _CODE.finditer(line):
        parts += [_SPECIAL.sub(r"\\\1", line[at : match.start()]), f"``{match[1].strip()}``"]
        at = match.end()
        if line[at : at + 1].isalnum():
            parts.append("\\ ")
    return "".join([*parts, _SPECIAL.sub(r"\\\1", line[at:])])
