"""What an op writes has another version afterwards: backward through a graph that saved the old content raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pyquant import ops
from pyquant.ops.schema import SCHEMAS

SCALE = torch.tensor([0.5])
_raw = torch.ops.pyquant


def _buffers() -> dict[str, Tensor]:
    return {
        "y": torch.zeros(2, 8),
        "mask": torch.zeros(2, dtype=torch.uint8),
        "scale": torch.zeros(2),
        "zero_point": torch.zeros(2, dtype=torch.int32),
    }


# op -> (call it through `namespace` on x and the buffers, which buffers it writes)
CALLS: dict[str, tuple[Callable[[Any, Tensor, dict[str, Tensor]], None], tuple[str, ...]]] = {
    "fake_quantize_out": (
        lambda o, x, b: o.fake_quantize_out(x, SCALE, None, "per_tensor", 0, -7, 7, b["y"], b["mask"]),
        ("y", "mask"),
    ),
    "fake_quantize_dynamic_out": (
        lambda o, x, b: o.fake_quantize_dynamic_out(
            x, "per_channel", 0, True, -7, 7, b["y"], b["scale"], b["zero_point"]
        ),
        ("y", "scale", "zero_point"),
    ),
    "fake_quantize_backward_": (lambda o, x, b: o.fake_quantize_backward_(b["y"], b["mask"]), ("y",)),
}


def test_every_op_that_writes_is_here() -> None:
    assert {name for name, schema in SCHEMAS.items() if "!" in schema} == set(CALLS)


@pytest.mark.parametrize("namespace", [ops, _raw], ids=["pyquant.ops", "torch.ops.pyquant"])
@pytest.mark.parametrize("name", CALLS)
def test_versions_of_what_is_written_rise_and_no_others(name: str, namespace: Any) -> None:
    call, written = CALLS[name]
    x, buffers = torch.randn(2, 8), _buffers()
    before = {key: buffer._version for key, buffer in buffers.items()}
    call(namespace, x, buffers)
    assert {key for key, buffer in buffers.items() if buffer._version > before[key]} == set(written)
    assert (x._version, SCALE._version) == (0, 0)


@pytest.mark.parametrize("name", CALLS)
def test_backward_through_a_stale_buffer_raises(name: str) -> None:
    call, _ = CALLS[name]
    w, buffers = torch.randn(2, 8, requires_grad=True), _buffers()
    product = (w * buffers["y"]).sum()  # saves y
    call(ops, w.detach(), buffers)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    (w * buffers["y"]).sum().backward()  # the content as it is now
    assert w.grad is not None
    assert torch.equal(w.grad, buffers["y"])


@pytest.mark.parametrize("name", CALLS)
def test_inference_tensors_have_no_versions_and_are_written_all_the_same(name: str) -> None:
    call, _ = CALLS[name]
    x, wanted = torch.randn(2, 8), _buffers()
    call(ops, x, wanted)
    with torch.inference_mode():
        buffers = _buffers()
        call(ops, x, buffers)
    for got, want in zip(buffers.values(), wanted.values()):
        assert torch.equal(got, want)
    call(ops, x, buffers)
    for got, want in zip(buffers.values(), wanted.values()):
        assert torch.equal(got, want)
