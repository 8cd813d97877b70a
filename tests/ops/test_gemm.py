"""ops.gemm on the CPU: the product that the operands' types ask for, int4 codes two a byte, names that run on GPUs."""

from __future__ import annotations

import problems
import pytest
import torch

from pyquant import numerics, ops
from pyquant.errors import ArgumentError, UnsupportedError

DRAW = problems.Draw(problems.BASE_SEED, "gemm")
X, W = DRAW.codes(-8, 7, 5, 64).to(torch.int8), DRAW.codes(-8, 7, 9, 64).to(torch.int8)
CALL = {"w_scale": torch.rand(9) + 0.1, "x_scale": torch.rand(5) + 0.1, "bias": torch.randn(9)}
WANT = numerics.gemm(X, W, **CALL)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.int32])
def test_types_say_which_product_it_is(out_dtype: torch.dtype) -> None:
    call = {} if out_dtype == torch.int32 else CALL
    packed = ops.pack_int4(W)
    for x, w, same in (
        (X, W, ops.gemm_s8s8),
        (X, packed, ops.gemm_s8s4),
        (ops.pack_int4(X), packed, ops.gemm_s4s4),
        (X.view(torch.uint8), W, ops.gemm_s8s8),
        (X.view(torch.uint8), packed, ops.gemm_s8s4),
    ):
        assert torch.equal(ops.gemm(x, w, **call, out_dtype=out_dtype), same(x, w, **call, out_dtype=out_dtype))


def test_packed_codes_are_the_same_codes() -> None:
    packed = ops.pack_int4(W)
    assert torch.equal(ops.gemm_s4s4(ops.pack_int4(X), packed, **CALL), WANT)
    assert torch.equal(ops.gemm_s4s4(X, packed, **CALL), WANT)
    zero = torch.randint(-8, 8, (5,), dtype=torch.int32)
    want = numerics.gemm(X, W, **CALL, x_zero_point=zero)
    assert torch.equal(ops.gemm_s4s4(ops.pack_int4(X), packed, **CALL, x_zero_point=zero), want)
    strided = torch.zeros(5, 64, dtype=torch.uint8)[:, ::2].copy_(ops.pack_int4(X))
    assert torch.equal(ops.gemm_s4s4(strided, packed, **CALL), WANT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_floats_multiply_too(dtype: torch.dtype) -> None:
    x, w = X.to(dtype), W.to(dtype)
    got = ops.gemm(x, w, bias=CALL["bias"], activation="relu")
    assert got.dtype == torch.float32
    assert torch.equal(got, ((x.double() @ w.double().t()).float() + CALL["bias"]).relu())
    with pytest.raises(ArgumentError, match="w_scale"):
        ops.gemm(x, w, torch.ones(9))
    with pytest.raises(ArgumentError, match="out_dtype"):
        ops.gemm(x, w, out_dtype=torch.int8)


def test_a_kernel_by_name_needs_a_gpu_and_says_so() -> None:
    pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
    with pytest.raises(UnsupportedError, match=r"(?s)cpu.*gemm_sm80_s8s8_256x128x128: needs CUDA tensors.*8.0"):
        ops.gemm(X, W, **CALL, kernel="gemm_sm80_s8s8_256x128x128")
    with pytest.raises(ArgumentError, match="kernel"):
        ops.gemm(X, W, **CALL, kernel="gemm_of_no_such_name")
    with pytest.raises(ArgumentError, match="w_scale"):  # the arguments come first
        ops.gemm(X, W, kernel="gemm_sm80_s8s8_256x128x128")


def test_the_tiles_of_the_founding_experiment_are_rows() -> None:
    """Tile, stages and instruction of its three kernels; its 2 x 2 warps would need 256 accumulators of a thread."""
    pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
    tiles = {(k.x, k.tile): k for k in ops.kernels("^gemm_sm80_(s8s8|s4s4|f16)_")}
    for x, tile in (("s8", (256, 128, 128)), ("s4", (128, 256, 256)), ("f16", (256, 128, 64))):
        assert tiles[(x,), tile].stages == 3
        assert tiles[(x,), tile].schedule == "multistage"
