"""Steps that take changes of a model back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

Undo = Callable[[], Any]


@contextmanager
def undone_on_error(undo: list[Undo] | None = None) -> Iterator[list[Undo]]:
    """Run the steps of `undo` (None: a new list, for the body to fill) in reverse where the body raises: all of them,
    also where one of them fails, or is interrupted."""
    steps = [] if undo is None else undo
    try:
        yield steps
    except BaseException:
        _run_all(steps)
        raise


def _run_all(steps: Sequence[Undo]) -> None:
    """Every step from the last to the first; what one raises goes on after the others."""
    with ExitStack() as stack:  # calls what it holds in reverse, and raises at the end
        for step in steps:
            stack.callback(step)


def put(holder: dict[str, Any], name: str, value: Any, undo: list[Undo]) -> None:
    """holder[name] = value, with the step that takes it back."""
    former = partial(holder.__setitem__, name, holder[name]) if name in holder else partial(holder.pop, name)
    undo.append(former)
    holder[name] = value


def take(holder: dict[str, Any], name: str, undo: list[Undo]) -> Any:
    """holder.pop(name), with the step that takes it back."""
    value = holder.pop(name)
    undo.append(partial(holder.__setitem__, name, value))
    return value
