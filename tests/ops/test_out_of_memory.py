"""Memory that runs out has the name that code looks for: torch.OutOfMemoryError, with torch's own words in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant import ops
from pyquant.ops import translate

ROWS = 2**34  # views of one row: more results than any machine can hold, without the operands


def rows(k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(1, k).to(dtype).expand(ROWS, k)


CALLS: dict[str, Callable[[], object]] = {
    "quantize": lambda: ops.quantize(rows(4096), torch.ones(1)),
    "quantize_dynamic": lambda: ops.quantize_dynamic(rows(4096)),
    "gemm_s8s8": lambda: ops.gemm_s8s8(rows(16, torch.int8), torch.ones(4096, 16, dtype=torch.int8), torch.ones(4096)),
    "layer": lambda: pyquant.QLinear.from_float(nn.Linear(16, 4096), pyquant.W8A8Dynamic())(rows(16)),
    "layer of codes": lambda: pyquant.QLinear.from_float(nn.Linear(16, 4096), pyquant.W8A8(), input_scale=0.1)(
        pyquant.QTensor(rows(16, torch.int8), torch.tensor([0.1]))
    ),
}


@pytest.mark.skipif(not ops.native_available(), reason="without the compiled library torch itself allocates")
@pytest.mark.parametrize("name", CALLS)
def test_an_allocation_that_must_fail_keeps_its_name_and_text(name: str) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"bytes.*(?s:.*)allocate"):
        CALLS[name]()


def test_what_is_no_lack_of_memory_is_not_called_so() -> None:
    error = RuntimeError("pyquant: something else")
    with pytest.raises(RuntimeError) as caught:
        translate.reraise(error)
    assert caught.value is error


def test_an_allocation_that_fails_once_is_still_named() -> None:
    """The memory may be there again when torch is asked for its words."""
    with pytest.raises(torch.OutOfMemoryError, match="16 bytes on cpu"):
        translate.reraise(RuntimeError("pyquant: out of memory: 16 bytes on cpu"))


def test_a_device_that_failed_tells_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(translate.torch, "empty", broken)
    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        translate.reraise(RuntimeError("pyquant: out of memory: 16 bytes on cuda:0"))
    assert not isinstance(caught.value, torch.OutOfMemoryError)
