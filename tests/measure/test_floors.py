"""The physical floor: which bytes count, what binds, and that ceilings are measured for every type that torch has."""

from __future__ import annotations

import pytest
import torch

from pyquant.errors import ArgumentError
from pyquant.measure.floors import (
    COPY,
    COPY_SETS,
    ceiling_value,
    copy_gbps,
    gemm_bytes,
    gemm_floor,
    measure_ceilings,
    random_codes,
)
from pyquant.measure.records import Ceiling


def test_bytes_of_a_known_problem() -> None:
    assert gemm_bytes(2, 4, 8, w_bits=8, x_bits=32, out_bits=32) == 8 * 4 + 8 * 4 + 2 * 4 * 4 + 2 * 8 * 4
    assert gemm_bytes(0, 256, 8, w_bits=4, x_bits=16, out_bits=16, group_size=128) == 8 * 128 + 8 * 2 * 4


def test_what_binds() -> None:
    few_rows = gemm_floor(1, 4096, 4096, moved_bytes=4096 * 4096, gbps=10.0, gops=1000.0)
    assert few_rows.kind == "bytes"
    assert few_rows.us == pytest.approx(4096 * 4096 / 10e9 * 1e6)
    many_rows = gemm_floor(4096, 4096, 4096, moved_bytes=3 * 4096 * 4096, gbps=10.0, gops=1000.0)
    assert many_rows.kind == "ops"
    assert many_rows.us == pytest.approx(2 * 4096**3 / 1000e9 * 1e6)


@pytest.mark.parametrize(("gbps", "gops"), [(0.0, 1.0), (1.0, -1.0)])
def test_impossible_limits_are_refused(gbps: float, gops: float) -> None:
    with pytest.raises(ArgumentError, match="gbps"):
        gemm_floor(1, 1, 1, moved_bytes=1, gbps=gbps, gops=gops)


def test_bandwidth_of_the_working_set() -> None:
    ceilings = [Ceiling(COPY, 10.0, "GB/s"), *[Ceiling(name, 100.0 - i, "GB/s") for i, name in enumerate(COPY_SETS)]]
    assert copy_gbps(ceilings, 1, cached=True) == 100.0
    assert copy_gbps(ceilings, 300 << 10, cached=True) == 99.0
    assert copy_gbps(ceilings, 1 << 40, cached=True) == 10.0
    assert copy_gbps(ceilings, 1, cached=False) == 10.0
    assert copy_gbps([], 1, cached=True) is None


def test_ceilings_are_measured_and_positive() -> None:
    ceilings = measure_ceilings("cpu", size=64, rounds=1)
    assert {c.name for c in ceilings} >= {COPY, *COPY_SETS, "fp32", "int8"}
    assert all(c.value > 0 for c in ceilings)
    assert ceiling_value(ceilings, "no such") is None


def test_random_codes_fill_the_range() -> None:
    torch.manual_seed(0)
    codes = random_codes((512, 512))
    assert codes.dtype == torch.int8
    assert int(codes.max()) == 127
    assert int(codes.min()) == -127  # -128 would not be a symmetric code
    assert len(codes.unique()) > 200
