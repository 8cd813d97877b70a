"""The source of module classes, from which it is read how they call and read the layers that they hold."""

from __future__ import annotations

import inspect

from torch import nn

from pyquant.core.remembered import remembered


def source_of(kind: type[nn.Module]) -> str:
    """Of a class and its bases up to nn.Module; empty where one was compiled, or typed into a terminal."""
    sources = [_own(base) for base in kind.__mro__ if base not in (nn.Module, object)]
    return "" if "" in sources else "".join(sources)


@remembered
def _own(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
