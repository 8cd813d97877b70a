"""The source of module classes, from which it is read how they call and read the layers that they hold."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import textwrap
from functools import lru_cache
from typing import Final

from torch import nn

from pyquant.core.remembered import remembered

# Methods that give a module the weights it begins with.
_INITIALISES: Final = re.compile(r"init|reset|load|tie|from_")
_WRITES: Final = re.compile(r"\bself\.\w+\.weight(\.data)?\.\w+_\(")


def source_of(kind: type[nn.Module]) -> str:
    """Of a class and its bases up to nn.Module; empty where one was compiled, or typed into a terminal."""
    sources = [_own(base) for base in kind.__mro__ if base not in (nn.Module, object)]
    return "" if "" in sources else "".join(sources)


@remembered
def _own(kind: type) -> str:
    try:
        file, module = inspect.getsourcefile(kind), inspect.getmodule(kind)
        lines = linecache.getlines(file, vars(module)) if file and module else []
        places = _places("".join(lines)).get(kind.__qualname__, [])
        if len(places) == 1:
            return "".join(lines[slice(*places[0])])
        return inspect.getsource(kind)
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""


@lru_cache(maxsize=16)
def _places(file: str) -> dict[str, list[tuple[int, int]]]:
    """First line and last of the classes of a file, by qualified name. inspect parses the file again for each class."""
    found: dict[str, list[tuple[int, int]]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.stmt, ast.ExceptHandler)):
                continue
            name = prefix
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                name = f"{prefix}{child.name}."
                if isinstance(child, ast.ClassDef):
                    first = min((d.lineno for d in child.decorator_list), default=child.lineno)
                    found.setdefault(name[:-1], []).append((first - 1, child.end_lineno or child.lineno))
                else:
                    name += "<locals>."
            visit(child, name)

    visit(ast.parse(file), "")
    return found


@remembered
def written_layers(kind: type[nn.Module]) -> frozenset[str]:
    """The layers of a class whose weight one of its methods changes in place, as Gemma3n clamps those of a router when
    it trains: `self.layer.weight.data.clamp_(-1, 1)`."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base in (nn.Module, object):
            continue
        source = _own(base)
        if _WRITES.search(source) is None:
            continue
        try:
            parsed = ast.parse(textwrap.dedent(source))
        except (SyntaxError, ValueError):
            continue
        for method in [node for whole in parsed.body for node in ast.iter_child_nodes(whole)]:
            if isinstance(method, ast.FunctionDef) and not _INITIALISES.search(method.name):
                found |= {name for node in ast.walk(method) if (name := _written(node)) is not None}
    return frozenset(found)


def _written(node: ast.AST) -> str | None:
    """The layer in `self.layer.weight.f_(...)`, with or without `.data`; None for anything else."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    name = node.func.attr
    if not name.endswith("_") or name.endswith("__"):
        return None
    parts = ast.unparse(node.func.value).removesuffix(".data").split(".")
    return parts[1] if len(parts) == 3 and parts[0] == "self" and parts[2] == "weight" else None
