"""Convolutions of the CPU engine against int64 sums: windows, planes, rounds, a scale and a zero point an image."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np

from csrc import cpu_engine as engine

# channels, out, kernel, stride, padding (top, bottom, left, right), dilation, image
CASES = (
    (5, 70, (3, 2), (1, 1), (1, 0, 2, 1), (1, 1), (7, 9)),
    (4, 3, (2, 3), (2, 3), (0, 2, 1, 4), (2, 2), (8, 11)),
    (20, 65, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), (5, 10)),
    (68, 7, (1, 1), (2, 1), (0, 0, 0, 0), (1, 1), (5, 4)),
    (3, 4, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), (16, 17)),
    (64, 64, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), (24, 28)),  # enough for three threads to share its rows
)
BATCH = 3


def check_library(library: ctypes.CDLL, seed: int) -> None:
    """Ready codes and floats, in both memory formats."""
    for number, case in enumerate(CASES):
        rng = np.random.default_rng([seed, number])
        for name, got, want in _results(library, rng, *case):
            assert np.array_equal(got, want), f"{case}: {name}"


def _results(
    library: ctypes.CDLL,
    rng: np.random.Generator,
    channels: int,
    out: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    image: tuple[int, int],
) -> Iterator[tuple[str, engine.Array, engine.Array]]:
    k = kernel[0] * kernel[1] * channels
    spec = (ctypes.c_int64 * 16)(out, k, 8, 0, 0, -128, 127, 0, 0, 0, 0, 0, 0, -127, 127, 0)  # dynamic, affine
    w = rng.integers(-127, 128, (out, k)).astype(np.int8)
    packed = np.zeros(library.t_packed_bytes(spec), np.uint8)
    pointers = [engine.at(a) for a in (w, np.ones(out, np.float32), None, None, None, None, None, packed)]
    library.t_pack_linear(spec, *pointers)
    window = (ctypes.c_int64 * 11)(*kernel, *stride, *padding, *dilation, 1)
    codes = rng.integers(-128, 128, (BATCH, channels, *image)).astype(np.int8)
    for b in range(BATCH):  # the floats then have the range of all codes, so that they become these
        codes[b, 0, 0, :2] = -128, 127
    zero = rng.integers(-60, 60, BATCH).astype(np.int32)
    scale = (0.5 ** np.arange(BATCH)).astype(np.float32)
    real = ((codes.astype(np.int64) - zero[:, None, None, None]) * scale[:, None, None, None]).astype(np.float32)
    want = _sums(codes.astype(np.int64) - zero[:, None, None, None], w, kernel, stride, padding, dilation)
    for last in (False, True):
        for kind, x, given in ((engine.S8, codes, True), (engine.F32, real, False)):
            lying = np.ascontiguousarray(x.transpose(0, 2, 3, 1) if last else x)
            shape = want.transpose(0, 2, 3, 1).shape if last else want.shape
            y = np.full(shape, np.nan, np.float32)
            sizes = (ctypes.c_int64 * 7)(BATCH, channels, *image, last, kind, engine.F32)
            own = [engine.at(a if given else None) for a in (scale, zero)]
            library.t_conv(spec, engine.at(packed), window, sizes, engine.at(lying), *own, engine.at(y))
            what = f"{'codes' if given else 'floats'}, channels {'last' if last else 'first'}"
            y = y.transpose(0, 3, 1, 2) if last else y
            yield what, np.rint(y / scale[:, None, None, None]), want


def _sums(
    x: engine.Array,
    w: engine.Array,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
) -> engine.Array:
    """int64 [B, out, H', W'] of real differences to the zero point, 0 outside of the image."""
    top, bottom, left, right = padding
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    height, width = ((padded.shape[2 + i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1))
    y = np.zeros((x.shape[0], w.shape[0], height, width), np.int64)
    taps = w.astype(np.int64).reshape(w.shape[0], *kernel, x.shape[1])
    for r in range(kernel[0]):
        for s in range(kernel[1]):
            rows = slice(r * dilation[0], r * dilation[0] + (height - 1) * stride[0] + 1, stride[0])
            columns = slice(s * dilation[1], s * dilation[1] + (width - 1) * stride[1] + 1, stride[1])
            y += np.einsum("bchw,nc->bnhw", padded[:, :, rows, columns], taps[:, r, s])
    return y
