"""Answers about classes and functions, and classes made of others, remembered for as long as these are there."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, ref

_Of = TypeVar("_Of")
_More = ParamSpec("_More")
_Answer = TypeVar("_Answer")
_Base = TypeVar("_Base")
_Made = TypeVar("_Made")


def remembered(function: Callable[Concatenate[_Of, _More], _Answer]) -> Callable[Concatenate[_Of, _More], _Answer]:
    """The function, asked once about each class (or function) and further arguments, which have a hash.

    functools.cache would keep a class alive for good, with all that its methods have closed over: notebooks and
    searches make a new one in each turn.

    Example:
        >>> length_of_name = remembered(lambda kind: len(kind.__name__))
        >>> length_of_name(int), length_of_name(int)
        (3, 3)
    """
    known: WeakKeyDictionary[_Of, dict[object, _Answer]] = WeakKeyDictionary()

    @wraps(function)
    def answer(of: _Of, /, *args: _More.args, **kwargs: _More.kwargs) -> _Answer:
        answers = known.setdefault(of, {})
        asked = (args, tuple(kwargs.items()))
        if asked not in answers:
            answers[asked] = function(of, *args, **kwargs)
        return answers[asked]

    return answer


def derived(make: Callable[[type[_Base]], type[_Made]]) -> Callable[[type[_Base]], type[_Made]]:
    """The function, which makes a class of another one: the same for as long as something is of it.

    The made class holds the one that it was made of, so that it too must be held by those who use it alone.

    Example:
        >>> quiet = derived(lambda kind: type("Quiet", (kind,), {}))
        >>> one = quiet(int)()
        >>> type(one) is quiet(int)
        True
    """
    known: WeakKeyDictionary[type, ref[type[_Made]]] = WeakKeyDictionary()

    @wraps(make)
    def made(base: type[_Base]) -> type[_Made]:
        kind = found() if (found := known.get(base)) is not None else None
        if kind is None:
            kind = make(base)
            known[base] = ref(kind)
        return kind

    return made
