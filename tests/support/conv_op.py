"""Convolutions whose op runs on a CUDA device, or the simulator, and on the CPU: `Conv(device, ...).check(x)`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import accept
import torch
from cuda_ops import CudaOps
from problems import BASE_SEED, Draw
from steps import draw_steps, products
from torch import Tensor

from pyquant import ops
from pyquant.core.patches import Patches

CPU = ops.layout_for(torch.device("cpu"))
LAST = torch.channels_last
FORMS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "affine": {"x_qmin": -128, "x_symmetric": False},
    "static": {"input": "static"},
    "static affine": {"input": "static", "x_qmin": -128, "x_symmetric": False},
}


def in_groups(groups: int, kernel: tuple[int, int] = (3, 3), **geometry: Any) -> Patches:
    return replace(Patches.make(kernel, **geometry), groups=groups)


class Conv:
    """A convolution's codes, packed for the CPU and for the device. more: of the spec."""

    def __init__(self, device: CudaOps, channels: int, n: int, patches: Patches, w_bits: int = 8, **more: Any) -> None:
        k = channels // patches.groups * patches.pixels
        draw = Draw(BASE_SEED, "conv", channels, n, k, w_bits)
        top = 7 if w_bits == 4 else 127
        self._device, self.patches = device, patches
        self.spec = ops.LinearSpec(n, k, w_bits=w_bits, has_bias=True, layout="rows", **more)
        codes = draw.codes(-top, top, n, k).to(torch.int8)
        groups = k // self.spec.group_size if self.spec.group_size else 1
        scale = (draw.uniform(n, groups) + 0.1) / (40 * max(k, 1) ** 0.5)
        scalars = [torch.tensor([0.03]), torch.tensor([9 if not self.spec.x_symmetric else 0], dtype=torch.int32)]
        inputs = scalars if self.spec.input == "static" else [None, None]
        outputs = [torch.tensor([0.02]), torch.tensor([-5], dtype=torch.int32)] if self.spec.codes_out else [None, None]
        rest = (draw.normal(n), *inputs, *outputs)
        self._cpu = replace(self.spec, layout=CPU)
        scale = scale if self.spec.group_size else scale[:, 0].contiguous()
        there = here = (ops.pack_int4(codes) if w_bits == 4 else codes, scale)
        if self.spec.two_level:  # a CPU multiplies by codes times steps
            codes, step = draw_steps(draw, n, k, self.spec.group_size)
            step[:, :1] = 1
            base = torch.exp2(draw.codes(-9, -4, n).float())
            there, here = (ops.pack_int4(codes), base[:, None] * step), (products(codes, step), base)
            self._cpu = replace(self._cpu, w_bits=8, group_size=0, two_level=False)
        self._here = ops.pack_linear(*here, self._cpu.to_ints(), *rest)
        self.packed = device.pack_linear(*there, self.spec.to_ints(), *rest)

    @property
    def window(self) -> tuple[int, ...]:
        return self.patches.to_ints()

    def want(self, x: Tensor, residual: Tensor | None = None, *more: Any) -> Tensor:
        return ops.qconv2d(x, self._here, residual, self._cpu.to_ints(), self.window, *more)

    def got(self, x: Tensor, residual: Tensor | None = None, *more: Any) -> Tensor:
        got: Tensor = self._device.qconv2d(x, self.packed, residual, self.spec.to_ints(), self.window, *more)
        return got

    def check(self, x: Tensor, residual: Tensor | None = None, *more: Any) -> None:
        want, got = self.want(x, residual, *more), self.got(x, residual, *more)
        test = accept.t1 if want.is_floating_point() else accept.t0
        test(got, want, what=f"{tuple(x.shape)} {self.patches} {self.spec}", waiver="few pixels")
        assert got.stride() == want.stride()

    def call_on(self, x: Tensor, *more: Any) -> Any:
        """The op alone, on operands that lie on the simulator's device."""
        packed, image = self._device.put(self.packed), self._device.put(x)
        spec, window = self.spec.to_ints(), self.window
        return lambda: torch.ops.pyquant_sim.qconv2d.default(image, packed, None, spec, window, *more)
