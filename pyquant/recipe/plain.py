"""The bounds of plain data from untrusted text, whatever its format."""

from __future__ import annotations

import math
from typing import Any, Final

from pyquant.io import strict_json

MAX_DEPTH: Final = strict_json.MAX_DEPTH
MAX_NODES: Final = 2**16  # scalars, lists and mappings of a document


class Refused(Exception):
    """What a reader found and what is allowed; the caller knows the file and turns it into an ArgumentError."""

    def __init__(self, got: str, allowed: str) -> None:
        super().__init__(got)
        self.got, self.allowed = got, allowed


def check_plain(data: Any) -> None:
    """Raise Refused for what nests too deeply, has too many nodes, or holds integers beyond 64 bits or other types."""
    level, nodes = [data], 0
    for depth in range(MAX_DEPTH + 2):
        nodes += len(level)
        if nodes > MAX_NODES:
            raise Refused(f"more than {MAX_NODES} values", f"at most {MAX_NODES}")
        inner = [node for node in level if isinstance(node, (dict, list))]
        if not inner:
            break
        if depth > MAX_DEPTH - 1:
            raise Refused("nested too deeply", f"{MAX_DEPTH} levels")
        level = [v for node in inner for v in (node.values() if isinstance(node, dict) else node) if not _is_leaf(v)]
        nodes += sum(len(node) for node in inner) - len(level)


def _is_leaf(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return False
    if isinstance(value, int) and abs(value) > strict_json.MAX_INTEGER:
        raise Refused(f"an integer of {value.bit_length()} bits", "integers within 64 bits")
    if not (value is None or isinstance(value, (str, bool, int, float))):
        raise Refused(f"a {type(value).__name__}", "text, numbers, true, false, lists and mappings")
    return True


def integer(text: str, base: int = 10) -> int:
    """The integer that a text writes. Raises Refused beyond 64 bits, before any time is spent on the digits."""
    if len(text) > 2 * strict_json.MAX_DIGITS:
        raise Refused(f"an integer of {len(text)} characters", "integers within 64 bits")
    return int(text.replace("_", ""), base)


def real(text: str) -> float:
    """The float that a text writes. Raises Refused for one that is not finite or longer than 32 characters."""
    value = float(text.replace("_", "")) if len(text) <= strict_json.MAX_DIGITS else math.inf
    if not math.isfinite(value):
        raise Refused(f"number {text[: strict_json.MAX_DIGITS]}", "finite numbers of at most 32 characters")
    return value
