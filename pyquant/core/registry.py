"""Lists of names to which users add their own: one Registry each, filled by the modules of one folder.

A new method of the package is one file in that folder; a user's is a decorated function in a file that was imported.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

from pyquant.core import arguments
from pyquant.core.names import GIVEN_CALIBRATOR
from pyquant.errors import ArgumentError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to values in the order of registration; iteration gives the names.

    argument  that errors name.
    home      package whose modules register what pyquant has; it is imported when a name is first looked up, so that
              a low layer may check names that a higher one defines.
    """

    def __init__(self, argument: str, home: str) -> None:
        self.argument, self._home = argument, home
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: Callable[[Any], T] | None = None) -> Callable[[Any], Any]:
        """A decorator that registers what it is given, or the entry made of it.

        Raises ArgumentError for a name that is taken, or is none.
        """
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise ArgumentError("name", arguments.shown(name), "text on one line")
        if name in self:
            raise ArgumentError("name", repr(name), f"a name that is not taken: {', '.join(self)}")

        def decorator(value: Any) -> Any:
            self._entries[name] = value if entry is None else entry(value)
            return value

        return decorator

    def find(self, name: object, argument: str = "") -> T:
        """The entry of that name. Raises ArgumentError for an unknown one, naming `argument` or the registry's own."""
        if not isinstance(name, str) or name not in self:
            arguments.one_of(argument or self.argument, name, self)
        return self._entries[name]  # type: ignore[index]

    def names(self) -> tuple[str, ...]:
        """Every name."""
        importlib.import_module(self._home)
        return tuple(self._entries)

    def remove(self, name: str) -> T:
        """Takes a name out, for tests and for a function that is to replace another. -> its entry."""
        self.find(name)
        return self._entries.pop(name)

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


def import_modules(package: str) -> None:
    """Import every module of a package, in the order of their names: they register themselves."""
    for module in pkgutil.iter_modules(sys.modules[package].__path__):
        importlib.import_module(f"{package}.{module.name}")


CALIBRATORS: Final[Registry[Any]] = Registry("calibrator", "pyquant.calibrate.methods")
SCORERS: Final[Registry[Any]] = Registry("metric", "pyquant.mixed_precision.loss.scorers")
SEARCH_ALGORITHMS: Final[Registry[Any]] = Registry("algorithm", "pyquant.mixed_precision.solve.methods")
IMPROVERS: Final[Registry[Any]] = Registry("improve", "pyquant.ptq.improve.steps")
OBJECTIVES: Final[Registry[Any]] = Registry("objective", "pyquant.mixed_precision.costs")


def data_calibrators() -> tuple[str, ...]:
    """The calibrators that take a range from data, which are all but 'fixed'."""
    return tuple(name for name in CALIBRATORS if name != GIVEN_CALIBRATOR)
