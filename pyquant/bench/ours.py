"""pyquant's own candidates for the harness: a QLinear of any scheme."""

from __future__ import annotations

import torch

from pyquant.bench.peers import Candidate, GemmCase, PeerUnavailable
from pyquant.core.scheme import QScheme
from pyquant.measure.exact import check_rows
from pyquant.nn.qlinear import QLinear


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
