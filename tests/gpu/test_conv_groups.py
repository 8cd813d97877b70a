"""Convolutions in groups on CUDA, depthwise ones too: the op against the CPU's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conv_op import FORMS, LAST, Conv, in_groups
from cuda_ops import CudaOps
from gpu_device import shared_out
from problems import BASE_SEED, Draw

from pyquant import ops
from pyquant.errors import ArgumentError

GROUPED = (
    (64, 64, in_groups(64, padding=1)),  # depthwise: four outputs of a line share what they read
    (72, 72, in_groups(72, (5, 4), stride=2, padding=2, dilation=(1, 2))),  # ... neighbours, two windows apart
    (8, 8, in_groups(8, (9, 3), padding=4, dilation=(1, 3))),  # ... every third one
    (24, 24, in_groups(24, (1, 7), stride=(1, 4), padding=(0, 24), dilation=(2, 6))),  # ... every third, two apart
    (136, 136, in_groups(136, 2)),
    (16, 16, in_groups(16, (2, 65), padding=(0, 30))),  # wider than a block holds weights for
    (8, 8, in_groups(8, (1, 1), stride=(2, 1), dilation=(2**30, 2**30))),  # one tap, however far the next would be
    (20, 20, in_groups(20, padding=(0, 2))),  # not whole eights of channels
    (16, 48, in_groups(16, (1, 3))),  # several results a channel
    (32, 64, in_groups(4, padding=1)),  # a word of a group's channels at once
    (80, 24, in_groups(2, (1, 1), stride=(1, 2))),
    (6, 9, in_groups(3, (2, 2), padding=1)),
    (132, 132, in_groups(33)),
)


@pytest.mark.parametrize("form", FORMS)
def test_groups_give_the_bits_of_the_cpu(anywhere: CudaOps, form: str) -> None:
    for index, (channels, n, patches) in shared_out(anywhere, enumerate(GROUPED), form):
        draw = Draw(BASE_SEED, "conv in groups", form, index)
        conv = Conv(anywhere, channels, n, patches, activation=("none", "relu", "silu")[index % 3], **FORMS[form])
        x = draw.normal(3, channels, 6, 11 + index % 4) * torch.tensor([1.0, 4.0, 0.2]).reshape(3, 1, 1, 1)
        x = x.to((torch.bfloat16, torch.float32, torch.float16)[index % 3])
        for given in (x, x.to(memory_format=LAST)):
            residual = draw.normal(*conv.want(given).shape)
            conv.check(given, None if index % 2 else residual)


def test_codes_of_groups_come_in_and_go_out(there: CudaOps) -> None:
    for channels, n, patches in GROUPED:
        draw = Draw(BASE_SEED, "conv codes in groups", channels)
        codes = draw.codes(-128, 127, 2, channels, 6, 9).to(torch.int8)
        static = Conv(there, channels, n, patches, codes_out=True, **FORMS["static affine"])
        dynamic = Conv(there, channels, n, patches, **FORMS["affine"])
        given = [torch.float32, torch.tensor([0.01, 0.5]), draw.codes(-128, 127, 2).to(torch.int32)]
        for x in (codes, codes.to(memory_format=LAST)):
            static.check(x)
            dynamic.check(x, None, *given)


@pytest.mark.parametrize(
    "more",
    [
        {"w_bits": 4},
        {"w_bits": 4, "group_size": 24},
        {"group_size": 6},
        {"group_size": 36, "x_qmin": -128, "x_symmetric": False},
        {"w_bits": 4, "group_size": 36, "two_level": True},
    ],
    ids=str,
)
def test_weights_of_every_kind_in_groups(anywhere: CudaOps, more: dict[str, Any]) -> None:
    x = Draw(BASE_SEED, "weights in groups").normal(2, 32, 5, 6)
    for n in (32, 12):
        Conv(anywhere, 32, n, in_groups(4, padding=1), **more).check(x)


def test_sums_of_groups_are_the_integers_themselves(there: CudaOps) -> None:
    """Codes at the ends of their range over more codes of K than a tile has."""
    channels, groups = 96, 2
    patches = in_groups(groups)
    conv = Conv(there, channels, 16, patches, codes_out=True, **FORMS["static"])
    for value in (-128, 127):
        conv.check(torch.full((1, channels, 4, 4), value, dtype=torch.int8))


def test_blocked_weights_are_not_for_groups(there: CudaOps) -> None:
    spec = ops.LinearSpec(128, 128, w_bits=4, layout="rows_blocked128")
    packed = there.pack_linear(torch.zeros(128, 64, dtype=torch.uint8), torch.ones(128), spec.to_ints())
    window = in_groups(2, (1, 1)).to_ints()
    with pytest.raises(ArgumentError, match=r"rows_blocked128' and 2 groups; allowed: layout 'rows'"):
        there.qconv2d(torch.zeros(1, 256, 3, 3), packed, None, spec.to_ints(), window)


@pytest.mark.parametrize(("size", "channels", "groups"), [(7, 960, 960), (14, 512, 32), (56, 72, 72)], ids=str)
def test_layers_of_real_size_in_groups(there: CudaOps, size: int, channels: int, groups: int) -> None:
    """MobileNetV3 and ResNeXt-50."""
    x = Draw(BASE_SEED, "real groups", size, channels).normal(1, channels, size, size).to(torch.bfloat16)
    for form, kernel in (("dynamic", 3), ("static affine", 5)):
        patches = in_groups(groups, (kernel, kernel), padding=kernel // 2)
        Conv(there, channels, channels, patches, **FORMS[form]).check(x.to(memory_format=LAST))


@pytest.mark.parametrize("size", [1, 2], ids=["negative in 64 bits", "zero in 64 bits"])
def test_padding_whose_images_no_64_bits_count_is_refused(there: CudaOps, size: int) -> None:
    """(2^32 - 2 + size)^2 codes of an image with its padding."""
    far = 2**31 - 1
    patches = in_groups(1, (1, 1), stride=far, padding=far)
    spec = ops.LinearSpec(1, 1, has_bias=False, layout="rows")
    packed = there.pack_linear(torch.ones(1, 1, dtype=torch.int8), torch.ones(1), spec.to_ints())
    with pytest.raises(ArgumentError, match=r"'x'.* numbers with their padding"):
        there.qconv2d(torch.ones(1, 1, size, size), packed, None, spec.to_ints(), patches.to_ints())


def test_more_channels_than_a_launch_has_blocks_for_are_refused(there: CudaOps) -> None:
    n = 64 * 65535 + 2
    spec = ops.LinearSpec(n, 1, has_bias=False, layout="rows")
    packed = there.pack_linear(torch.ones(n, 1, dtype=torch.int8), torch.ones(n), spec.to_ints())
    with pytest.raises(RuntimeError, match=r"grouped_conv: operands of 1 x 65536 blocks; allowed: 2147483647 x 65535"):
        there.qconv2d(torch.ones(1, 2, 1, 1), packed, None, spec.to_ints(), in_groups(2, (1, 1)).to_ints())
