"""How far onnxruntime's results are from a model's, and why where sums in 16 bits are the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from pyquant.errors import UnsupportedError
from pyquant.integrations.onnx.look import INTEGER, PRECISE, Session
from pyquant.report.records.onnx_export import OnnxOutput

_FAR: Final = 0.1  # relative: what rounding elsewhere explains is far below
_ODD: Final = 0.01  # relative: from here on it is worth a second session to know whether sums saturate
_BETTER: Final = 0.5  # exact sums that leave less than this share of a difference are what it came from


def compare_outputs(
    session: Session, inputs: Sequence[Tensor], wanted: Sequence[Tensor]
) -> tuple[tuple[OnnxOutput, ...], str]:
    """Each result of a session beside the model's, and what is to be said of them; '' where they are the model's.

    A CPU without VNNI adds pairs of products of unsigned and signed codes in 16 bits. Whether that is what parts the
    results is tried, not guessed from the CPU: the session runs again with exact sums.
    """
    outputs = _all_compared(session, inputs, wanted)
    errors = [one.relative_error for one in outputs]
    if all(error < _ODD for error in errors):
        return outputs, ""
    is_far = not all(error < _FAR for error in errors)
    saturates = ""
    if any(node.op_type in INTEGER for node in session.graph.node):
        exact = [one.relative_error for one in _all_compared(session.precise(), inputs, wanted)]
        if any(b < _BETTER * a for a, b in zip(errors, exact, strict=True)):
            saturates = (
                "sums of products of codes saturate in 16 bits on this CPU, which has no VNNI instructions. With the "
                f"session option {PRECISE}=1 (SessionOptions.add_session_config_entry) differences are "
                f"{_listed(exact)} (docs/onnx.md)"
            )
    if not is_far and not saturates:
        return outputs, ""
    told = [error for error in errors if not error < (_ODD if saturates else _FAR)]
    differences = f"relative differences (L2) of {_listed(told)} on these args"
    return outputs, f"onnxruntime's results are not the model's: {differences}" + (saturates and f": {saturates}")


def _listed(errors: Sequence[float]) -> str:
    return ", ".join(f"{error:.3g}" for error in errors)


def _all_compared(session: Session, inputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> tuple[OnnxOutput, ...]:
    return tuple(_compared(a, b) for a, b in zip(wanted, session.run(inputs), strict=True))


def _compared(wanted: Tensor, got: Tensor) -> OnnxOutput:
    if wanted.shape != got.shape:
        raise UnsupportedError(f"onnxruntime gave {list(got.shape)} where the model gives {list(wanted.shape)}")
    a, b = wanted.double().flatten(), got.double().flatten()
    same = (a == b) | (a.isnan() & b.isnan())  # infinities, of masks for instance, have no difference
    off = torch.where(same, 0.0, a - b)
    error, power = float(off.square().sum()), float(a[a.isfinite()].square().sum())
    largest = float(off.abs().max()) if len(a) else 0.0
    relative = (error / power) ** 0.5 if power else float(error > 0)
    return OnnxOutput(bool(same.all()), largest, relative)
