"""pyquant's own candidates for the harness: a QLinear of any scheme, and the exact check of what it returns."""

from __future__ import annotations

import copy

import torch

from pyquant.core.scheme import QScheme
from pyquant.measure.peers import Candidate, GemmCase, PeerUnavailable
from pyquant.nn.qlinear import QLinear

_CHECK_ROWS = 8


def build_qlinear(case: GemmCase, scheme: QScheme, dtype: torch.dtype) -> tuple[QLinear, torch.Tensor]:
    """The case's linear as a QLinear on the case's device, and its input in `dtype`.

    A static scheme is calibrated on the case's own input: one per-tensor scale of its largest absolute value.
    """
    linear = case.linear()
    x = case.x.to(dtype)
    input_scale = case.x.abs().amax() / scheme.inputs.code_range[1] if scheme.is_static and scheme.inputs else None
    layer = QLinear.from_float(linear, scheme, input_scale=input_scale)
    return layer.to(dtype=dtype), x


def qlinear_candidate(layer: QLinear, x: torch.Tensor) -> Candidate:
    """Calls the layer on x, as a model would."""
    return lambda: layer(x)


def is_exact(layer: QLinear, x: torch.Tensor) -> bool:
    """Whether up to eight rows of layer(x), the whole batch computed, have the specification's bits.

    Rows are independent, so the reference is computed for the checked rows alone, first and last among them, and on the
    CPU whatever the device.
    """
    with torch.inference_mode():
        y = layer(x)
        rows = check_rows(x.shape[0])
        judge = layer if x.device.type == "cpu" else copy.deepcopy(layer).cpu()
        reference = judge.reference(x[rows].cpu())
    return torch.equal(y[rows].cpu(), reference)


def check_rows(m: int) -> list[int]:
    """Up to eight row numbers of [0, m), spread evenly, first and last among them."""
    if m <= _CHECK_ROWS:
        return list(range(m))
    return sorted({round(i * (m - 1) / (_CHECK_ROWS - 1)) for i in range(_CHECK_ROWS)})


def sqnr_db(y: torch.Tensor, case: GemmCase) -> float:
    """Signal to noise of y against the float64 product of the same numbers, on the checked rows, in dB.

    Raises PeerUnavailable when y has another shape: the candidate does not compute this problem.
    """
    if y.shape != (case.m, case.n):
        raise PeerUnavailable(f"returned shape {list(y.shape)}, expected [{case.m}, {case.n}]")
    rows = check_rows(case.m)
    exact = case.x[rows].double() @ case.w.double().t()
    if case.bias is not None:
        exact += case.bias.double()
    signal = float(exact.square().sum())
    noise = float((y[rows].double() - exact).square().sum())
    if noise == 0:
        return float("inf")
    return 10 * float(torch.log10(torch.tensor(max(signal, 1e-300) / noise, dtype=torch.float64)))
