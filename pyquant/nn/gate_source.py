"""Gated feed-forward modules, known by the source of their forward: down(activation(gate(x)) * up(x))."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from torch import nn

from pyquant.core.remembered import remembered

# Words in capitals stand for names: SELF and X for the arguments, FUNCTION for what the module's file knows, the other
# attributes for layers and the activation, the other words for variables.
_PRODUCTS: Final = (
    "SELF.DOWN(SELF.ACTIVATION(SELF.GATE(X)) * SELF.UP(X))",
    "SELF.DOWN(SELF.UP(X) * SELF.ACTIVATION(SELF.GATE(X)))",
    "SELF.DOWN(FUNCTION(SELF.GATE(X)) * SELF.UP(X))",
    "SELF.DOWN(SELF.UP(X) * FUNCTION(SELF.GATE(X)))",
)
# As Phi-3 and GLM have it: the rows of one layer are gates, and then ups.
_JOINED: Final = """
BOTH = SELF.GATE(X)
LEFT, BOTH = BOTH.chunk(2, dim=-1)
BOTH = BOTH * SELF.ACTIVATION(LEFT)
return SELF.DOWN(BOTH)
"""
_ATTRIBUTES: Final = ("GATE", "UP", "DOWN", "ACTIVATION")
_FORMS: Final[tuple[list[ast.stmt], ...]] = tuple(
    ast.parse(text).body for product in _PRODUCTS for text in (f"return {product}", f"Y = {product}\nreturn Y")
) + (ast.parse(_JOINED).body,)


@dataclass(frozen=True)
class Gate:
    """The attributes of a module that computes down(activation(gate(x)) * up(x)), and nothing else.

    gate, up, down  of its layers. `up` is empty where the results of `gate` hold its own behind them.
    activation      of what is applied to the result of `gate`; empty where the code names a function.
    function        that function; None where an attribute holds the activation.
    """

    gate: str
    up: str
    down: str
    activation: str
    function: Any = None

    @property
    def layers(self) -> list[str]:
        """The attributes that hold layers."""
        return [name for name in (self.gate, self.up, self.down) if name]


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


@remembered
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
    body = [line for line in function.body if not _is_text(line)]
    for form in _FORMS:
        match = _Match(forward.__globals__, SELF=names[0], X=names[1])
        if match.all(form, body) and match.is_distinct:
            gate, up, down, activation = (str(match.found.get(word, "")) for word in _ATTRIBUTES)
            return Gate(gate, up, down, activation, match.found.get("FUNCTION"))
    return None


def _is_source_of(function: ast.FunctionDef, forward: FunctionType) -> bool:
    """Whether the source makes the code that runs: a file may have changed since it was imported."""
    ran = forward.__code__
    modules = [name for name in ran.co_names if isinstance(forward.__globals__.get(name), ModuleType)]
    imports: list[ast.stmt] = [ast.Import([ast.alias(name)]) for name in modules]
    for before in ([], imports):  # Python has other code for the members of what a file imports
        tree = ast.fix_missing_locations(ast.Module([*before, function], []))
        made = next(c for c in compile(tree, "<forward>", "exec").co_consts if isinstance(c, CodeType))
        if _code(made) == _code(ran):
            return True
    return False


def _code(code: CodeType) -> tuple[Any, ...]:
    """What a function does; its text for readers is no part of that."""
    return code.co_code, code.co_names, code.co_varnames, [c for c in code.co_consts if not isinstance(c, str)]


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


class _Match:
    """Compares a form with code, and notes what the words of the form stand for."""

    def __init__(self, known: dict[str, Any], **found: str) -> None:
        self._known, self.found = known, dict[str, Any](found)

    @property
    def is_distinct(self) -> bool:
        """Whether no two attributes, and no two variables, are the same."""
        held = {word: value for word, value in self.found.items() if word in _ATTRIBUTES}
        others = {word: value for word, value in self.found.items() if word not in (*_ATTRIBUTES, "FUNCTION")}
        return all(len(set(words.values())) == len(words) for words in (held, others))

    def all(self, form: Sequence[ast.AST], code: Sequence[ast.AST]) -> bool:
        """Whether a list of nodes reads as another one."""
        return len(form) == len(code) and all(itertools.starmap(self._one, zip(form, code, strict=True)))

    def _one(self, form: ast.AST, code: ast.AST) -> bool:
        if isinstance(form, ast.Name) and form.id == "FUNCTION":
            function = _value(code, self._known)
            return function is not None and self._is(form.id, function)
        if type(form) is not type(code):
            return False
        if isinstance(form, ast.Name) and isinstance(code, ast.Name):
            return self._is(form.id, code.id)
        if isinstance(form, ast.Attribute) and isinstance(code, ast.Attribute) and form.attr.isupper():
            return self._one(form.value, code.value) and self._is(form.attr, code.attr)
        return all(self._field(getattr(form, name), getattr(code, name)) for name in _fields(form))

    def _field(self, form: Any, code: Any) -> bool:
        if isinstance(form, list):
            return isinstance(code, list) and self.all(form, code)
        return self._one(form, code) if isinstance(form, ast.AST) else form == code

    def _is(self, word: str, value: Any) -> bool:
        return self.found.setdefault(word, value) == value


def _fields(node: ast.AST) -> Iterable[str]:
    return (name for name in node._fields if name not in ("ctx", "type_comment", "kind"))


def _value(node: ast.AST, known: dict[str, Any]) -> Any:
    """What a dotted name stands for among a module's globals."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, known), node.attr, None)
    return None
