"""Native memory: a call gives back all that it took. RSS hides small leaks; the count of the allocator does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from heap import in_use
from qlayers import layer
from sample import sampled

import pyquant

CALLS = 250
ALLOWED = 4000  # bytes after all calls; the smallest block of the allocator has 24

X, W = torch.randn(8, 32), torch.ones(8, 32, dtype=torch.int8)
ONE, ROWS = torch.ones(1), torch.ones(8)
Y, MASK, LEAF = torch.empty(8, 32), torch.empty(32, dtype=torch.uint8), torch.randn(8, 32, requires_grad=True)
LINEAR = layer(pyquant.W8A8Dynamic(), 32, 24)
OPS = torch.ops.pyquant


def refused() -> None:
    with pytest.raises(pyquant.ArgumentError):
        LINEAR(X[:, :31])


CASES: dict[str, Callable[[], Any]] = {
    "quantize": lambda: OPS.quantize(X, ONE),
    "quantize_dynamic": lambda: OPS.quantize_dynamic(X, "per_group", 16),
    "add_rms_norm_quantize": lambda: OPS.add_rms_norm_quantize(X, X, X[0]),
    "hadamard_transform": lambda: OPS.hadamard_transform(X, 16),
    "hadamard_quantize": lambda: OPS.hadamard_quantize(X, 32),
    "silu_mul_quantize": lambda: OPS.silu_mul_quantize(X),
    "activation_mul_quantize": lambda: OPS.activation_mul_quantize(X, X),
    "fake_quantize": lambda: OPS.fake_quantize_backward(X, OPS.fake_quantize(X, ROWS, None, "per_channel")[1]),
    "fake_quantize_out": lambda: OPS.fake_quantize_out(X, ONE, None, "per_tensor", 0, -127, 127, Y, MASK),
    "fake_quantize_dynamic": lambda: OPS.fake_quantize_dynamic(X, "per_group", 16),
    "fake_quantize_lsq_backward": lambda: OPS.fake_quantize_lsq_backward(X, X, ROWS, None, "per_channel"),
    "dequantize": lambda: OPS.dequantize(W, ROWS, None, "per_token"),
    "gemm_s8s8": lambda: OPS.gemm_s8s8(W, W, ROWS, activation="relu"),
    "weight_only_linear": lambda: OPS.weight_only_linear(X, W, ROWS),
    "pack_int4": lambda: OPS.pack_int4(W),
    "forward": lambda: LINEAR(X),
    "state_dict": lambda: LINEAR.load_state_dict(LINEAR.state_dict()),
    "from_float": lambda: layer(pyquant.W4A8Dynamic(16), 16, 8),
    "refusal": refused,
    "fake_quantize and its gradient": lambda: torch.autograd.grad(pyquant.ops.fake_quantize(LEAF, ONE)[0], LEAF, X),
}


@pytest.mark.parametrize("name", sampled(list(CASES), len(CASES) // 2, "leaks"))
def test_a_call_gives_back_what_it_took(name: str) -> None:
    call = CASES[name]
    for _ in range(CALLS // 5):
        call()
    before = in_use()
    for _ in range(CALLS):
        call()
    assert in_use() - before <= ALLOWED
