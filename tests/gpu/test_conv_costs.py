"""What a convolution's call on CUDA asks for, counted by the simulator: launches, allocations, bytes, instructions; and
a call inside of a graph."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import simulator
import torch
from conv_op import FORMS, LAST, Conv, in_groups
from cuda_ops import CudaOps
from launches import Captured, counted, ok
from problems import BASE_SEED, Draw

from pyquant.core.patches import Patches


def test_a_layer_in_groups_is_two_launches(simulated: CudaOps) -> None:
    x = torch.randn(1, 64, 9, 9).to(torch.bfloat16).to(memory_format=LAST)
    for form, launches in (("static", 2), ("dynamic", 3)):
        call = Conv(simulated, 64, 64, in_groups(64, padding=1), **FORMS[form]).call_on(x)
        before = torch.ops.pyquant_sim.allocations(x)
        counts, kernels = counted(call)
        assert torch.ops.pyquant_sim.allocations(x) - before == 2
        assert (counts["kernel"], counts.get("memset", 0)) == (launches, 0), kernels


@pytest.mark.parametrize(("form", "launches"), [("static", 2), ("dynamic", 3), ("affine", 3)])
@pytest.mark.parametrize("window", [Patches((3, 3), padding=(1, 1, 1, 1)), Patches((1, 1))], ids=["3x3", "1x1"])
def test_a_layer_is_two_launches_and_one_more_for_a_range(
    simulated: CudaOps, form: str, launches: int, window: Patches
) -> None:
    """And the result and one piece of memory for everything else."""
    x = torch.randn(1, 128, 12, 12).to(torch.bfloat16).to(memory_format=LAST)
    call = Conv(simulated, 128, 64, window, **FORMS[form]).call_on(x)
    before = torch.ops.pyquant_sim.allocations(x)
    counts, kernels = counted(call)
    assert torch.ops.pyquant_sim.allocations(x) - before == 2
    assert (counts["kernel"], counts.get("memset", 0)) == (launches, 0), kernels
    assert "patches" not in str(kernels)


def test_codes_that_lie_as_kernels_read_them_stay_where_they_are(simulated: CudaOps) -> None:
    codes = torch.randint(-127, 128, (2, 64, 9, 9), dtype=torch.int8).to(memory_format=LAST)
    for patches in (Patches((3, 3)), Patches((1, 1), (2, 2)), Patches((1, 1))):
        conv = Conv(simulated, 64, 64, patches, codes_out=True, **FORMS["static"])
        counts, kernels = counted(conv.call_on(codes))
        assert sum("clear" not in str(kernel) for kernel in kernels) == 1, kernels
        assert counts.get("memset", 0) == 0
        conv.check(codes)


@pytest.fixture
def counters(tmp_path: Path) -> Any:
    """Counters of each launch since; the file is JSON."""
    if simulator.runtime is None:
        pytest.skip("a GPU has no such counters")
    path = tmp_path / "counters.json"

    def of(call: Any) -> list[Any]:
        simulator.runtime.ptxsim_config(b"PTXSIM_STATS", str(path).encode())
        call()
        simulator.runtime.ptxsim_config(b"PTXSIM_STATS", None)
        return json.loads(path.read_text())  # type: ignore[no-any-return]

    return of


# Instructions that a number of an image costs, moves apart, in the simulator's PTX.
# (side of the window, stride, activation): instructions an output
DEPTHWISE_BUDGET = {
    (3, 1, "none"): 33.5,
    (3, 1, "relu"): 41,
    (3, 2, "none"): 38,
    (5, 1, "silu"): 98,
    (7, 1, "none"): 81,
}
IMAGE_BUDGET = {torch.contiguous_format: 20.0, LAST: 17.0}


@pytest.mark.parametrize("memory_format", IMAGE_BUDGET, ids=["channels_first", "channels_last"])
def test_an_image_is_read_once_and_patches_are_written_nowhere(
    simulated: CudaOps, counters: Any, memory_format: torch.memory_format
) -> None:
    """Bytes: floats of the image in, codes out in whole sectors; a product fetches the rows of its tiles, no more."""
    channels, n, size = 64, 64, 56
    conv = Conv(simulated, channels, n, Patches((3, 3), padding=(1, 1, 1, 1)), **FORMS["static"])
    x = torch.randn(1, channels, size, size).to(torch.bfloat16).to(memory_format=memory_format)
    images, product = counters(conv.call_on(x))
    numbers = channels * size * size
    assert images["global_store"]["bytes"] == channels * (size + 2) ** 2
    assert images["global_store"]["efficiency"] == 1.0
    scalars = 64 * images["grid"][0]  # of the layer, a sector or two for each block
    assert 0 <= images["l2_to_sm"]["load_unique_bytes"] - 2 * numbers <= scalars
    classes = images["classes"]
    assert 32 * (sum(classes.values()) - classes["mov"]) / numbers <= IMAGE_BUDGET[memory_format]
    tile = re.search(r"GemmShapeILi(\d+)ELi(\d+)ELi\d+E", product["kernel"])
    assert tile, product["kernel"]
    m, k, (tile_m, tile_n) = size * size, 9 * channels, map(int, tile.groups())
    assert product["cp_async_bytes"] == k * (m * -(-n // tile_n) + n * -(-m // tile_m))
    assert product["global_store"]["bytes"] == 2 * m * n
    assert product["shared"]["bank_conflict_factor"] == 1.0


@pytest.mark.parametrize(("kernel", "stride", "activation"), DEPTHWISE_BUDGET, ids=str)
def test_a_depthwise_layer_keeps_its_budget(
    simulated: CudaOps, counters: Any, kernel: int, stride: int, activation: str
) -> None:
    """Instructions of the product for an output, moves apart: a multiplication for each column of four taps."""
    channels, size = 64, 56
    window = in_groups(channels, (kernel, kernel), stride=stride, padding=kernel // 2)
    conv = Conv(simulated, channels, channels, window, activation=activation, **FORMS["static"])
    x = torch.randn(1, channels, size, size).to(torch.bfloat16).to(memory_format=LAST)
    _, product = counters(conv.call_on(x))
    outputs, classes = channels * (size // stride) ** 2, product["classes"]
    assert product["global_store"] == product["global_store"] | {"bytes": 2 * outputs, "efficiency": 1.0}
    executed = 32 * (sum(classes.values()) - classes["mov"]) / outputs
    assert executed <= DEPTHWISE_BUDGET[kernel, stride, activation]
    assert product["shared"]["bank_conflict_factor"] < 1.01, "stores of the weights apart, which are few"


@pytest.fixture
def stream(simulated: CudaOps) -> Iterator[int]:
    made = ctypes.c_void_p()
    ok(simulator.runtime.cudaStreamCreate(ctypes.byref(made)))
    yield made.value or 0
    ok(simulator.runtime.cudaStreamDestroy(made))


@pytest.mark.parametrize("groups", [1, 32])
@pytest.mark.parametrize("form", ["dynamic", "static"])
def test_a_captured_call_runs_again_on_other_images(simulated: CudaOps, stream: int, form: str, groups: int) -> None:
    """K is divided among blocks, whose counters are cleared within the graph."""
    channels = 128 if groups == 1 else 32
    conv = Conv(simulated, channels, 32, in_groups(groups, padding=1), **FORMS[form])
    draws = (Draw(BASE_SEED, "captured", index).normal(1, channels, 4, 4) for index in range(2))
    first, second = (x.to(torch.bfloat16).to(memory_format=LAST) for x in draws)
    image = simulated.put(first)
    packed, spec, window = simulated.put(conv.packed), conv.spec.to_ints(), conv.window
    again = Captured(
        simulated, stream, lambda: torch.ops.pyquant_sim.qconv2d.default(image, packed, None, spec, window)
    )
    for x in (first, second, first):
        image.copy_(x)
        again()
        simulated.finish()
        assert torch.equal(simulated.get(again.out), conv.want(x))
    again.free(simulated)
