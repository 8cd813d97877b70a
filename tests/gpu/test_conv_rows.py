"""Rows of the kernel table that read images through a window, against the executable specification, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import accept
import pytest
import torch
from gpu_device import SENTINEL, Memory, shared_out
from problems import BASE_SEED, Draw
from torch import Tensor

from pyquant.core.patches import Patches
from pyquant.numerics.gemm import accumulate
from pyquant.numerics.gemm import gemm as specification
from pyquant.ops.plan import image_rows

NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
SM = NATIVE.device_info(0)["sm"] if NATIVE.device_count() else 80  # without a device every test is skipped
ROWS = {
    row["name"]: row
    for row in NATIVE.kernel_table()
    if row["compiled"] and row["channel_multiple"] and row["sm_min"] <= SM < row["sm_end"]
}
DTYPES = {"s32": torch.int32, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "s8": torch.int8}


@dataclass
class Windowed:
    """Padded images of codes, the rows that a window reads of them, and weights for these."""

    images: Tensor  # int8 [batch, height, width, channels]
    patches: Patches
    weights: Tensor  # int8 [n, k]

    @staticmethod
    def draw(draw: Draw, n: int) -> Windowed:
        kernel = (draw.integer(1, 3), draw.integer(1, 4))
        patches = Patches(
            kernel,
            stride=(draw.choice((1, 1, 2)), draw.choice((1, 1, 3))),
            dilation=(draw.choice((1, 1, 2)), draw.choice((1, 1, 3))),
        )
        spans = [d * (size - 1) + 1 for d, size in zip(patches.dilation, kernel, strict=True)]
        height, width = (span + draw.integer(0, 8) for span in spans)
        channels = draw.choice((16, 16, 32, 48, 64, 80, 128))
        images = draw.codes(-128, 127, draw.integer(1, 3), height, width, channels).to(torch.int8)
        weights = draw.codes(-128, 127, n, patches.pixels * channels).to(torch.int8)
        return Windowed(images, patches, weights)

    @property
    def rows(self) -> Tensor:
        return self.patches.gather(self.images)

    @property
    def problem(self) -> dict[str, Any]:
        (m, k), n = self.rows.shape, len(self.weights)
        image = image_rows(self.patches, *self.images.shape[1:])
        sizes = {"m": m, "n": n, "k": k, "ldw": k, "ldx": self.images.shape[3], "ldo": -(-n // 16) * 16}
        return sizes | {"x": "s8", "w": "s8", "image": image}

    def launch(
        self, native: Any, device: Memory, name: str, out: str, memory: dict[str, Tensor], **more: object
    ) -> Tensor:
        problem = self.problem | {"out": out} | more
        m, n, pitch = problem["m"], problem["n"], problem["ldo"] * DTYPES[out].itemsize
        operands = {key: device.put(value) for key, value in memory.items()}
        operands |= {"x": device.put(self.images), "w": device.put(self.weights)}
        operands["out"] = device.put(torch.full((m * pitch,), SENTINEL, dtype=torch.uint8))
        needed = native.workspace_bytes(name, problem)
        operands["workspace"] = device.put(torch.full((needed,), SENTINEL, dtype=torch.uint8)) if needed else 0
        native.gemm(name, problem, operands, {})
        got = device.get(operands["out"], m * pitch).reshape(m, pitch).view(DTYPES[out])
        device.free()
        return got[:, :n].contiguous()


@pytest.mark.parametrize("name", ROWS)
def test_sums_under_random_windows_are_exact(native: Any, device: Memory, name: str) -> None:
    for index in shared_out(device, range(8), name):
        draw = Draw(BASE_SEED, "windows", name, index)
        case = Windowed.draw(draw, draw.choice((8, 64, 72, 130)))
        got = case.launch(native, device, name, "s32", {})
        want = accumulate(case.rows, case.weights)
        accept.t0(got, want, what=f"{name} {index}", waiver="one pixel, or one channel, may be all")


@pytest.mark.parametrize("out", ["f32", "bf16", "s8"])
@pytest.mark.parametrize("name", ROWS)
def test_epilogues_over_images(native: Any, device: Memory, name: str, out: str) -> None:
    """A scale and a zero point a row, as images have them."""
    for index in shared_out(device, range(3), name, out):
        draw = Draw(BASE_SEED, "windows epilogue", name, out, index)
        case = Windowed.draw(draw, draw.choice((64, 96)))
        m, n = len(case.rows), len(case.weights)
        memory = {
            "x_scale": torch.exp2(draw.normal(m)),
            "x_zero_point": draw.codes(-128, 127, m).to(torch.int32),
            "w_scale": torch.exp2(draw.normal(n)) / 9e4,
            "bias": draw.normal(n),
        }
        call = memory | {"out_dtype": DTYPES[out]}
        if out == "s8":
            memory["out_scale"] = call["out_scale"] = torch.full((1,), 0.02)
        memory["w_sum"] = case.weights.sum(-1, dtype=torch.int32)
        flags = {"per_token_scale": True, "per_token_zero_point": True, "has_zero_point": True}
        got = case.launch(native, device, name, out, memory, **flags)
        want = specification(case.rows, case.weights, **call)  # type: ignore[arg-type]
        (accept.t0 if out == "s8" else accept.t1)(got, want, what=name, waiver="few pixels")


@pytest.mark.parametrize("name", ROWS)
def test_a_wrong_window_is_seen(native: Any, plain_device: Memory, name: str) -> None:
    """Each field of the window in turn, off by one in the reference."""
    draw = Draw(BASE_SEED, "wrong windows", name)
    patches = Patches((3, 2), stride=(2, 1), dilation=(1, 2))
    images = draw.codes(-128, 127, 2, 9, 9, 32).to(torch.int8)
    weights = draw.codes(-128, 127, 64, 6 * 32).to(torch.int8)
    got = Windowed(images, patches, weights).launch(native, plain_device, name, "s32", {})
    assert torch.equal(got, accumulate(patches.gather(images), weights))
    turned = weights.reshape(64, 3, 2, 32)
    wrong = {
        "taps by columns": (images, turned.transpose(1, 2).reshape(64, -1)),
        "channels before taps": (images, turned.permute(0, 3, 1, 2).reshape(64, -1)),
        "lines of one pixel more": (images.roll(1, 2), weights),
        "one line lower": (images.roll(1, 1), weights),
        "the other image": (images.roll(1, 0), weights),
        "a piece of channels later": (images.roll(16, 3), weights),
    }
    for what, (other, w) in wrong.items():
        assert not torch.equal(got, accumulate(patches.gather(other.contiguous()), w.contiguous())), what
