"""Convolutions on CUDA: the op against the CPU's, bit for bit. Beside it rows of the kernel table by themselves
(test_conv_rows.py), groups of channels (test_conv_groups.py), and what a call launches, allocates and moves
(test_conv_costs.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conv_op import FORMS, LAST, Conv
from cuda_ops import CudaOps
from gpu_device import shared_out
from problems import BASE_SEED, Draw

from pyquant.core.patches import Patches
from pyquant.errors import ArgumentError

WINDOWS = (
    (32, 72, Patches((3, 3), padding=(1, 1, 1, 1))),
    (16, 64, Patches((3, 2), (2, 1), (2, 0, 1, 3), (1, 2))),
    (64, 40, Patches((1, 1), (2, 2))),
    (48, 65, Patches((1, 1))),
    (20, 24, Patches((1, 1))),
    (3, 16, Patches((5, 5), (2, 2), (2, 2, 2, 2))),  # no whole pieces of channels: patches
    (24, 16, Patches((2, 2), padding=(1, 0, 0, 1))),
)


@pytest.mark.parametrize("form", FORMS)
def test_the_op_gives_the_bits_of_the_cpu(anywhere: CudaOps, form: str) -> None:
    for index, (channels, n, patches) in shared_out(anywhere, enumerate(WINDOWS), form):
        draw = Draw(BASE_SEED, "conv op", form, index)
        conv = Conv(anywhere, channels, n, patches, activation=("none", "relu", "silu")[index % 3], **FORMS[form])
        x = draw.normal(3, channels, 7, 11) * torch.tensor([1.0, 4.0, 0.2]).reshape(3, 1, 1, 1)
        x = x.to((torch.bfloat16, torch.float32, torch.float16)[index % 3])
        given = x.to(memory_format=LAST) if index % 2 else x
        conv.check(given)
        residual = draw.normal(*conv.want(given).shape)
        conv.check(given, residual.to(memory_format=LAST) if index % 3 else residual)


@pytest.mark.parametrize("size", [(1, 1), (8, 8), (5, 27), (16, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8], ids=str)
def test_images_of_every_type_size_and_memory_format(there: CudaOps, dtype: torch.dtype, size: tuple[int, int]) -> None:
    """Runs of pixels that are whole 16 bytes and that are not, tails of tiles, strided views."""
    for channels in (16, 20, 80):
        conv = Conv(there, channels, 32, Patches((2, 3), padding=(1, 1, 2, 1)), **FORMS["static affine"])
        draw = Draw(BASE_SEED, "conv sizes", channels, *size)
        x = draw.codes(-128, 127, 2, channels, *size).to(dtype) if dtype == torch.int8 else None
        x = (draw.normal(2, channels, *size) * 2).to(dtype) if x is None else x
        for given in (x, x.to(memory_format=LAST), torch.stack([x, x], -1)[..., 0], x[:, :, 1:], x[..., 1:]):
            if given.numel():
                conv.check(given)


@pytest.mark.parametrize("form", FORMS)
def test_codes_come_in_and_go_out(there: CudaOps, form: str) -> None:
    for channels, n, patches in WINDOWS:
        draw = Draw(BASE_SEED, "conv codes", form, channels)
        static = FORMS[form].get("input") == "static"
        conv = Conv(there, channels, n, patches, codes_out=static, **FORMS[form])
        x = draw.codes(-127, 127, 2, channels, 6, 9).to(torch.int8)
        more: list[Any] = [None]
        if not static:
            zero = None if form == "dynamic" else draw.codes(-128, 127, 2).to(torch.int32)
            more = [torch.bfloat16, torch.tensor([0.01, 0.5]), zero]
        for given in (x, x.to(memory_format=LAST)):
            conv.check(given, None, *more)


def test_four_bit_weights_and_groups_of_scales_go_by_patches(there: CudaOps) -> None:
    x = Draw(BASE_SEED, "conv groups").normal(2, 32, 5, 6)
    for more in ({"w_bits": 4}, {"w_bits": 4, "group_size": 32}, {"group_size": 96}):
        Conv(there, 32, 48, Patches((3, 3), padding=(1, 1, 1, 1)), **more).check(x)


def test_a_poisoned_image_poisons_itself_alone(there: CudaOps) -> None:
    for form in ("dynamic", "affine"):
        conv = Conv(there, 16, 24, Patches((3, 3), padding=(1, 1, 1, 1)), **FORMS[form])
        x = Draw(BASE_SEED, "conv poison").normal(3, 16, 6, 6)
        whole = conv.got(x)
        for value in (float("nan"), float("inf")):
            for given in (x.clone(), x.clone(memory_format=LAST)):
                given[1, 2, 3, 4] = value
                y = conv.got(given)
                assert y[1].isnan().all()
                assert torch.equal(y[::2], whole[::2])


def test_sizes_of_zero(there: CudaOps) -> None:
    for form in FORMS.values():
        conv = Conv(there, 16, 24, Patches((2, 2), padding=(1, 1, 1, 1)), **form)
        for shape in ((0, 16, 6, 6), (2, 16, 0, 3), (1, 16, 0, 0)):
            conv.check(torch.zeros(shape))
        for patches in (Patches((2, 2)), Patches((1, 1)), Patches((1, 1), padding=(1, 1, 1, 1))):
            Conv(there, 0, 5, patches, **form).check(torch.zeros(2, 0, 6, 6))


@pytest.mark.nightly
def test_more_images_than_a_launch_has_blocks(there: CudaOps) -> None:
    """65 535 is CUDA's limit of a grid's second dimension."""
    conv = Conv(there, 16, 8, Patches((1, 1), padding=(0, 0, 0, 1)))
    conv.check(torch.randn(65_600, 16, 1, 1))


# Layers as networks have them: pixels of a side, channels, output channels, kernel, stride.
REAL = ((56, 64, 64, 3, 1), (7, 512, 512, 3, 1), (14, 1024, 256, 1, 1), (28, 256, 512, 1, 2), (112, 3, 32, 3, 2))


@pytest.mark.parametrize("layer", REAL, ids=str)
def test_layers_of_real_size(there: CudaOps, layer: tuple[int, int, int, int, int]) -> None:
    size, channels, n, kernel, stride = layer
    patches = Patches.make(kernel, stride, kernel // 2)
    x = Draw(BASE_SEED, "real convolutions", *layer).normal(1, channels, size, size).to(torch.bfloat16)
    for form in ("static", "affine"):
        Conv(there, channels, n, patches, **FORMS[form]).check(x.to(memory_format=LAST))


def test_images_beyond_what_kernels_count_are_refused_by_name(there: CudaOps) -> None:
    """Padding makes the image large, a stride the result small: nothing is allocated before."""
    conv = Conv(there, 16, 8, Patches((1, 1), (9000, 9000), (9000, 9000, 9000, 9000)), **FORMS["static"])
    with pytest.raises(
        ArgumentError, match=r"'x': got images of 16 x 18004 x 18004 numbers with .*; allowed: less than"
    ):
        conv.got(torch.zeros(1, 16, 4, 4))
