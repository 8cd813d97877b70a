"""int4 packing: every byte pair, every K, every layout (docs/numerics.md 2.4)."""

from __future__ import annotations

import accept
import laws
import problems
import pytest
import torch

from pyquant import numerics


def test_all_byte_pairs_round_trip():
    pairs = torch.arange(2**16)
    packed = torch.stack((pairs % 256, pairs // 256), -1).to(torch.uint8)
    q = numerics.unpack_int4(packed, 4)
    expected = torch.stack([(pairs >> shift) % 16 for shift in (0, 4, 8, 12)], -1)
    accept.t0(q, torch.where(expected > 7, expected - 16, expected).to(torch.int8))
    accept.t0(numerics.pack_int4(q), packed)


def test_all_nibble_quadruples_round_trip():
    codes = torch.arange(2**16)
    q = torch.stack([(codes >> shift) % 16 - 8 for shift in (0, 4, 8, 12)], -1).to(torch.int8)
    accept.t0(numerics.unpack_int4(numerics.pack_int4(q), 4), q)


def test_low_nibble_is_even_k_and_the_tail_is_zero():
    assert numerics.pack_int4(torch.tensor([1, -1, 7], dtype=torch.int8)).tolist() == [0xF1, 0x07]
    assert numerics.pack_int4(torch.tensor([-8], dtype=torch.int8)).tolist() == [0x08]


def test_only_four_bits_are_kept():
    assert numerics.pack_int4(torch.tensor([-128, 127], dtype=torch.int8)).tolist() == [0xF0]


def test_law_over_shapes():
    for seed in range(problems.BASE_SEED, problems.BASE_SEED + 300):
        laws.pack(numerics, seed)


@pytest.mark.parametrize("layout", problems.layouts(for_codes=True), ids=lambda x: x.name)
def test_layout_does_not_matter(layout):
    q = problems.Draw(1, "pack layout").codes(-8, 7, 6, 11).to(torch.int8)
    laid = layout.build(q)
    plain = laid.as_subclass(torch.Tensor).clone(memory_format=torch.contiguous_format)
    packed = numerics.pack_int4(laid).as_subclass(torch.Tensor)
    accept.t0(packed, numerics.pack_int4(plain), waiver="layouts")
    bytes_ = layout.build(problems.Draw(2, "unpack layout").codes(0, 255, 6, 4).to(torch.uint8))
    plain = bytes_.as_subclass(torch.Tensor).clone(memory_format=torch.contiguous_format)
    k = 2 * bytes_.shape[-1]
    got = numerics.unpack_int4(bytes_, k).as_subclass(torch.Tensor)
    assert got.is_contiguous()
    accept.t0(got, numerics.unpack_int4(plain, k), waiver="layouts")
