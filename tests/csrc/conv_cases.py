"""Convolutions of the CPU engine against int64 sums: windows, planes, rounds, a scale and a zero point an image."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from csrc import cpu_engine as engine

# channels, out, kernel, stride, padding (top, bottom, left, right), dilation, image[, groups]
CASES: tuple[tuple[Any, ...], ...] = (
    (5, 100, (3, 2), (1, 1), (1, 0, 2, 1), (1, 1), (7, 9)),
    (4, 35, (2, 3), (2, 3), (0, 2, 1, 4), (2, 2), (8, 11)),
    (20, 99, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), (5, 10)),
    (68, 39, (1, 1), (2, 1), (0, 0, 0, 0), (1, 1), (5, 4)),
    (3, 36, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), (16, 17)),
    (64, 64, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), (24, 28)),  # enough for three threads to share its rows
    (3, 16, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), (21, 29)),  # few output channels: several pixels in a row of 64
    (1, 72, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1), (9, 12)),
    (24, 24, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), (8, 11)),
    (60, 20, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), (6, 7)),  # K is long
    (70, 70, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), (9, 61), 70),  # depthwise: a block and a tail, strips of a line
    (16, 16, (3, 3), (2, 1), (1, 0, 0, 2), (1, 2), (12, 40), 16),  # results side by side in rows of 64
    (32, 32, (5, 4), (1, 2), (2, 2, 3, 0), (2, 1), (14, 27), 32),
    (37, 74, (5, 5), (2, 2), (2, 2, 2, 2), (1, 1), (11, 9), 37),  # two results a channel
    (6, 24, (1, 3), (1, 1), (0, 0, 5, 4), (1, 1), (3, 7), 6),
    (64, 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), (8, 10), 16),  # four channels a group
    (48, 96, (3, 1), (2, 2), (1, 2, 0, 0), (1, 1), (9, 51), 6),  # eight: dwords of two groups in a vector
    (30, 70, (2, 3), (1, 1), (1, 0, 1, 1), (1, 2), (7, 9), 10),  # three: bytes that are no code
    (144, 150, (1, 2), (1, 1), (0, 0, 1, 0), (1, 1), (4, 6), 2),  # dwords of two groups far apart in a vector
    (128, 128, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), (6, 5), 4),  # all of a vector read one dword
    (96, 96, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), (40, 41), 96),  # enough for three threads
)
BATCH = 3


def check_library(library: ctypes.CDLL, seed: int) -> None:
    """Ready codes and floats, in both memory formats."""
    for number, case in enumerate(CASES):
        for name, got, want in _results(library, _problem(seed, number), *case):
            assert np.array_equal(got, want), f"{case}: {name}"


class Problem(NamedTuple):
    """Weights; codes with a scale and a zero point an image; the real numbers that these are; their sums."""

    w: engine.Array
    codes: engine.Array
    zero: engine.Array
    scale: engine.Array
    real: engine.Array
    want: engine.Array


@functools.cache
def _problem(seed: int, number: int) -> Problem:
    """Of every instruction set the same."""
    channels, out, kernel, stride, padding, dilation, image, groups = (*CASES[number], 1)[:8]
    rng = np.random.default_rng([seed, number])
    w = rng.integers(-127, 128, (out, kernel[0] * kernel[1] * channels // groups)).astype(np.int8)
    codes = rng.integers(-128, 128, (BATCH, channels, *image)).astype(np.int8)
    for b in range(BATCH):  # the floats then have the range of all codes, so that they become these
        codes[b, 0, 0, :2] = -128, 127
    zero = rng.integers(-60, 60, BATCH).astype(np.int32)
    scale = (0.5 ** np.arange(BATCH)).astype(np.float32)
    shifted = codes.astype(np.int64) - zero[:, None, None, None]
    real = (shifted * scale[:, None, None, None]).astype(np.float32)
    return Problem(w, codes, zero, scale, real, _sums(shifted, w, kernel, stride, padding, dilation, groups))


def _results(
    library: ctypes.CDLL,
    problem: Problem,
    channels: int,
    out: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    image: tuple[int, int],
    groups: int = 1,
) -> Iterator[tuple[str, engine.Array, engine.Array]]:
    w, codes, zero, scale, real, want = problem
    k = kernel[0] * kernel[1] * channels // groups
    spec = (ctypes.c_int64 * 16)(out, k, 8, 0, 0, -128, 127, 0, 0, 0, 0, 0, 0, -127, 127, 0)  # dynamic, affine
    packed = np.zeros(library.t_packed_bytes(spec), np.uint8)
    pointers = [engine.at(a) for a in (w, np.ones(out, np.float32), None, None, None, None, None, packed)]
    library.t_pack_linear(spec, *pointers)
    window = (ctypes.c_int64 * 11)(*kernel, *stride, *padding, *dilation, groups)
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
    groups: int,
) -> engine.Array:
    """int64 [B, out, H', W'] of real differences to the zero point, 0 outside of the image."""
    top, bottom, left, right = padding
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    height, width = ((padded.shape[2 + i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1))
    y = np.zeros((x.shape[0], w.shape[0], height, width), np.int64)
    per_group = x.shape[1] // groups
    taps = w.astype(np.int64).reshape(groups, -1, *kernel, per_group)
    for r in range(kernel[0]):
        for s in range(kernel[1]):
            rows = slice(r * dilation[0], r * dilation[0] + (height - 1) * stride[0] + 1, stride[0])
            columns = slice(s * dilation[1], s * dilation[1] + (width - 1) * stride[1] + 1, stride[1])
            seen = padded[:, :, rows, columns].reshape(x.shape[0], groups, per_group, height, width)
            y += np.einsum("bgchw,gnc->bgnhw", seen, taps[:, :, r, s]).reshape(y.shape)
    return y
