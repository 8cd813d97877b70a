"""What inductor makes of the ops: it may choose the strides of their operands, so it copies none of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

_ops = torch.ops.pyquant
FILTERS = torch.linspace(-1, 1, 8 * 4 * 3 * 3).reshape(8, 4, 3, 3)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Written(Exception):
    """Ends a compilation as soon as its code is written: compiling that would only take time."""


def kernels(function: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Calls of kernels that inductor writes itself, in the code that it makes of a function."""
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.graph import GraphLowering

    def seen(code: str) -> None:
        raise Written(code)

    torch._dynamo.reset()
    settings = torch._inductor.config.patch({"force_disable_caches": True, "cpp.simdlen": 1})  # probes no processor
    with torch.no_grad(), settings, pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphLowering, "save_output_code", staticmethod(seen))
        with pytest.raises(BackendCompilerFailed) as stopped:
            torch.compile(function, fullgraph=True)(x)
    assert isinstance(stopped.value.inner_exception, Written), stopped.value
    (code,) = stopped.value.inner_exception.args
    assert "torch.ops.pyquant." in code
    return len(re.findall(r"^ +cpp_fused\w*\(", code, flags=re.MULTILINE))


def from_convolution(x: Tensor) -> Tensor:
    """Inductor lays the result of a convolution out by channels, whatever eager PyTorch does."""
    return _ops.quantize_dynamic(F.conv2d(x, FILTERS))[0]  # type: ignore[no-any-return]


def from_transposed(x: Tensor) -> Tensor:
    return _ops.quantize_dynamic((x + 1).t())[0]  # type: ignore[no-any-return]


def from_slice(x: Tensor) -> Tensor:
    return _ops.quantize_dynamic(x[::2, 1:].t())[0]  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize(
    ("function", "x", "own"),
    [
        (from_convolution, torch.randn(2, 4, 8, 8), 1),  # the layout of the filters
        (from_transposed, torch.randn(8, 16), 1),  # x + 1
        (from_slice, torch.randn(8, 16), 0),
    ],
    ids=["convolution", "transposed", "slice"],
)
def test_no_operand_is_copied(function: Callable[[Tensor], Tensor], x: Tensor, own: int) -> None:
    assert kernels(function, x) == own


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
def test_the_tag_is_what_spares_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import lowering

    op = _ops.quantize_dynamic.default
    monkeypatch.setattr(op, "_tags", [torch.Tag.pt2_compliant_tag])
    for known in (lowering._maybe_layout_constraints, lowering.lowerings):  # what an earlier compilation read
        monkeypatch.delitem(known, op, raising=False)
    assert kernels(from_convolution, torch.randn(2, 4, 8, 8)) == 2
