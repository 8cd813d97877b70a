"""The candidates of the GPU benchmark, as far as they can be asked without a GPU: absence, vLLM's rule, numbers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from pyquant.bench.kernels import ADAPTERS
from pyquant.bench.kernels.adapter import needs_multiple, package
from pyquant.bench.kernels.others import OTHERS
from pyquant.bench.kernels.rows import CHOSEN, ROWS, VLLM, Tiling, problem_of, row_of, rows_matching, vllm_rule
from pyquant.bench.kernels.torch_own import INT4PACK, TORCH_OWN, group_codes
from pyquant.bench.peers import PeerUnavailable
from pyquant.bench.problem import Inputs, Weights, to_fp8

CPU = torch.device("cpu")
PACKAGES = {"gemlite": "gemlite", "humming": "humming-kernels", "torchao": "torchao", "bitsandbytes": "bitsandbytes"}


@pytest.mark.parametrize("adapter", OTHERS, ids=lambda adapter: adapter.name)
def test_a_package_that_is_not_there_is_named_with_the_remedy(adapter) -> None:
    name = PACKAGES[adapter.name.split()[0]]
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        with pytest.raises(PeerUnavailable, match=f"{name} is not installed .*make gpu-peers"):
            adapter.build(Weights(256, 32, CPU))
    else:
        pytest.skip(f"{name} is installed")


def test_a_package_that_cannot_be_imported_is_told() -> None:
    with pytest.raises(PeerUnavailable, match="pytest cannot be imported: ModuleNotFoundError"):
        package("no_such_module_of_pytest", "pytest")


@pytest.mark.parametrize(
    ("m", "n", "wanted"),
    [
        (1, 4096, "64x64x256 c1x8 plain"),
        (32, 8191, "64x64x256 c1x8 plain"),
        (32, 8192, "64x128x256 c1x4 plain"),
        (33, 8192, "64x64x256 c1x1 plain"),
        (64, 4096, "64x64x256 c1x1 plain"),
        (65, 4096, "64x128x128 c2x1 pingpong"),
        (128, 57344, "64x128x128 c2x1 pingpong"),
        (129, 64, "128x128x128 c2x1 pingpong"),
        (8192, 8192, "128x128x128 c2x1 pingpong"),
    ],
)
def test_vllms_rule(m: int, n: int, wanted: str) -> None:
    assert str(vllm_rule(m, n)) == wanted


def table_row(**more):
    tiling = vllm_rule(4096, 4096)
    row = {
        "name": "r",
        "family": "sm90_s8s8",
        "x": ["s8"],
        "w": ["s8"],
        "out": ["bf16"],
        "tile": tiling.tile,
        "cluster": tiling.cluster,
        "schedule": tiling.schedule,
        "experts_only": False,
        "channel_multiple": 0,
        "compiled": True,
    }
    return row | more


def test_a_row_of_the_rule_is_found_or_its_absence_told() -> None:
    tiling = vllm_rule(4096, 4096)
    others = [
        table_row(name="half", out=["f16"]),
        table_row(name="four", family="sm90_s8s4"),
        table_row(name="old", family="sm80_s8s8"),
        table_row(name="swapped", schedule="swapped_pingpong"),
        table_row(name="one", cluster=(1, 1)),
        table_row(name="coop", schedule="cooperative"),
        table_row(name="small", tile=(64, 128, 128)),
    ]
    with pytest.raises(PeerUnavailable, match="no sm90_s8s8 row for bf16 of 128x128x128 c2x1 pingpong"):
        row_of(others, tiling)
    with pytest.raises(PeerUnavailable, match="this_one is not compiled"):
        row_of([*others, table_row(name="this_one", compiled=False)], tiling)
    assert row_of([*others, table_row(name="this_one")], tiling) == "this_one"
    assert isinstance(tiling, Tiling)


def test_the_real_table_answers_for_every_choice_of_the_rule() -> None:
    native = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
    table = native.kernel_table()
    for m, n in ((1, 4096), (1, 8192), (64, 4096), (128, 4096), (4096, 4096)):
        try:
            assert row_of(table, vllm_rule(m, n)) in {row["name"] for row in table}
        except PeerUnavailable as why:
            assert "not compiled" in str(why) or str(vllm_rule(m, n)) in str(why)  # noqa: PT017
    assert len(rows_matching("", table)) == sum(
        row["compiled"] and "bf16" in row["out"] and "s8" in row["x"] and "s8" in row["w"]
        for row in table
        if not row["experts_only"] and not row["channel_multiple"]
    )
    assert rows_matching("no such row", table) == []


def test_rows_ask_for_what_the_native_module_knows() -> None:
    native = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
    h200 = {"sm": 90, "sm_count": 132, "shared_bytes": 232448, "l2_bytes": 62914560}
    name, _, refusals = native.select(problem_of(Weights(4096, 4096, CPU), 16), h200, only_compiled=False)
    assert name, refusals
    assert [adapter.name for adapter in ROWS] == [CHOSEN, VLLM]
    assert [adapter.ours for adapter in ROWS] == [True, False]


def test_raw_rows_say_why_they_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyquant.bench.kernels import rows

    fake = SimpleNamespace(
        kernel_table=list, device_info=lambda device: {}, select=lambda *args: (None, 0.0, {"a": "K = 3"})
    )
    monkeypatch.setattr(rows, "native", lambda: fake)
    weights = Weights(64, 32, torch.device("cpu", 0))
    for adapter, reason in zip(
        ROWS, ("no row takes the problem: a: K = 3", "the kernel table has no sm90_s8s8 row"), strict=True
    ):
        built = adapter.build(weights)
        with pytest.raises(PeerUnavailable, match=reason):
            built.bind(Inputs(weights, 4))


def test_numbers_are_full_range_and_repeat() -> None:
    weights = Weights(512, 64, CPU)
    codes, scale = weights.codes
    assert int(codes.abs().max()) == 127
    assert 20 < float(codes.float().std()) < 60
    assert torch.equal(codes, Weights(512, 64, CPU).codes[0])
    assert not torch.equal(codes, Weights(512, 64, CPU, seed=1).codes[0])
    assert torch.equal(weights.w, weights.w.bfloat16().float())
    inputs = Inputs(weights, 33)
    x_q, x_scale = inputs.codes
    assert int(x_q.abs().max()) == 127
    assert not torch.equal(inputs.x[:4], Inputs(weights, 4).x)
    assert torch.allclose(x_q.float() * x_scale[:, None], inputs.x, atol=float(x_scale.max()))
    assert torch.allclose(codes.float() * scale[:, None], weights.w, atol=float(scale.max()))


def test_fp8_and_four_bit_forms_are_near_the_numbers() -> None:
    weights = Weights(256, 16, CPU)
    inputs = Inputs(weights, 40)
    w8, scale8 = to_fp8(weights.w)
    x8, x_scale = inputs.fp8
    y = (x8.float() * x_scale) @ (w8.float() * scale8).t()
    fp8 = next(a for a in TORCH_OWN if "fp8" in a.name)
    assert inputs.sqnr_db(y, with_bias=False) > fp8.min_sqnr
    codes, scale = group_codes(weights, 128)
    assert int(codes.min()) >= -8
    assert int(codes.max()) <= 7
    w4 = (codes.float().view(16, 2, 128) * scale[..., None]).view(16, 256)
    y = inputs.x @ w4.t()
    int4 = next(a for a in ADAPTERS if a.name == INT4PACK)
    assert inputs.sqnr_db(y, with_bias=False) > int4.min_sqnr
    with pytest.raises(PeerUnavailable, match="K = 200, needs a multiple of 128"):
        needs_multiple("K", 200, 128)


def test_noise_is_measured_and_nan_is_never_right() -> None:
    weights = Weights(64, 16, CPU)
    inputs = Inputs(weights, 9)
    exact = (inputs.x.double() @ weights.w.double().t()).float()
    assert inputs.sqnr_db(exact, with_bias=False) > 120
    assert inputs.sqnr_db(exact * 1.1, with_bias=False) == pytest.approx(20.0, abs=0.01)
    assert inputs.sqnr_db(exact, with_bias=True) < 10
    exact[8, 3] = torch.nan
    assert inputs.sqnr_db(exact, with_bias=False) == -torch.inf
