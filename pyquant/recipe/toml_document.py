"""TOML to plain data by the standard library, after a look for what it reads in quadratic time."""

from __future__ import annotations

import re
from typing import Any, Final

from pyquant.errors import ArgumentError
from pyquant.recipe import plain
from pyquant.recipe.plain import Refused

MAX_BYTES: Final = 2**17  # the parser is plain Python: this much takes it half a second
_SIGNS: Final = re.compile(r'"""|\'\'\'|\\.|["\'#\n.=,{}\[\]]', re.DOTALL)


def library() -> Any:
    """tomllib, or its ancestor for Python 3.10. Raises ArgumentError where there is neither."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib
        except ImportError:
            allowed = "pip install tomli, or a YAML or JSON file"
            raise ArgumentError("recipe", "TOML, which needs Python 3.11", allowed) from None
    return tomllib


def parse(text: str) -> Any:
    """Plain data of a document. Raises Refused; ArgumentError where there is no parser."""
    tomllib = library()
    if len(text) > MAX_BYTES:
        raise Refused(f"{len(text)} characters", f"at most {MAX_BYTES} of TOML; YAML or JSON")
    _check_keys(text)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError, OverflowError) as error:  # TOMLDecodeError is a ValueError; so are long numbers
        raise Refused(str(error)[:160], "valid TOML") from None


def _check_keys(text: str) -> None:
    """Refuse dotted keys of many parts: the parser walks from the root for every prefix of every key. Strings and
    comments are stepped over with signs of fixed length, so this look is linear in any text."""
    inside, dots = "", 0  # the sign that ends the string or comment we are in
    for match in _SIGNS.finditer(text):
        sign = match.group()
        if inside:
            ends_literal = sign[0] == "\\" and inside[0] != '"' and inside in sign
            if sign == inside or (sign == "\n" and len(inside) == 1) or ends_literal:
                inside = ""
        elif sign[0] in "\"'":
            inside = sign
        elif sign == "#":
            inside = "\n"
        elif sign == ".":
            dots += 1
            if dots >= plain.MAX_DEPTH:
                line = text.count("\n", 0, match.start()) + 1
                raise Refused(f"a key of more than {plain.MAX_DEPTH} parts in line {line}", f"{plain.MAX_DEPTH} levels")
        else:
            dots = 0
