"""The generator tested: it reaches the edges, repeats itself, and its catalogues hold what they promise."""

from __future__ import annotations

import accept
import problems
import pytest
import torch

SHAPES = list(problems.shapes(2_000))


def share(predicate) -> float:
    return sum(map(predicate, SHAPES)) / len(SHAPES)


@pytest.mark.parametrize(
    ("event", "low", "high"),
    [
        (lambda s: s.is_empty, 0.05, 0.10),
        (lambda s: s.m == 1, 0.08, 0.25),
        (lambda s: s.k % 16 != 0, 0.15, 1.0),
        (lambda s: s.k % 16 == 1, 0.05, 1.0),
        (lambda s: s.k % 16 == 15, 0.05, 1.0),
        (lambda s: s.k % 16 == 0 and s.k > 0, 0.10, 1.0),
        (lambda s: 0 < s.k < 64, 0.20, 0.80),
        (lambda s: s.m % 128 == 127, 0.02, 1.0),
        (lambda s: s.m % 128 == 1 and s.m > 1, 0.02, 1.0),
        (lambda s: s.n % 8 in (1, 7), 0.10, 1.0),
        (lambda s: s.k > 500, 0.02, 0.10),
    ],
    ids=["empty", "M=1", "K tail", "K%16=1", "K%16=15", "whole K", "short K", "M=127", "M=129", "N tail", "long K"],
)
def test_sampler_reaches_the_edge(event, low, high):
    assert low <= share(event) <= high, f"{share(event):.1%} of {len(SHAPES)} shapes"


def test_each_dimension_is_zero_sometimes_and_never_more_than_one_at_once():
    zeros = [(s.m == 0, s.n == 0, s.k == 0) for s in SHAPES if s.is_empty]
    assert all(sum(z) == 1 for z in zeros)
    assert {z.index(True) for z in zeros} == {0, 1, 2}


@pytest.mark.parametrize("epilogue", ["accumulator", "float", "codes", "exact"])
def test_problem_repeats_itself_and_differs_by_seed(epilogue):
    first, again = (problems.gemm_problem(12, epilogue=epilogue) for _ in range(2))
    assert first.call.keys() == again.call.keys()
    for name, value in first.call.items():
        same = torch.equal(value, again.call[name]) if isinstance(value, torch.Tensor) else value == again.call[name]
        assert same, name
    other = problems.gemm_problem(12, seed=problems.BASE_SEED + 1, epilogue=epilogue)
    assert other.shape != first.shape or not torch.equal(other.call["x"], first.call["x"])
    assert f"gemm_problem(12, seed={problems.BASE_SEED}" in first.repeat


def test_packed_weights_are_the_codes():
    for index in range(200):
        p = problems.gemm_problem(index)
        low, high = problems.CODE_RANGES[p.w_type]
        assert p.w_codes.numel() == 0 or low <= int(p.w_codes.min()) <= int(p.w_codes.max()) <= high
        if p.w_type == "s4":
            packed, k = p.call["w"].to(torch.int64), p.shape.k
            nibbles = torch.stack((packed % 16, packed // 16), -1).reshape(p.shape.n, 2 * packed.shape[1])
            signed = torch.where(nibbles > 7, nibbles - 16, nibbles)
            accept.t0(signed[:, :k].to(torch.int8), p.w_codes, what=p.repeat, waiver="catalogue")
            assert bool((nibbles[:, k:] == 0).all()), p.repeat


def test_every_choice_of_the_epilogue_occurs():
    cases = [problems.gemm_problem(i, epilogue=e) for i in range(400) for e in ("float", "codes")]
    for key in ("x_zero_point", "x_scale", "bias", "residual", "out_zero_point", "clamp_min"):
        present = sum(key in p.call for p in cases)
        assert 0.05 * len(cases) <= present <= 0.95 * len(cases), key
    assert {p.call["activation"] for p in cases} == set(problems.ACTIVATIONS)
    assert {p.call["out_dtype"] for p in cases} == {*problems.FLOATS, torch.int8}
    assert {p.op for p in cases} == {"gemm_s8s8", "gemm_s8s4", "gemm_s4s4"}
    assert {p.call["x"].dtype for p in cases} == {torch.int8, torch.uint8}
    groups = [(p.call["group_size"], p.shape.k) for p in cases if p.call["group_size"]]
    assert any(g == 1 < k for g, k in groups)
    assert any(g == k > 1 for g, k in groups)
    assert all(k % g == 0 for g, k in groups)
    assert sum(p.waiver is None for p in cases) >= 0.15 * len(cases)
    assert {pattern for p in cases for pattern in p.patterns} == set(problems.CODE_PATTERNS)


def test_value_catalogue_is_large_named_once_and_of_the_declared_kind():
    assert len(problems.VALUES) >= 40
    assert len({v.name for v in problems.VALUES}) == len(problems.VALUES)
    for values in problems.VALUES:
        for rows, cols in ((1, 1), (1, 33), (7, 1), (5, 48), (0, 4), (4, 0)):
            x = values.tensor(rows, cols)
            assert x.shape == (rows, cols)
            assert x.dtype == torch.float32
            if x.numel():
                assert bool(x.isfinite().all()) == values.is_finite, (values.name, rows, cols)
        accept.t1(values.tensor(5, 48), values.tensor(5, 48), what=values.name, waiver="catalogue")


def test_amax_patterns_hit_their_amax_exactly():
    by_name = {v.name: v for v in problems.VALUES}
    for name, amax in (("floor", 2.0**-100), ("f16_max", 65504.0), ("amax_one_ulp_above", 127.00000762939453)):
        assert by_name[name].tensor(6, 40).abs().amax(1).tolist() == [amax] * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.uint8])
def test_layouts_keep_dtype_and_mostly_values(dtype):
    assert len(problems.LAYOUTS) >= 20
    assert len({x.name for x in problems.LAYOUTS}) == len(problems.LAYOUTS)
    t = (problems.Draw(1, "layouts").uniform(6, 10) * 100).to(dtype)
    kept = 0
    for layout in problems.LAYOUTS:
        if not layout.takes(t):
            continue
        laid = layout.build(t)
        assert laid.dtype == dtype, layout.name
        if layout.refused is None and laid.shape == t.shape:
            kept += bool(torch.equal(laid.contiguous(), t))
    assert kept >= 13  # expanded, overlapping and flipped tensors hold other values by nature


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (0, 5), (5, 0)])
def test_layouts_exist_for_every_shape(shape):
    for layout in problems.LAYOUTS:
        assert isinstance(layout.build(torch.zeros(shape)), torch.Tensor), layout.name


def test_strided_layouts_are_what_they_are_called():
    by_name = {x.name: x for x in problems.LAYOUTS}
    t = torch.zeros(6, 10)
    assert by_name["storage_offset_3"].build(t).storage_offset() == 3
    assert by_name["column_slice_odd_offset"].build(t).storage_offset() == 3
    assert by_name["expanded"].build(t).stride() == (0, 1)
    assert by_name["overlapping"].build(t).stride() == (1, 1)
    assert by_name["transposed"].build(t).stride() == (1, 6)
    assert by_name["padded_rows"].build(t).stride() == (15, 1)
    assert by_name["every_second_row"].build(t).stride() == (20, 1)


@pytest.fixture(scope="module")
def shared_numbers() -> torch.Tensor:
    return torch.rand(4)


def test_torchs_own_numbers_come_from_the_name_of_the_test(request: pytest.FixtureRequest) -> None:
    drawn = torch.rand(4)
    conftest = next(p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "LONGEST"))
    conftest._seed("another")
    assert not torch.equal(torch.rand(4), drawn)
    conftest._seed(request.node.nodeid)
    assert torch.equal(torch.rand(4), drawn)


def test_what_tests_share_does_not_depend_on_which_comes_first(
    request: pytest.FixtureRequest, shared_numbers: torch.Tensor
) -> None:
    conftest = next(p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "LONGEST"))
    conftest._seed("tests/support/test_problems.py", "shared_numbers", 0)
    assert torch.equal(torch.rand(4), shared_numbers)
