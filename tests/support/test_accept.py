"""The tester tested: errors just inside and just outside of every rule."""

from __future__ import annotations

import math

import accept
import pytest
import torch
from accept import Mistrusted, Rejected

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def spread(n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def off_by_ulps(value: torch.Tensor, ulps: int, index: int = 0) -> torch.Tensor:
    """`value` with one element moved away from zero by so many ulps."""
    out = value.clone()
    bits = out.view({4: torch.int32, 2: torch.int16}[out.element_size()])
    bits[index] += ulps
    return out


class TestT0:
    def test_equal_passes(self):
        accept.t0(torch.arange(20), torch.arange(20))
        accept.t0({"a": [1]}, {"a": [1]})

    def test_one_element_off_by_one_fails_and_is_named(self):
        want = torch.arange(20, dtype=torch.int32).reshape(4, 5)
        got = want.clone()
        got[2, 3] += 1
        with pytest.raises(Rejected, match=r"first at \[2, 3\]: got 14 \(0xe\), want 13 \(0xd\)"):
            accept.t0(got, want)

    def test_dtype_shape_and_type_matter(self):
        want = torch.arange(20)
        for got in (want.to(torch.int32), want.reshape(4, 5), want.tolist()):
            with pytest.raises(Rejected):
                accept.t0(got, want)
        with pytest.raises(Rejected):
            accept.t0(1.0, 1)

    def test_floats_are_refused(self):
        with pytest.raises(TypeError):
            accept.t0(torch.ones(20), torch.ones(20))

    def test_negative_code_shows_its_two_complement_pattern(self):
        with pytest.raises(Rejected, match=r"got -1 \(0xff\)"):
            accept.t0(torch.tensor([-1], dtype=torch.int8), torch.tensor([1], dtype=torch.int8))


class TestT1:
    @pytest.mark.parametrize("dtype", [F32, F16, BF16])
    def test_equal_passes_and_one_ulp_fails(self, dtype):
        want = spread(50, dtype)
        accept.t1(want.clone(), want)
        with pytest.raises(Rejected, match=r"first at \[7\]"):
            accept.t1(off_by_ulps(want, 1, 7), want)

    def test_signed_zero_is_seen(self):
        with pytest.raises(Rejected, match="0x80000000"):
            accept.t1(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))

    def test_nan_must_be_where_nan_is(self):
        nan, one = torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 1.0])
        accept.t1(nan.clone(), nan)
        for got, want in ((nan, one), (one, nan), (torch.tensor([1.0, math.nan]), nan)):
            with pytest.raises(Rejected):
                accept.t1(got, want)

    def test_nan_payload_does_not_matter(self):
        quiet = torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32).view(F32)
        other = torch.tensor([-1, 0x3F800000], dtype=torch.int32).view(F32)
        accept.t1(quiet, other)

    def test_subnormal_flushed_to_zero_fails(self):
        with pytest.raises(Rejected):
            accept.t1(torch.tensor([0.0, 1.0]), torch.tensor([2.0**-149, 1.0]))

    def test_integers_are_refused(self):
        with pytest.raises(TypeError):
            accept.t1(torch.arange(20), torch.arange(20))


class TestT2:
    @pytest.mark.parametrize("dtype", [F16, BF16])
    def test_correct_rounding_passes(self, dtype):
        exact = spread(20_000)
        accept.t2(exact.to(dtype), exact, exact.abs())

    @pytest.mark.parametrize("dtype", [F32, F16, BF16])
    def test_single_element_one_ulp_passes_three_ulps_fail(self, dtype):
        exact = spread(20_000).to(dtype).to(torch.float64)
        accept.t2(off_by_ulps(exact.to(dtype), 1), exact, exact.abs())
        wide = 8 if dtype == F32 else 3  # float32 output: the four steps are as coarse as the output itself
        with pytest.raises(Rejected, match="1 of 20000"):
            accept.t2(off_by_ulps(exact.to(dtype), wide), exact, exact.abs())

    def test_cancelling_bias_widens_the_bound_and_only_by_its_size(self):
        exact = torch.full((20,), 2.0**-10, dtype=torch.float64) * torch.arange(1, 21)
        magnitude = torch.full((20,), 2.0**12, dtype=torch.float64)  # four steps of 2^-24 * 2^12 = 2^-10
        close = (exact + 2.0**-11).to(F32)
        accept.t2(close, exact, magnitude)
        with pytest.raises(Rejected):
            accept.t2(close, exact, magnitude / 8)

    @pytest.mark.parametrize("dtype", [F16, BF16])
    def test_truncation_fails(self, dtype):
        exact = spread(5_000)
        rounded = exact.to(dtype)
        too_large = rounded.to(torch.float64).abs() > exact.abs()
        truncated = torch.where(too_large, (rounded.view(torch.int16) - 1).view(dtype), rounded)
        with pytest.raises(Rejected, match="differ from the rounded"):
            accept.t2(truncated, exact, exact.abs())

    @pytest.mark.parametrize(("differing", "passes"), [(43, True), (44, False)])
    def test_share_of_differing_elements(self, differing, passes):
        exact = spread(20_000).to(BF16).to(torch.float64)
        got = exact.to(BF16)
        got.view(torch.int16)[:differing] += torch.tensor([1, -1], dtype=torch.int16).repeat(22)[:differing]
        if passes:
            accept.t2(got, exact, exact.abs())
        else:
            with pytest.raises(Rejected, match="44 of 20000"):
                accept.t2(got, exact, exact.abs())

    def test_signed_mean_alone_is_seen(self, monkeypatch):
        monkeypatch.setattr(accept, "T2_SHARE", 1.0)
        exact = spread(1_000).abs().add(0.5).to(BF16).to(torch.float64)
        got = exact.to(BF16)
        got.view(torch.int16)[:24] += 1  # 24 ulp over 1 000: allowed are 0.02 * 1 000 + 3
        with pytest.raises(Rejected, match="signed mean"):
            accept.t2(got, exact, exact.abs())
        got.view(torch.int16)[22:24] -= 1
        accept.t2(got, exact, exact.abs())

    def test_nan_and_infinity(self):
        exact = spread(100)
        exact[3], exact[4] = 1e30, math.nan
        got = exact.to(F16)
        assert got[3].isinf()
        accept.t2(got, exact, exact.abs())
        for index, value in ((3, 65504.0), (3, -math.inf), (4, 1.0), (5, math.nan), (5, math.inf)):
            broken = got.clone()
            broken[index] = value
            with pytest.raises(Rejected):
                accept.t2(broken, exact, exact.abs())

    def test_float32_reference_is_refused(self):
        with pytest.raises(TypeError):
            accept.t2(torch.ones(20), torch.ones(20), torch.ones(20))


class TestT3:
    def problem(self, k: int = 64):
        x, w = spread(30 * k).reshape(30, k), spread(20 * k, seed=1).reshape(20, k)
        return x @ w.T, x.abs() @ w.abs().T, k

    def test_inside_and_outside_of_the_bound(self):
        exact, magnitude, k = self.problem()
        peer = (exact + 2e-6 * magnitude).to(F32)
        bound = k * 2.0**-24 * magnitude
        got = exact.to(F32)
        got[3, 4] = exact[3, 4] + 0.98 * bound[3, 4]
        accept.t3(got, exact, magnitude, k, peer)
        got[3, 4] = exact[3, 4] + 1.05 * bound[3, 4]
        with pytest.raises(Rejected, match=r"first at \[3, 4\]"):
            accept.t3(got, exact, magnitude, k, peer)

    def test_more_than_twice_torch_fails_inside_the_bound(self):
        exact, magnitude, k = self.problem()
        peer = exact.to(F32)
        peer[0, 0] = exact[0, 0] + 1e-6
        got = exact.to(F32)
        got[5, 6] = exact[5, 6] + 1.8e-6
        accept.t3(got, exact, magnitude, k, peer)
        got[5, 6] = exact[5, 6] + 3.5e-6
        with pytest.raises(Rejected, match="twice torch's"):
            accept.t3(got, exact, magnitude, k, peer)

    def test_exact_peer_leaves_room_for_the_store(self):
        exact, magnitude, k = self.problem()
        rounded = exact.to(F16).to(torch.float64)
        accept.t3(rounded.to(F16), rounded, magnitude, k, rounded.to(F16))

    def test_nan_fails(self):
        exact, magnitude, k = self.problem()
        got = exact.to(F32)
        got[0, 0] = math.nan
        with pytest.raises(Rejected):
            accept.t3(got, exact, magnitude, k, exact.to(F32))


class TestT4:
    def scores(self, shift: float):
        reference = spread(400, seed=3).tolist()
        noise = spread(400, seed=4) * 0.1
        noise -= noise.mean()
        return [r + shift + n for r, n in zip(reference, noise.tolist(), strict=True)], reference

    def test_interval_decides(self):
        half = 2.58 * float((spread(400, seed=4) * 0.1).std()) / 20
        accept.t4(*self.scores(-0.05 + half * 1.01), max_loss=0.05)
        with pytest.raises(Rejected):
            accept.t4(*self.scores(-0.05 + half * 0.99), max_loss=0.05)

    def test_nan_and_few_samples_fail(self):
        got, reference = self.scores(0.0)
        with pytest.raises(Rejected):
            accept.t4([math.nan, *got[1:]], reference, max_loss=1.0)
        with pytest.raises(Rejected):
            accept.t4(got[:29], reference[:29], max_loss=1.0)


class TestMistrust:
    @pytest.mark.parametrize("nonzero", [9, 10])
    def test_more_than_ninety_percent_zero(self, nonzero):
        want = torch.zeros(100, dtype=torch.int32)
        want[:nonzero] = torch.arange(1, nonzero + 1)
        if nonzero == 10:
            accept.t0(want.clone(), want)
        else:
            with pytest.raises(Mistrusted):
                accept.t0(want.clone(), want)
            accept.t0(want.clone(), want, waiver="zeros by design")

    @pytest.mark.parametrize("clamped", [50, 51])
    def test_more_than_half_clamped(self, clamped):
        want = torch.arange(100, dtype=torch.int8) - 50
        want[:clamped] = 127
        if clamped == 50:
            accept.t0(want.clone(), want, limits=(-127, 127))
        else:
            with pytest.raises(Mistrusted):
                accept.t0(want.clone(), want, limits=(-127, 127))

    def test_constant_or_all_nan(self):
        for want in (torch.full((20,), 3.0), torch.full((20,), math.nan)):
            with pytest.raises(Mistrusted):
                accept.t1(want.clone(), want)
        accept.t1(torch.full((15,), 3.0), torch.full((15,), 3.0))  # too small to judge

    def test_waiver_does_not_waive_the_rule_itself(self):
        with pytest.raises(Rejected):
            accept.t0(torch.ones(20, dtype=torch.int8), torch.zeros(20, dtype=torch.int8), waiver="zeros by design")


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_ulp_is_the_distance_of_neighbours(dtype):
    value = torch.cat([spread(500, dtype).abs(), torch.tensor([1.0, 2.0, 0.0, torch.finfo(dtype).tiny], dtype=dtype)])
    bits = value.view({4: torch.int32, 2: torch.int16}[value.element_size()])
    above = (bits + 1).view(dtype).to(torch.float64)
    accept.t0(bool((above - value.to(torch.float64) == accept._ulp(value)).all()), True)
