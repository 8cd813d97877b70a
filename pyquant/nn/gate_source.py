"""Gated feed-forward modules, known by the source of their forward: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Gate:
    """The attributes of a module that computes down(activation(gate(x)) * up(x)), and nothing else.

    gate, up, down  of its layers.
    activation      of what is applied to the result of `gate`; empty where the code names a function.
    function        that function; None where an attribute holds the activation.
    """

    gate: str
    up: str
    down: str
    activation: str
    function: Any = None


def gate_of(module: nn.Module) -> Gate | None:
    """How a module's forward reads; None where it is anything else, or its source cannot be read.

    What stands in the source is what runs only for a plain function: a forward that is wrapped, decorated, or the
    module's own is none.

    Example:
        >>> gate_of(nn.Linear(2, 2)) is None
        True
    """
    forward = type(module).forward
    if "forward" in module.__dict__ or not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return None
    return _read(forward)


@functools.cache
def _read(forward: FunctionType) -> Gate | None:
    try:
        (function,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(function, ast.FunctionDef) or function.decorator_list or not _is_source_of(function, forward):
        return None
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    if len(names) != 2 or given.vararg or given.kwarg or given.kwonlyargs or given.defaults:
        return None
    result = _result(function)
    own, x = names
    return None if result is None else _gate(result, own, x, forward.__globals__)


def _is_source_of(function: ast.FunctionDef, forward: FunctionType) -> bool:
    """Whether the source makes the code that runs: a file may have changed since it was imported."""
    ran = forward.__code__
    modules = [name for name in ran.co_names if isinstance(forward.__globals__.get(name), ModuleType)]
    imports: list[ast.stmt] = [ast.Import([ast.alias(name)]) for name in modules]
    for before in ([], imports):  # Python has other code for the members of what a file imports
        tree = ast.fix_missing_locations(ast.Module([*before, function], []))
        made = next(c for c in compile(tree, "<forward>", "exec").co_consts if isinstance(c, CodeType))
        if (made.co_code, made.co_names, made.co_varnames) == (ran.co_code, ran.co_names, ran.co_varnames):
            return True
    return False


def _result(function: ast.FunctionDef) -> ast.expr | None:
    """The expression that is returned, at once or by a name that it is given before."""
    body = [line for line in function.body if not _is_text(line)]
    end = body[-1] if body else None
    if not isinstance(end, ast.Return) or end.value is None or len(body) > 2:
        return None
    first = body[0]
    if first is end:
        return end.value
    if not isinstance(first, ast.Assign) or len(first.targets) != 1 or not isinstance(end.value, ast.Name):
        return None
    (name,) = first.targets
    return first.value if isinstance(name, ast.Name) and name.id == end.value.id else None


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def _gate(result: ast.expr, own: str, x: str, known: dict[str, Any]) -> Gate | None:
    down = _call(result, own)
    if down is None or not isinstance(down[1], ast.BinOp) or not isinstance(down[1].op, ast.Mult):
        return None
    for left, right in ((down[1].left, down[1].right), (down[1].right, down[1].left)):
        up, curve = _call(right, own), _curve(left, own, known)
        if up is None or curve is None or not _is_name(up[1], x):
            continue
        activation, function, inside = curve
        gate = _call(inside, own)
        if gate is not None and _is_name(gate[1], x):
            found = Gate(gate[0], up[0], down[0], activation, function)
            parts = {found.gate, found.up, found.down, *filter(None, (found.activation,))}
            return found if len(parts) == 3 + bool(found.activation) else None
    return None


def _call(node: ast.expr, own: str) -> tuple[str, ast.expr] | None:
    """self.name(argument) -> (name, argument)"""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return None
    function = node.func
    is_own = isinstance(function, ast.Attribute) and _is_name(function.value, own)
    return (function.attr, node.args[0]) if is_own else None  # type: ignore[attr-defined]


def _curve(node: ast.expr, own: str, known: dict[str, Any]) -> tuple[str, Any, ast.expr] | None:
    """self.name(argument) or function(argument) -> (name or '', function, argument)"""
    held = _call(node, own)
    if held is not None:
        return held[0], None, held[1]
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return None
    function = _value(node.func, known)
    return None if function is None else ("", function, node.args[0])


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    """What a dotted name stands for among a module's globals."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, known), node.attr, None)
    return None


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
