"""The physical floor: which bytes count, what binds, and that ceilings are measured for every type that torch has."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import pytest
import torch

from pyquant.errors import ArgumentError
from pyquant.measure import floors
from pyquant.measure.floors import (
    READ,
    ceiling_value,
    gemm_bytes,
    gemm_floor,
    measure_ceilings,
    random_codes,
)
from pyquant.measure.timing import make_clock


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


def test_ceilings_are_measured_and_positive() -> None:
    ceilings = measure_ceilings("cpu", size=64, rounds=1)
    assert {c.name for c in ceilings} >= {READ, "fp32", "int8"}
    assert all(c.value > 0 for c in ceilings)
    assert ceiling_value(ceilings, "no such") is None


def test_the_quickest_way_is_the_ceiling_of_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poor ruler gives shares above the limit: torch's int8 product is slower than ours on some chips."""

    def ways(seconds: float) -> Callable[..., Callable[[], object]]:
        return lambda size, device: lambda: time.sleep(seconds)

    def missing(size: int, device: torch.device) -> Callable[[], object]:
        raise NotImplementedError

    makers = {"int8": (ways(0.02), ways(0.002), missing), "fp8": (missing,), "bf16": (ways(0.01),)}
    monkeypatch.setattr(floors, "_matmuls", lambda device: makers)
    found = floors._measured({}, torch.device("cpu"), 100, make_clock("wall"), 1)
    assert [c.name for c in found] == ["int8", "bf16"]
    int8, bf16 = (c.value for c in found)
    assert 2 * bf16 < int8 <= 2.0 * 100**3 / 0.002 * 1e-9


def test_a_type_that_a_cpu_multiplies_one_by_one_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a small product of its own: bf16 of 2048 takes a processor without it minutes a call."""
    sizes: list[int] = []

    def emulated(size: int, device: torch.device) -> Callable[[], object]:
        sizes.append(size)
        return lambda: time.sleep(0.01)

    makers = {"fp32": (lambda size, device: lambda: None,), "bf16": (emulated,)}
    monkeypatch.setattr(floors, "_matmuls", lambda device: makers)
    found = floors._measured({}, torch.device("cpu"), 2048, make_clock("wall"), 1)
    assert [c.name for c in found] == ["fp32"]
    assert sizes == [256]


def test_our_own_product_is_a_way_to_multiply_int8() -> None:
    torch.manual_seed(0)
    run = floors._matmuls(torch.device("cuda"))["int8"][1](48, torch.device("cpu"))
    assert run().shape == (48, 48)
    assert run().dtype == torch.bfloat16


def test_random_codes_fill_the_range() -> None:
    torch.manual_seed(0)
    codes = random_codes((512, 512))
    assert codes.dtype == torch.int8
    assert int(codes.max()) == 127
    assert int(codes.min()) == -127  # -128 would not be a symmetric code
    assert len(codes.unique()) > 200


def test_the_stream_reads_every_element_and_refuses_what_it_cannot_read() -> None:
    for count in (0, 1, 4095, 4096, 4097, 100_003):
        x = torch.zeros(count)
        for i in {0, count // 2, count - 1} if count else ():
            x[i] = -3.5
            assert torch.ops.pyquant._cpu_read(x) == 3.5, (count, i)
            x[i] = 0
        assert torch.ops.pyquant._cpu_read(x) == 0
    with pytest.raises(RuntimeError, match="x"):
        torch.ops.pyquant._cpu_read(torch.zeros(4, 4).t())


def test_the_inner_loop_counts_its_products_and_refuses_other_sizes() -> None:
    threads = torch.get_num_threads()
    assert torch.ops.pyquant._cpu_multiply(6, 10, 3) == threads * 3 * 6 * 40 * 64
    for argument, wrong in (("rows", (49, 1, 1)), ("quads", (1, 0, 1)), ("calls", (1, 1, -1))):
        with pytest.raises(RuntimeError, match=argument):
            torch.ops.pyquant._cpu_multiply(*wrong)


@pytest.mark.parametrize("count", [1, 1000, 3 << 20])
def test_what_a_limit_reads_lies_on_pages_like_packed_weights(count: int) -> None:
    """From small pages, and read once where layers are called again, memory was slower than for the layers themselves:
    W8A8 reached 1.6 of its limit."""
    source = floors._on_huge_pages(count)
    assert source.shape == (count,)
    assert source.dtype == torch.float32
    if hasattr(mmap, "MADV_HUGEPAGE"):
        assert source.data_ptr() % (2 << 20) == 0
    assert floors.read_limit(4 * count).run() == 1.0
