"""YAML to plain data in one pass over the parser's events: nothing is composed, so nothing can expand.

PyYAML's own constructor reads base-60 integers in quadratic time, dates, octal numbers, aliases and tags. None of them
means anything here: the numbers are those of YAML 1.2, words such as `off` keep their meaning of YAML 1.1, and the rest
is text or refused.
"""

from __future__ import annotations

import re
from typing import Any, Final

from pyquant.errors import ArgumentError
from pyquant.recipe import plain
from pyquant.recipe.plain import Refused

# The most events that fit into this take about half a second of a busy processor (tests/hostile/document_cases.py).
MAX_BYTES_OF_YAML: Final = 2**19
# PyYAML without libyaml reads a character at a time: this much takes it half a second.
MAX_BYTES_OF_SLOW_YAML: Final = 2**16
_WORDS: Final[dict[str, Any]] = {
    **{word: True for name in ("yes", "true", "on") for word in (name, name.capitalize(), name.upper())},
    **{word: False for name in ("no", "false", "off") for word in (name, name.capitalize(), name.upper())},
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
}
_INTEGER: Final = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)")
_HEXADECIMAL: Final = re.compile(r"0x[0-9a-fA-F][0-9a-fA-F_]*")
_AMBIGUOUS: Final = re.compile(r"[-+]?(?:0[0-9_]+|0b[01_]+|0o[0-7_]+)")  # octal for some readers, decimal for others
_FLOAT: Final = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE: Final = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def library() -> Any:
    """PyYAML. Raises ArgumentError where it is not installed."""
    try:
        import yaml
    except ImportError:
        raise ArgumentError("recipe", "YAML, and PyYAML is not installed", "pip install pyyaml; TOML; JSON") from None
    return yaml


def parse(text: str) -> Any:
    """Plain data of one document. Raises Refused; ArgumentError where PyYAML is not installed."""
    yaml = library()
    loader = getattr(yaml, "CSafeLoader", None)
    if len(text) > MAX_BYTES_OF_YAML:
        raise Refused(f"{len(text)} characters of YAML", f"at most {MAX_BYTES_OF_YAML}")
    if loader is None and len(text) > MAX_BYTES_OF_SLOW_YAML:
        raise Refused(f"{len(text)} characters", f"at most {MAX_BYTES_OF_SLOW_YAML} where PyYAML is without libyaml")
    if re.search(r"^%", text, re.MULTILINE):  # before the first event, and compared in quadratic time
        raise Refused("a directive (% in the first column)", "valid YAML without directives")
    builder = _Builder()
    try:
        for event in yaml.parse(text, Loader=loader or yaml.SafeLoader):
            if type(event) is yaml.ScalarEvent:  # nearly all of them
                builder.scalar(event)
            else:
                builder.take(yaml, event)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: surrogates
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f" (line {mark.line + 1})"
        problem = " ".join(str(getattr(error, "problem", None) or error).split())[:160]
        if "nesting depth" in problem:  # the parser's own limit, which newer ones meet before an event comes out
            raise Refused(f"nested too deeply{line}", f"{plain.MAX_DEPTH} levels") from None
        raise Refused(problem + line, "valid YAML") from None
    return builder.data


class _Builder:
    """Lists and mappings from the stream of events; depth, nodes, keys and aliases are looked at as they come."""

    def __init__(self) -> None:
        self.data: Any = None
        self._open: list[tuple[Any, list[str]]] = []  # container; the key that waits for its value
        self._documents = self._nodes = 0

    def take(self, yaml: Any, event: Any) -> None:
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise Refused(f"a second document in line {_line(event)}", "valid YAML of one document")
        elif isinstance(event, yaml.CollectionEndEvent):
            self._open.pop()
        elif isinstance(event, yaml.NodeEvent):
            self._count(event)
            container: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
            self._put(event, container)
            self._open.append((container, []))
            if len(self._open) > plain.MAX_DEPTH:
                raise Refused(f"nested too deeply in line {_line(event)}", f"{plain.MAX_DEPTH} levels")

    def scalar(self, event: Any) -> None:
        self._count(event)
        self._put(event, _scalar(event) if event.implicit[0] else event.value)

    def _count(self, event: Any) -> None:
        if event.anchor:  # of an anchor, and of an alias
            raise Refused(f"an anchor or alias in line {_line(event)}", "values written out")
        if event.tag is not None and event.tag != "!":
            raise Refused(f"tag {event.tag[:60]!r} in line {_line(event)}", "valid YAML without tags")
        self._nodes += 1
        if self._nodes > 2 * plain.MAX_NODES:  # keys count here
            raise Refused(f"more than {plain.MAX_NODES} values", f"at most {plain.MAX_NODES}")

    def _put(self, event: Any, value: Any) -> None:
        if not self._open:
            self.data = value
            return
        container, waiting = self._open[-1]
        if isinstance(container, list):
            container.append(value)
        elif waiting:
            container[waiting.pop()] = value
        elif isinstance(value, (dict, list)):
            raise Refused(f"a {type(value).__name__} as a key in line {_line(event)}", "text as keys")
        elif value == "<<" and event.implicit[0]:
            raise Refused(f"a merge key in line {_line(event)}", "values written out")
        elif value in container:
            raise Refused(f"key {str(value)[:80]!r} is repeated in line {_line(event)}", "every key once")
        else:
            waiting.append(value)


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _scalar(event: Any) -> Any:
    """The value of a plain word."""
    text: str = event.value
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in "+-.0123456789":
        return text
    if _INTEGER.fullmatch(text):
        return plain.integer(text)
    if _HEXADECIMAL.fullmatch(text):
        return plain.integer(text[2:], 16)
    if _AMBIGUOUS.fullmatch(text):
        raise Refused(f"number {text[:40]!r} in line {_line(event)}", "decimal numbers without leading zeros")
    if _NOT_FINITE.fullmatch(text):
        return float(text.lower().replace(".", ""))
    return plain.real(text) if _FLOAT.fullmatch(text) else text
