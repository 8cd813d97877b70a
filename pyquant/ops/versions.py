"""Autograd's version counters of buffers that an op writes: raised for every caller, as torch's own in-place ops do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pyquant.ops.schema import SCHEMAS


def register(library: torch.library.Library) -> None:
    """Have each op with written arguments raise their versions, whoever calls it and whichever kernel serves it."""
    for name in SCHEMAS:
        op = getattr(torch.ops.pyquant, name).default
        arguments = op._schema.arguments
        written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
        if written:
            library.impl(name, _raising(op, written), "ADInplaceOrView", with_keyset=True)


def _raising(op: Any, written: list[int]) -> Callable[..., None]:
    below = torch._C._after_ADInplaceOrView_keyset
    names = {i: op._schema.arguments[i].name for i in written}

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> None:
        op.redispatch(keyset & below, *args, **kwargs)
        for i, name in names.items():
            buffer = args[i] if i < len(args) else kwargs[name]
            if not buffer.is_inference():  # has no version, and no graph can have saved it
                torch.autograd.graph.increment_version(buffer)

    return kernel
