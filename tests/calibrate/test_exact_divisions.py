"""CUDA multiplies by the reciprocal where a tensor is divided by a Python number: two roundings instead of one (torch's
BinaryDivTrueKernel.cu). The specification and the calibrators do not: a GPU would give other ranges than a CPU."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyquant import calibrate, numerics
from pyquant.calibrate import compute_range, new_statistics
from pyquant.calibrate.first_batch import FirstBatchHistogram
from pyquant.core.scheme import TensorScheme

_DIVISIONS = {
    torch.ops.aten.div.Tensor,
    torch.ops.aten.div.Scalar,
    torch.ops.aten.div_.Tensor,
    torch.ops.aten.div_.Scalar,
    torch.ops.aten.true_divide.Tensor,
    torch.ops.aten.true_divide.Scalar,
}


class HostDivisions(TorchDispatchMode):
    """Collects the divisions of a tensor by a Python number; by a power of two the reciprocal is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in _DIVISIONS and not isinstance(args[1], torch.Tensor) and math.frexp(args[1])[0] not in (0.5, -0.5):
            places = [f for f in traceback.extract_stack() if "/pyquant/" in f.filename.replace("\\", "/")]
            where = f"{places[-1].filename}:{places[-1].lineno}" if places else "?"
            self.found.add(f"{where} divides by {args[1]}")
        return op(*args, **(kwargs or {}))


DATA = [torch.randn(16, 300, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def _first_batch() -> None:
    histogram = FirstBatchHistogram()
    for batch in DATA:
        histogram.observe(batch.to(torch.bfloat16))
    histogram.entropy_amax(8)


def _method(name: str) -> Callable[[], None]:
    def run() -> None:
        for bits in (8, 4):
            for symmetric in (True, False):
                scheme = TensorScheme(bits=bits, symmetric=symmetric, calibrator=name, percentile=99.0)
                statistics = new_statistics(scheme)
                for batch in DATA:
                    statistics.observe(batch)
                chosen = compute_range(statistics, scheme)
                if isinstance(statistics, calibrate.HistogramStatistics):
                    calibrate.compare(statistics, scheme)
                numerics.qparams_from_range(chosen.low, chosen.high, -128, 127)

    return run


def _numerics() -> None:
    x, w = DATA[0], torch.randint(-127, 128, (8, 300), dtype=torch.int8)
    codes, scale, _ = numerics.quantize_dynamic(x)
    numerics.quantize(x, scale, granularity="per_token")
    numerics.dequantize(codes, scale, granularity="per_token")
    numerics.fake_quantize(x, scale, None, "per_token")
    numerics.fake_quantize_lsq_backward(x, x, scale, None, "per_channel")
    for activation in ("relu", "clamp", "gelu", "gelu_tanh", "silu"):
        numerics.gemm(codes, w, torch.ones(8), scale, activation=activation)
    numerics.rms_norm_quantize(x, torch.ones(300))
    numerics.layer_norm_quantize(x, torch.ones(300), torch.ones(300))
    numerics.silu_mul_quantize(x)
    numerics.hadamard_quantize(x, 12)


def _cases() -> Iterator[tuple[str, Callable[[], None]]]:
    yield "first batch", _first_batch
    yield "numerics", _numerics
    for method in calibrate.methods():
        if method.name != "fixed":
            yield method.name, _method(method.name)


@pytest.mark.parametrize(("name", "run"), list(_cases()), ids=[name for name, _ in _cases()])
def test_no_tensor_is_divided_by_a_python_number(name: str, run: Callable[[], None]) -> None:
    with HostDivisions() as seen:
        run()
    assert not seen.found, "\n".join(sorted(seen.found))


def test_a_division_by_a_number_is_seen() -> None:
    with HostDivisions() as seen:
        torch.ones(3) / 4
        torch.ones(3) / torch.tensor(3.0)
        assert not seen.found
        torch.ones(3) / 3
        torch.ones(3).div_(0.1)
    assert len(seen.found) == 2


def test_the_divisor_has_the_type_and_place_of_what_it_divides() -> None:
    like = torch.ones(2, dtype=torch.float64)
    one = numerics.qparams.divisor(3, like)
    assert (one.dtype, one.shape, one.device) == (like.dtype, torch.Size([]), like.device)
