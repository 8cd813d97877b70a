"""Digests of everything that the pool cuts into shares, on work above every grain of csrc/cpu: what test_processes.py
runs in fresh processes. Arguments: the number of threads, or `default`; prints one line a result."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pyquant
from pyquant import ops

# Shares of the packer are worth 2^20 codes: with 2080 x 4100 seven threads get seven, of unequal numbers of blocks.
N, K = 2080, 4100
ROWS, COLS = 1030, 1040  # a little over 2^20 elements, and no multiple of anything


def digest(*tensors: Tensor) -> str:
    found = hashlib.sha256()
    for t in tensors:
        found.update(f"{t.dtype}{tuple(t.shape)}".encode())
        found.update(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def first_thing() -> Iterator[tuple[str, Tensor]]:
    """What a user does first, before anything else has run on the pool."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 1024))
    x = torch.randn(2, 1024)
    pyquant.quantize_(model, pyquant.W8A8Dynamic())
    y = model(x)
    yield "quantize_", y
    assert torch.equal(y, model[1].reference(model[0].reference(x)))


def packed(generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Buffers of all schemes, twice into memory that held other bytes: what nobody writes differs."""
    for bits, group in ((8, 0), (8, 100), (4, 0), (4, 100)):
        codes = torch.randint(-8, 8, (N, K), generator=generator, dtype=torch.int8)
        scale = torch.rand(*((N, K // group) if group else (N,)), generator=generator) + 0.1
        bias = torch.randn(N, generator=generator)
        layout = ops.layout_for(torch.device("cpu"))
        spec = ops.LinearSpec(N, K, bits, group, has_bias=True, layout=layout).to_ints()
        source = ops.pack_int4(codes) if bits == 4 else codes
        for fill in (0x5A, 0xA5):
            del_me = [torch.full((N * K,), fill, dtype=torch.uint8) for _ in range(2)]
            del del_me
            buffer = ops.pack_linear(source, scale, spec, bias=bias)
            yield f"pack_linear s{bits} group {group} over {fill}", buffer
        yield f"unpack_linear s{bits} group {group}", ops.unpack_linear(buffer, spec)
        assert torch.equal(ops.unpack_linear(buffer, spec), source)
        for m in (1, 8, 70):
            yield (
                f"qlinear s{bits} group {group} M {m}",
                ops.qlinear(torch.randn(m, K, generator=generator), buffer, spec=spec),
            )


def grouped(generator: torch.Generator) -> Iterator[tuple[str, Any]]:
    """Layers of a bank in one call: more blocks than threads, and layers that share a thread."""
    counts = [0, 40, 1, 0, 7, 130, 2, 0, 0, 65]
    ends, n, k = torch.tensor(counts).cumsum(0).to(torch.int32), 384, 512
    x = torch.randn(sum(counts), k, generator=generator)
    draw: dict[str, Any] = {"generator": generator}
    codes = [torch.randint(-7, 8, (n, k), dtype=torch.int8, **draw) for _ in counts]
    scale = [torch.rand(n, k // 128, **draw) + 0.1 for _ in counts]
    spec = ops.LinearSpec(n, k, 4, 128, layout=ops.layout_for(torch.device("cpu"))).to_ints()
    packed = [ops.pack_linear(ops.pack_int4(c), s, spec) for c, s in zip(codes, scale, strict=True)]
    yield "_grouped_linear", torch.ops.pyquant._grouped_linear(x, packed, ends, spec)
    how = (128, "none", 0.0, 0.0)
    weights = [ops.pack_int4(c) for c in codes]
    yield "_grouped_weight_only s4", torch.ops.pyquant._grouped_weight_only(x, weights, scale, [], [], ends, 4, *how)
    yield "_grouped_weight_only s8", torch.ops.pyquant._grouped_weight_only(x, codes, scale, [], [], ends, 8, *how)


def quantised(generator: torch.Generator) -> Iterator[tuple[str, Any]]:
    x = torch.randn(ROWS, COLS, generator=generator)
    for granularity, group in (("per_tensor", 0), ("per_token", 0), ("per_group", 26)):
        q, scale, zero = ops.quantize_dynamic(x, granularity, group, False, -128, 127)
        yield f"quantize_dynamic {granularity}", (q, scale, zero)
        yield f"quantize {granularity}", ops.quantize(x, scale, zero, granularity, group, -128, 127)
        yield f"dequantize {granularity}", ops.dequantize(q, scale, zero, granularity, group)
    for granularity, group in (("per_tensor", 0), ("per_channel", 0), ("per_group", 26)):
        y, scale, zero = ops.fake_quantize_dynamic(x, granularity, group, False, -128, 127)
        yield f"fake_quantize_dynamic {granularity}", (y, scale, zero)
        y, mask = ops.fake_quantize(x * 2, scale, zero, granularity, group, -128, 127)
        yield f"fake_quantize {granularity}", (y, mask)
        yield f"fake_quantize_backward {granularity}", ops.fake_quantize_backward(x, mask)
        yield (
            f"fake_quantize_lsq_backward {granularity}",
            ops.fake_quantize_lsq_backward(x, x * 2, scale, zero, granularity, group, -128, 127),
        )
    yield "magnitude_histogram", ops.magnitude_histogram(x, 3)
    ratios = torch.exp2(-torch.arange(40, dtype=torch.float64) / 16)
    groups = x[:, : COLS // 26 * 26].reshape(-1, 26).float().contiguous()
    yield "_least_squares_steps", torch.ops.pyquant._least_squares_steps(groups, -7, 7, ratios)
    yield "rms_norm_quantize", ops.rms_norm_quantize(x)
    yield "layer_norm_quantize", ops.layer_norm_quantize(x)
    yield "silu_mul_quantize", ops.silu_mul_quantize(x)
    yield "activation_mul_quantize", ops.activation_mul_quantize(x, x.flip(0), "gelu_tanh")
    yield "hadamard_quantize", ops.hadamard_quantize(x, x.shape[-1] & -x.shape[-1])
    yield "hadamard_transform", ops.hadamard_transform(x, x.shape[-1] & -x.shape[-1])
    q4 = torch.randint(-8, 8, (ROWS, COLS), generator=generator, dtype=torch.int8)
    yield "pack_int4", ops.pack_int4(q4)
    yield "unpack_int4", ops.unpack_int4(ops.pack_int4(q4), COLS)
    # a product of floats has no bits of its own: what is compared is the epilogue's share, so its product is exact
    whole = torch.randint(-3, 4, (ROWS, 8), generator=generator).float()
    w = torch.randint(-3, 4, (COLS, 8), generator=generator).float()
    yield "float_linear", ops.float_linear(whole, w, activation="gelu")


def calibrated() -> Iterator[tuple[str, Any]]:
    for method in ("max", "percentile", "entropy", "mse"):
        generator = torch.Generator().manual_seed(5)
        torch.manual_seed(6)
        model = nn.Sequential(nn.Linear(512, 4160), nn.Linear(4160, 64))
        quantizer = pyquant.SelectiveQuantizer(default_quant_modules_calibrator_inputs=method)
        quantizer.quantize_module(model)
        batches = [torch.randn(256, 512, generator=generator) for _ in range(2)]
        pyquant.QuantizationCalibrator().calibrate_model(model, batches, method=method, num_calib_batches=2)
        # sums of float products differ from one number of threads to the next, so ranges are of the first layer
        pyquant.convert_(model)
        state = model[0].state_dict()
        yield f"calibrated by {method}", tuple(v for _, v in sorted(state.items()) if isinstance(v, Tensor))


def loaded() -> Iterator[tuple[str, Any]]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(K, N))
    pyquant.quantize_(model, pyquant.W4A8Dynamic(group_size=100))
    x = torch.randn(3, K)
    want = model(x)
    with tempfile.TemporaryDirectory() as folder:
        pyquant.save_pretrained(model, Path(folder) / "m")
        again = pyquant.load_pretrained(Path(folder) / "m", lambda: nn.Sequential(nn.Linear(K, N)))
    assert torch.equal(again(x), want)
    other = nn.Sequential(nn.Linear(K, N))
    pyquant.quantize_(other, pyquant.W4A8Dynamic(group_size=100))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), want)
    yield "loaded", tuple(v for _, v in sorted(again.state_dict().items()) if isinstance(v, Tensor))


def main(threads: str) -> None:
    torch.manual_seed(1)
    if threads != "default":
        torch.set_num_threads(int(threads))
    generator = torch.Generator().manual_seed(11)
    for part in (first_thing(), packed(generator), grouped(generator), quantised(generator), calibrated(), loaded()):
        for name, result in part:
            print(digest(*(result if isinstance(result, tuple) else (result,))), name)


if __name__ == "__main__":
    main(sys.argv[1])
