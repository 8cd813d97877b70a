"""Convolutions on CUDA without a matrix of patches: rows that read images through a window, and the op around them,
against the executable specification and the CPU's op, bit for bit; what a call launches, allocates and moves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import accept
import pytest
import simulator
import torch
from cuda_ops import CudaOps, cuda_ops
from gpu_device import MODES, SENTINEL, Memory
from launches import counted
from problems import BASE_SEED, Draw
from steps import draw_steps, products
from torch import Tensor

from pyquant import ops
from pyquant.core.patches import Patches
from pyquant.errors import ArgumentError
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
CPU = ops.layout_for(torch.device("cpu"))
LAST = torch.channels_last
DTYPES = {"s32": torch.int32, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "s8": torch.int8}


# ---- rows of the kernel table


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
    for index in range(8):
        draw = Draw(BASE_SEED, "windows", name, index)
        case = Windowed.draw(draw, draw.choice((8, 64, 72, 130)))
        got = case.launch(native, device, name, "s32", {})
        want = accumulate(case.rows, case.weights)
        accept.t0(got, want, what=f"{name} {index}", waiver="one pixel, or one channel, may be all")


@pytest.mark.parametrize("out", ["f32", "bf16", "s8"])
@pytest.mark.parametrize("name", ROWS)
def test_epilogues_over_images(native: Any, device: Memory, name: str, out: str) -> None:
    """A scale and a zero point a row, as images have them."""
    for index in range(3):
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


# ---- the op


@pytest.fixture(scope="module")
def _found() -> CudaOps:
    found = cuda_ops()
    if isinstance(found, str):
        pytest.skip(found)
    if not ROWS:
        pytest.skip("no row that reads images is built for this chip")
    return found


@pytest.fixture(params=list(MODES))
def anywhere(request: pytest.FixtureRequest, _found: CudaOps) -> Iterator[CudaOps]:
    if request.param != "plain" and not _found.is_simulator:
        pytest.skip("a GPU has one way to run")
    _found.mode(request.param)
    yield _found
    _found.mode("plain")


@pytest.fixture
def there(_found: CudaOps) -> CudaOps:
    _found.mode("plain")
    return _found


@pytest.fixture
def simulated(there: CudaOps) -> CudaOps:
    if not there.is_simulator:
        pytest.skip("the simulator counts; a GPU's profiler is another tool")
    return there


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


FORMS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "affine": {"x_qmin": -128, "x_symmetric": False},
    "static": {"input": "static"},
    "static affine": {"input": "static", "x_qmin": -128, "x_symmetric": False},
}
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
    for index, (channels, n, patches) in enumerate(WINDOWS):
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


def test_more_images_than_a_launch_has_blocks(there: CudaOps) -> None:
    """65 535 is CUDA's limit of a grid's second dimension."""
    conv = Conv(there, 16, 8, Patches((1, 1), padding=(0, 0, 0, 1)))
    conv.check(torch.randn(65_600, 16, 1, 1))


# ---- groups of channels


def in_groups(groups: int, kernel: tuple[int, int] = (3, 3), **geometry: Any) -> Patches:
    return replace(Patches.make(kernel, **geometry), groups=groups)


GROUPED = (
    (64, 64, in_groups(64, padding=1)),  # eight bytes of each tap at once
    (72, 72, in_groups(72, (5, 4), stride=2, padding=2, dilation=(1, 2))),
    (20, 20, in_groups(20, padding=(0, 2))),  # not whole eights of channels
    (16, 48, in_groups(16, (1, 3))),  # several results a channel
    (32, 64, in_groups(4, padding=1)),  # a word of a group's channels at once
    (80, 24, in_groups(2, (1, 1), stride=(1, 2))),
    (6, 9, in_groups(3, (2, 2), padding=1)),
    (132, 132, in_groups(33)),
)


@pytest.mark.parametrize("form", FORMS)
def test_groups_give_the_bits_of_the_cpu(anywhere: CudaOps, form: str) -> None:
    for index, (channels, n, patches) in enumerate(GROUPED):
        draw = Draw(BASE_SEED, "conv in groups", form, index)
        conv = Conv(anywhere, channels, n, patches, activation=("none", "relu", "silu")[index % 3], **FORMS[form])
        x = draw.normal(3, channels, 6, 11) * torch.tensor([1.0, 4.0, 0.2]).reshape(3, 1, 1, 1)
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


def test_a_layer_in_groups_is_two_launches(simulated: CudaOps) -> None:
    x = torch.randn(1, 64, 9, 9).to(torch.bfloat16).to(memory_format=LAST)
    for form, launches in (("static", 2), ("dynamic", 3)):
        call = call_of(Conv(simulated, 64, 64, in_groups(64, padding=1), **FORMS[form]), simulated, x)
        before = torch.ops.pyquant_sim.allocations(x)
        counts, kernels = counted(call)
        assert torch.ops.pyquant_sim.allocations(x) - before == 2
        assert (counts["kernel"], counts.get("memset", 0)) == (launches, 0), kernels


def test_blocked_weights_are_not_for_groups(there: CudaOps) -> None:
    spec = ops.LinearSpec(128, 128, w_bits=4, layout="rows_blocked128")
    packed = there.pack_linear(torch.zeros(128, 64, dtype=torch.uint8), torch.ones(128), spec.to_ints())
    window = in_groups(2, (1, 1)).to_ints()
    with pytest.raises(ArgumentError, match=r"rows_blocked128' and 2 groups; allowed: layout 'rows'"):
        there.qconv2d(torch.zeros(1, 256, 3, 3), packed, None, spec.to_ints(), window)


# ---- what a call costs


def call_of(conv: Conv, device: CudaOps, x: Tensor, *more: Any) -> Any:
    """The op on operands that lie on the device."""
    packed, image = device.put(conv.packed), device.put(x)
    spec, window = conv.spec.to_ints(), conv.window
    return lambda: torch.ops.pyquant_sim.qconv2d.default(image, packed, None, spec, window, *more)


@pytest.mark.parametrize(("form", "launches"), [("static", 2), ("dynamic", 3), ("affine", 3)])
@pytest.mark.parametrize("window", [Patches((3, 3), padding=(1, 1, 1, 1)), Patches((1, 1))], ids=["3x3", "1x1"])
def test_a_layer_is_two_launches_and_one_more_for_a_range(
    simulated: CudaOps, form: str, launches: int, window: Patches
) -> None:
    """And the result and one piece of memory for everything else."""
    x = torch.randn(1, 128, 12, 12).to(torch.bfloat16).to(memory_format=LAST)
    call = call_of(Conv(simulated, 128, 64, window, **FORMS[form]), simulated, x)
    before = torch.ops.pyquant_sim.allocations(x)
    counts, kernels = counted(call)
    assert torch.ops.pyquant_sim.allocations(x) - before == 2
    assert (counts["kernel"], counts.get("memset", 0)) == (launches, 0), kernels
    assert "patches" not in str(kernels)


def test_codes_that_lie_as_kernels_read_them_stay_where_they_are(simulated: CudaOps) -> None:
    codes = torch.randint(-127, 128, (2, 64, 9, 9), dtype=torch.int8).to(memory_format=LAST)
    for patches in (Patches((3, 3)), Patches((1, 1), (2, 2)), Patches((1, 1))):
        conv = Conv(simulated, 64, 64, patches, codes_out=True, **FORMS["static"])
        counts, kernels = counted(call_of(conv, simulated, codes))
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
DEPTHWISE_BUDGET = 55.0
IMAGE_BUDGET = {torch.contiguous_format: 20.0, LAST: 17.0}


@pytest.mark.parametrize("memory_format", IMAGE_BUDGET, ids=["channels_first", "channels_last"])
def test_an_image_is_read_once_and_patches_are_written_nowhere(
    simulated: CudaOps, counters: Any, memory_format: torch.memory_format
) -> None:
    """Bytes: floats of the image in, codes out in whole sectors; a product fetches the rows of its tiles, no more."""
    channels, n, size = 64, 64, 56
    conv = Conv(simulated, channels, n, Patches((3, 3), padding=(1, 1, 1, 1)), **FORMS["static"])
    x = torch.randn(1, channels, size, size).to(torch.bfloat16).to(memory_format=memory_format)
    images, product = counters(call_of(conv, simulated, x))
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


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, LAST], ids=["channels_first", "channels_last"])
def test_a_depthwise_layer_keeps_its_budget(
    simulated: CudaOps, counters: Any, memory_format: torch.memory_format
) -> None:
    """Instructions of the product for an output, moves apart: 9 multiplications of 12 that whole words hold."""
    channels, size = 64, 56
    conv = Conv(simulated, channels, channels, in_groups(channels, padding=1), **FORMS["static"])
    x = torch.randn(1, channels, size, size).to(torch.bfloat16).to(memory_format=memory_format)
    _, product = counters(call_of(conv, simulated, x))
    outputs, classes = channels * size * size, product["classes"]
    assert product["global_store"] == product["global_store"] | {"bytes": 2 * outputs, "efficiency": 1.0}
    assert 32 * (sum(classes.values()) - classes["mov"]) / outputs <= DEPTHWISE_BUDGET
