"""Planted bugs that the suite must notice, and the registry they live in.

A mutant plants one bug (usually one edit of one source line, active inside a `with`) and names the check of the suite
that must fail while it is there. test_mutants.py runs all of them. A mutant that survives stays listed with its
reason. Other folders add theirs in tests/<folder>/planted_<what>.py, which is imported by name.

    register(edit("numerics.quantize", "torch.round(v)", "torch.floor(v + 0.5)"), notice=check, name="rounds half up")
"""

from __future__ import annotations
import __future__

import contextlib
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

Plant = Callable[[], AbstractContextManager[None]]
Notice = Callable[[int], object]


@dataclass(frozen=True)
class Mutant:
    """name      says the bug.
    area      folder or family it belongs to.
    plant     context manager in which the bug is there.
    notice    check(seed) that passes without the bug and must raise AssertionError (or our error) with it.
    survives  reason why it cannot be noticed, else None.
    """

    name: str
    area: str
    plant: Plant
    notice: Notice
    survives: str | None = None


REGISTRY: list[Mutant] = []


def register(plant: Plant, notice: Notice, *, name: str, area: str, survives: str | None = None) -> None:
    if any(m.name == name and m.area == area for m in REGISTRY):
        raise ValueError(f"mutant '{name}' of {area} is registered twice")
    REGISTRY.append(Mutant(name, area, plant, notice, survives))


def load_all() -> list[Mutant]:
    """Every mutant of the suite: those of tests/*/planted_*.py."""
    here = Path(__file__).resolve().parent
    for path in sorted(here.parent.glob("*/planted_*.py")):
        importlib.import_module(path.stem if path.parent == here else f"{path.parent.name}.{path.stem}")
    return REGISTRY


# ---- ways to plant a bug


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    """For mutants whose bug lives in the notice function itself."""
    yield


def patch(target: object, attribute: str, replacement: object) -> Plant:
    """Replaces an attribute of a module or class."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        before = getattr(target, attribute)
        setattr(target, attribute, replacement)
        try:
            yield
        finally:
            setattr(target, attribute, before)

    return plant


def edit(module_name: str, old: str, new: str) -> Plant:
    """Replaces the only occurrence of `old` in the source of pyquant.<module_name>.

    Functions keep their identity and get new code, so every place that imported them runs the edited form; constants
    and tables of the module are replaced by value.
    """

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        module = importlib.import_module(f"pyquant.{module_name}")
        module = _module_of(module, f"pyquant.{module_name}")
        source = inspect.getsource(module)
        if source.count(old) != 1:
            raise LookupError(f"{module_name}: {source.count(old)} places hold {old!r}, there must be one")
        edited = types.ModuleType(module.__name__)
        edited.__file__, edited.__package__ = module.__file__, module.__package__
        flags = __future__.annotations.compiler_flag
        code = compile(source.replace(old, new), str(module.__file__), "exec", flags, dont_inherit=True)
        exec(code, edited.__dict__)
        with contextlib.ExitStack() as undo:
            for name, before in list(vars(module).items()):
                _replace(undo, module, name, before, vars(edited).get(name))
            yield

    return plant


def _module_of(candidate: object, name: str) -> types.ModuleType:
    """The module itself where a package re-exports a function of the same name."""
    import sys

    return candidate if isinstance(candidate, types.ModuleType) else sys.modules[name]


def _replace(undo: contextlib.ExitStack, module: types.ModuleType, name: str, before: object, after: object) -> None:
    if inspect.isfunction(before) and inspect.isfunction(after) and before.__module__ == module.__name__:
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            undo.callback(setattr, before, part, getattr(before, part))
            setattr(before, part, getattr(after, part))
    elif isinstance(before, int | float | tuple) and not isinstance(before, bool) and before != after:
        undo.callback(setattr, module, name, before)
        setattr(module, name, after)
    elif isinstance(before, dict) and not name.startswith("__") and isinstance(after, dict) and before is not after:
        undo.callback(_refill, before, dict(before))
        _refill(before, after)


def _refill(table: dict, entries: dict) -> None:
    table.clear()
    table.update(entries)
