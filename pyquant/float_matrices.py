"""trace_floats: the matrices that a model holds in floating point, and which of them it multiplies by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch  # noqa: F401  (the example)
from torch import nn

from pyquant.errors import ArgumentError
from pyquant.integrations.example import example_for
from pyquant.nn.products import MULTIPLIED, Seen, watch_products
from pyquant.nn.report import quantization_report

_NO_HOLDER: Final = "a tensor that is no parameter and no buffer"
_READ_OUT: Final = "a quantised layer's weight, dequantised at each use: the code around multiplies by it itself"


@dataclass(frozen=True)
class FloatMatrix:
    """One matrix that is held in floating point, and what a run of the model did with it.

    name    of the parameter or buffer; of a tensor that no module holds, its shape and where it is multiplied.
    shape   as it is held.
    use     'multiplied': an operand of a matrix product or convolution, or of an operator that is not PyTorch's;
            'other': read element by element (a scale, a decay), or made into codes; 'added': added, looked up in,
            joined; 'not reached': this run read it in no operator together with data.
    ops     names of the operators that did.
    share   of the bytes of all weights of the model, 0 to 1.
    reason  why it is in floating point, as quantization_report says.
    """

    name: str
    shape: tuple[int, ...]
    use: str
    ops: tuple[str, ...]
    share: float
    reason: str = ""


def trace_floats(model: nn.Module, example_inputs: object = None) -> list[FloatMatrix]:
    """Run a model once, and see which of its matrices it multiplies by in floating point.

    model           as it is to be used; quantised, or not. It runs in evaluation mode without gradients.
    example_inputs  a tensor or other single argument, a tuple of arguments, or a mapping of keyword arguments. None:
                    made where the model says what it takes: an nn.Sequential that begins with a Linear, Conv2d or
                    Embedding, a model of transformers that reads token ids, images or sound.
    ->              one record a matrix: what is multiplied first, the largest first.
    Every operator of PyTorch is watched, and matrices are followed through views, casts, copies and what is computed
    from them alone: what no class or name gives away is found. A quantised layer whose weight is multiplied by the
    code around it is listed, too, as is a tensor that is no parameter. Products inside operators of other packages
    cannot be seen: what they are given counts as multiplied.
    Raises ArgumentError where no example can be made; what the model raises on a given example goes through.

    Example:
        >>> class Mixer(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.table, self.shift = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.zeros(4, 8))
        ...     def forward(self, x):
        ...         return (x + self.shift) @ self.table
        >>> [(m.name, m.use, m.ops) for m in trace_floats(Mixer(), torch.zeros(4, 8))]
        [('table', 'multiplied', ('mm',)), ('shift', 'added', ('add',))]
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", type(model).__name__, "a torch.nn.Module")
    if example_inputs is not None:
        return _records(model, watch_products(model, example_inputs))
    example = example_for(model)
    try:
        return _records(model, watch_products(model, example))
    except Exception as error:
        got = f"none, and the model did not take those made for it: {type(error).__name__}: {error}"
        raise ArgumentError("example_inputs", got[:300], "inputs that the model takes") from error


def _records(model: nn.Module, found: list[Seen]) -> list[FloatMatrix]:
    records = quantization_report(model)
    reasons = {record.name: record.reason or record.scheme for record in records}
    total = sum(r.bytes_before for r in records) + sum(s.size for s in found if not s.is_held and not s.is_view)
    made = []
    for seen in found:
        reason = reasons.get(seen.name.rpartition(".")[0], "")
        if not seen.is_held:
            reason = _READ_OUT if seen.is_view else _NO_HOLDER
        ops = tuple(sorted(seen.products or seen.others))
        made.append(FloatMatrix(seen.name, seen.shape, seen.use, ops, seen.size / (total or 1), reason))
    return sorted(made, key=lambda one: (one.use != MULTIPLIED, -one.share))
