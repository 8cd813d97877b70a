"""By the plan's own model no layer of auto mode is slower than 0.97 of the framework's 16-bit product, at any size of
the grid and on every pinned chip; what the integers cost is reckoned here once more, launch by launch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import plan_grid as grid
import pytest
import torch

from pyquant import QLinear, scheme_from_name
from pyquant.nn import quicker
from pyquant.ops import layer_time
from pyquant.ops.plan import Device

native = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")

FLOOR = 0.97
LAUNCH_US = 2.5  # an empty kernel on an idle stream (csrc/plan/cost.h)
DEVICES = {sm: Device(**facts, l2_bytes=40 << 20) for sm, facts in grid.DEVICES.items()}
SHAPES = ((4096, 4096), (28672, 8192), (1024, 4096), (256, 256), (768, 3072), (11008, 4096), (32, 8192))
SCHEMES = (
    "W8A8Dynamic",
    "W8A8",
    "W8A8Dynamic(symmetric_inputs=False)",
    "W4A8Dynamic",
    "W4A8Dynamic(group_size=128)",
    "W4A8TwoLevelDynamic",
)
WEIGHT_ONLY = ("W8A16", "W4A16(group_size=128)")


def reckoned_us(scheme: Any, n: int, k: int, m: int, device: Device) -> float:
    """A whole layer from its parts: the quantiser's launch and bytes, then the product by the model; weight-only layers
    of many rows: the dequantised weights written and read, then the framework's product."""
    entry, problem, int4_range = layer_time.product_of(scheme, n, k, m, torch.bfloat16, device)
    form, name, us, *_ = native.route(entry, problem, vars(device), False, int4_range, only_compiled=False)
    bandwidth = device.dram_gbps * 1e3  # bytes a microsecond
    if form == "framework":
        bytes_ = n * k * (scheme.weights.bits / 8 + 2)
        return LAUNCH_US + bytes_ / bandwidth + float_us(n, k, m, device)
    assert name is not None
    return us + (LAUNCH_US + 3 * m * k / bandwidth if entry == "linear" else 0)


def float_us(n: int, k: int, m: int, device: Device) -> float:
    return float(native.framework_time(m, n, k, "bf16", vars(device))[0])


def chosen(text: str, n: int, k: int, m: int, device: Device) -> quicker.LayerChoice:
    """What auto mode does with a layer of that size, which takes no memory here."""
    seen = quicker._Seen(layer_of(text, n, k), {(torch.Size((m, k)), (k, 1), torch.bfloat16): 1})
    return quicker._choice("layer", seen, device, False, 0.0, 0.03, {})


@functools.cache
def layer_of(text: str, n: int, k: int) -> QLinear:
    return QLinear(k, n, scheme=scheme_from_name(text), device="meta", dtype=torch.bfloat16)


# What two tests ask about the pinned chips. Not for one that changes what the plan answers.
chosen_once = functools.cache(chosen)


def slower(schemes: tuple[str, ...], sm: int, choose: Callable[..., Any] = chosen) -> Iterator[str]:
    device = DEVICES[sm]
    for text, (n, k), m in itertools.product(schemes, SHAPES, grid.MS):
        if choose(text, n, k, m, device).form == quicker.INTEGERS:
            ratio = float_us(n, k, m, device) / reckoned_us(layer_of(text, n, k).scheme, n, k, m, device)
            if ratio < FLOOR:
                yield f"sm{sm} {text} N {n} K {k} M {m}: {ratio:.3f}"


@pytest.mark.parametrize("sm", DEVICES)
def test_nothing_of_the_grid_is_slower(sm: int) -> None:
    assert list(slower(SCHEMES + WEIGHT_ONLY, sm, chosen_once)) == []


@pytest.mark.parametrize("sm", DEVICES)
def test_integers_are_chosen_where_they_are_quicker(sm: int) -> None:
    """The easy way to be never slower is to be always float."""
    forms = [
        chosen_once(text, n, k, m, DEVICES[sm]).form == quicker.INTEGERS
        for text, (n, k), m in itertools.product(SCHEMES, SHAPES, grid.MS)
    ]
    # on B200 these kernels multiply by Ampere's instructions, the framework by the chip's own
    assert sum(forms) > len(forms) / (10 if sm == 100 else 3)
    for m in (1, 16, 4096):
        is_quick = m < 4096 or sm != 100
        assert (chosen("W8A8Dynamic", 28672, 8192, m, DEVICES[sm]).form == quicker.INTEGERS) == is_quick
    assert chosen("W4A16(group_size=128)", 28672, 8192, 1, DEVICES[sm]).form == quicker.INTEGERS
    few = chosen("W4A16(group_size=128)", 28672, 8192, 64, DEVICES[sm])
    # widened by the warps that multiply: less than half of the rate of B200's bf16
    assert (few.form == quicker.INTEGERS) == (sm != 100)
    assert chosen("W4A16(group_size=128)", 28672, 8192, 4096, DEVICES[90]).form == quicker.FLOATS
    assert chosen("W8A8Dynamic", 256, 256, 1, DEVICES[sm]).form == quicker.FLOATS


def test_planted_a_quantiser_that_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def product_alone(scheme: Any, n: int, k: int, m: int, dtype: Any, device: Device, **_: Any) -> tuple[Any, Any]:
        entry, problem, int4_range = layer_time.product_of(scheme, n, k, m, dtype, device)
        us = native.route(entry, problem, vars(device), False, int4_range, only_compiled=False)[2]
        return layer_time.LayerTime(us), layer_time.LayerTime(float_us(n, k, m, device))

    monkeypatch.setattr(layer_time, "beside", product_alone)
    for schemes in (("W8A8Dynamic",), ("W4A16(group_size=128)",)):  # dequantising costs something, too
        assert list(slower(schemes, 90))


@pytest.mark.parametrize("sm", DEVICES)
def test_the_frameworks_product_is_no_straw_man(sm: int) -> None:
    """Never quicker than its bytes and its operations allow, nor slower than published kernels by more than 2x."""
    device = DEVICES[sm]
    # dense bf16 operations a microsecond, from data sheets
    peak = {80: 312e6, 86: 150e6, 89: 362e6, 90: 989e6, 100: 2250e6, 120: 209.5e6}[sm]
    for (n, k), m in itertools.product(SHAPES, grid.MS):
        least = max(2 * (n * k + m * k + m * n) / (device.dram_gbps * 1e3), 2 * m * n * k / peak)
        us = float_us(n, k, m, device)
        assert us >= 0.95 * least
        if 2 * n * k > 100e6:
            assert us <= 2 * least + 5, (n, k, m)


def test_measured_times_come_before_the_model() -> None:
    from pyquant.ops import tuned

    device = Device(**vars(DEVICES[90]) | {"name": "GPU X"})
    assert chosen("W8A8Dynamic", 4096, 4096, 4096, device).form == quicker.INTEGERS
    table = tuned.Table()
    table.add("GPU X", [], layers=[layer(us=200.0, float_us=150.0)])
    try:
        tuned.activate(table)
        measured = chosen("W8A8Dynamic", 4096, 4096, 4000, device)
        assert measured.form == quicker.FLOATS
        assert "200.0 us against 150.0 us at 4000 rows (0.75x) (measured on GPU X)" in measured.reason
        assert chosen("W8A8Dynamic", 4096, 4096, 4097, device).form == quicker.INTEGERS  # another bucket
        assert chosen("W8A8", 4096, 4096, 4096, device).form == quicker.INTEGERS
        product = tuned.Choice("bf16", "bf16", "bf16", False, "natural", 0, 4096, 4096, 4096, "torch", 1.0, "", 1.0)
        table = tuned.Table()
        table.add("GPU X", [product])
        tuned.activate(table)
        assert native.framework_time(4096, 4096, 4096, "bf16", vars(device))[:2] == (1.0, True)
        assert chosen("W8A8Dynamic", 4096, 4096, 4096, device).form == quicker.FLOATS
    finally:
        tuned.activate(tuned.load())


def layer(**times: float) -> Any:
    from pyquant.ops.tuned import LayerChoice

    return LayerChoice("s8", "s8 dynamic", False, 0, "bf16", 4096, 4096, 4096, **times)
