"""A model whose calls are watched, and which is left as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


@contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, Callable[..., Any]]], *, before: bool = False) -> Iterator[None]:
    """hook(module, args, kwargs, result) after every call of its module, or without the result `before` it."""
    with ExitStack() as undo:
        for module, hook in hooks:
            register = module.register_forward_pre_hook if before else module.register_forward_hook
            undo.callback(register(hook, with_kwargs=True).remove)
        yield
