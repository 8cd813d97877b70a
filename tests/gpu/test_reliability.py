"""What only a GPU can show: large shapes and indices, streams, graphs, threads, memory, modules, long mixed runs.

Equality is bit for bit, against the CPU or the exact product. PYQUANT_SOAK_SECONDS sets the length of the mixed run.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from freivalds import wrong_rows
from problems import BASE_SEED
from torch import Tensor, nn

import pyquant
from pyquant import ops
from pyquant.bench.model_shapes import MODELS, shapes_of
from pyquant.core.presets import scheme_from_name
from pyquant.numerics.gemm import gemm as specification
from pyquant.numerics.pack import pack_int4
from pyquant.numerics.quantize import quantize as quantize_specification

DEVICE = "cuda"
NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
ROWS = {row["name"]: row for row in NATIVE.kernel_table() if row["compiled"]}
PLAIN = [
    name
    for name, row in ROWS.items()
    if "s8" in row["x"] and "s32" in row["out"] and "natural" in row["w_layouts"]
    if not row["groups_only"] and not row["steps_only"] and not row["channel_multiple"]
]
SCHEMES = (
    "W8A8Dynamic",
    "W8A8",
    "W4A8Dynamic(group_size=None)",
    "W4A8Dynamic(group_size=128)",
    "W4A8TwoLevelDynamic",
    "W4A4Dynamic",
)
NO_GPU = "torch sees no CUDA device: streams, graphs and gigabytes need one"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)]


def same(got: Tensor, want: Tensor, what: object = "") -> None:
    """Equal type, shape and bits; NaN equals NaN."""
    assert got.dtype == want.dtype, what
    assert got.shape == want.shape, what
    assert torch.equal(got.cpu().nan_to_num(nan=12345.0), want.cpu().nan_to_num(nan=12345.0)), what


def layer_of(scheme: str, k: int = 512, n: int = 256, dtype: torch.dtype = torch.float32) -> pyquant.QLinear:
    """A layer on the CPU; static schemes expect unit Gaussians."""
    torch.manual_seed(BASE_SEED)
    parsed = scheme_from_name(scheme)
    scale = 4.5 / 127 if parsed.is_static and parsed.inputs else None
    return pyquant.QLinear.from_float(nn.Linear(k, n), parsed, input_scale=scale).to(dtype=dtype)


def inputs(m: int, k: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(BASE_SEED + seed)).to(dtype)


def need_memory(gigabytes: float) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes:g} GiB of free device memory, has {free:.1f}")


def codes(rows: int, k: int, kind: str = "s8", seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(BASE_SEED + seed)
    low, high = (-8, 8) if kind == "s4" else (-128, 128)
    return torch.randint(low, high, (rows, k), generator=generator, device=DEVICE, dtype=torch.int8)


class Launch:
    """x w' as int32 by a row of the table, on the current stream; refused() says why it cannot."""

    def __init__(self, name: str, x: Tensor, w: Tensor) -> None:
        self.name, self.x, self.w = name, x, w
        kind = "s8" if "s8" in ROWS[name]["w"] else "s4"
        self.memory = w if kind == "s8" else pack_int4(w)
        self.y = torch.full((x.shape[0], w.shape[0]), 0x5A5A5A5A, dtype=torch.int32, device=DEVICE)
        k = x.shape[1]
        self.problem = {
            "m": x.shape[0],
            "n": w.shape[0],
            "k": k,
            "x": "s8",
            "w": kind,
            "out": "s32",
            "ldx": x.stride(0) if x.shape[0] > 1 else k,
        }
        rows = {"x_align": x.stride(0), "w_align": self.memory.stride(0), "out_align": 4 * w.shape[0]}
        self.problem |= {name: math.gcd(stride, 16) for name, stride in rows.items()}
        self.index = torch.cuda.current_device()
        self.workspace = torch.empty(0, dtype=torch.uint8, device=DEVICE)

    def refused(self) -> str | None:
        ok, _, _, text = NATIVE.refusal(self.name, self.problem, NATIVE.device_info(self.index), False)
        return None if ok else str(text)

    def __call__(self) -> Tensor:
        needed = NATIVE.workspace_bytes(self.name, self.problem, self.index)
        if needed > self.workspace.numel():
            self.workspace = torch.empty(needed, dtype=torch.uint8, device=DEVICE)
        operands = {"x": self.x.data_ptr(), "w": self.memory.data_ptr(), "out": self.y.data_ptr()}
        operands |= {"workspace": self.workspace.data_ptr()} if needed else {}
        NATIVE.gemm(self.name, self.problem, operands, {}, self.index, torch.cuda.current_stream().cuda_stream)
        return self.y


def weights_for(name: str, n: int, k: int) -> Tensor:
    return codes(n, k, "s8" if "s8" in ROWS[name]["w"] else "s4", seed=1)


# ---- G02, G03: large shapes and indices


@pytest.mark.parametrize(("k", "n"), shapes_of(MODELS))
def test_real_layer_shapes_whole(k: int, n: int) -> None:
    """Every element of the product, by the probabilistic check, and 4096 of them one by one."""
    need_memory(24)
    ran = 0
    for m in (1, 16, 129, 4096, 16384 if n <= 10240 else 4096):
        x = codes(m, k, seed=m)
        for name in PLAIN:
            launch = Launch(name, x, weights_for(name, n, k))
            if launch.refused() or (ROWS[name]["engine"] == "byte_wise" and m * n * k > 2**38):
                continue
            y = launch()
            assert wrong_rows(y, x, launch.w, seed=m) == [], f"{name} M={m}"
            i = torch.randint(0, m, (4096,), device=DEVICE)
            j = torch.randint(0, n, (4096,), device=DEVICE)
            exact = (x[i].double() * launch.w[j].double()).sum(1)
            assert torch.equal(y[i, j].double(), exact), f"{name} M={m}"
            ran += 1
    assert ran


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(
    ("m", "n", "k", "gigabytes"),
    [(262_160, 8192, 64, 12), (131_088, 64, 16_384, 6), (65_552, 32_784, 32, 12)],
    ids=["out>2^31", "x>2^31", "both tails"],
)
def test_more_elements_than_an_int32_counts(name: str, m: int, n: int, k: int, gigabytes: float) -> None:
    need_memory(gigabytes)
    x = codes(m, k)
    launch = Launch(name, x, weights_for(name, n, k))
    if reason := launch.refused():
        pytest.skip(reason)
    assert wrong_rows(launch(), x, launch.w) == []


@pytest.mark.parametrize("name", PLAIN)
def test_rows_further_apart_than_an_int32_counts(name: str) -> None:
    need_memory(6)
    stride = 2**31 + 16
    buffer = torch.zeros(stride + 128, dtype=torch.int8, device=DEVICE)
    x = buffer.as_strided((2, 128), (stride, 1))
    x.copy_(codes(2, 128))
    launch = Launch(name, x, weights_for(name, 64, 128))
    if reason := launch.refused():
        pytest.skip(reason)
    assert wrong_rows(launch(), x.contiguous(), launch.w) == []


@pytest.mark.parametrize("count", [2**31 - 1, 2**31, 2**31 + 8])
def test_quantising_and_packing_more_than_2_to_the_31(count: int) -> None:
    need_memory(24)
    block = torch.randn(2**20 + 7, generator=torch.Generator(DEVICE).manual_seed(3), device=DEVICE).half()
    x = block.repeat(-(-count // block.numel()))[:count]
    scale = torch.tensor([0.03], device=DEVICE)
    q = ops.quantize(x, scale)
    want = quantize_specification(block, scale)
    for start in range(0, count, 512 * block.numel()):
        part = q[start : start + 512 * block.numel()]
        assert torch.equal(part, want.repeat(-(-part.numel() // want.numel()))[: part.numel()]), start
    del x
    q.clamp_(-8, 7)
    packed = ops.pack_int4(q)
    back = ops.unpack_int4(packed, count)
    assert torch.equal(back, q)


# ---- G06 to G09: load, streams, graphs


@contextlib.contextmanager
def busy() -> Iterator[torch.cuda.Stream]:
    """A second stream that keeps the chip full for some hundred milliseconds."""
    stream = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(400):
            a @ a
    yield stream
    stream.synchronize()


@pytest.mark.parametrize("name", PLAIN)
def test_equal_bits_while_the_chip_is_busy(name: str) -> None:
    shapes = ((16, 256, 4096), (130, 520, 1024), (4, 4096, 512))
    launches = [Launch(name, codes(m, k), weights_for(name, n, k)) for m, n, k in shapes]
    launches = [launch for launch in launches if not launch.refused()]
    if not launches:
        pytest.skip("the row takes none of the shapes")
    for launch in launches:
        first = launch().clone()
        assert wrong_rows(first, launch.x, launch.w) == []
        different = torch.zeros((), dtype=torch.int64, device=DEVICE)
        with busy():
            for _ in range(200):
                launch.y.fill_(-1)
                different += (launch() != first).any()
        assert int(different) == 0, launch.problem


Op = Callable[[Tensor], Any]


def op_cases() -> dict[str, tuple[Op, Tensor]]:
    """name -> (op of one tensor, a tensor): every kind of kernel that the package launches."""
    scale = torch.tensor([0.03], device=DEVICE)  # made here: inside of a capture nothing may come from the host
    cases: dict[str, tuple[Op, Tensor]] = {
        "quantize": (lambda x: ops.quantize(x, scale), inputs(64, 512)),
        "quantize_dynamic": (lambda x: ops.quantize_dynamic(x)[0], inputs(64, 512)),
        "pack_int4": (ops.pack_int4, codes(64, 512, "s4").cpu()),
        "dequantize": (lambda q: ops.dequantize(q, scale), codes(64, 512).cpu()),
    }
    for scheme in SCHEMES:
        cases[scheme] = (layer_of(scheme).to(DEVICE), inputs(64, 512))
    return cases


@pytest.fixture(scope="module")
def cases() -> dict[str, tuple[Op, Tensor]]:
    return op_cases() if torch.cuda.is_available() else {}


OPS = ("quantize", "quantize_dynamic", "pack_int4", "dequantize", *SCHEMES)


@pytest.mark.parametrize("name", OPS)
def test_a_consumer_waits_for_its_producer(cases: dict[str, tuple[Op, Tensor]], name: str) -> None:
    op, x = cases[name]
    source = x.to(DEVICE)
    want = op(source).clone()
    stale = torch.zeros((), dtype=torch.int64, device=DEVICE)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(200):
            late = torch.zeros_like(source)
            torch.cuda._sleep(300_000)  # the copy below ends long after the launch has been asked for
            late.copy_(source, non_blocking=True)
            stale += (op(late) != want).any()
    stream.synchronize()
    assert int(stale) == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_layer_on_two_streams_at_once(scheme: str) -> None:
    layer = layer_of(scheme).to(DEVICE)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    xs = [inputs(m, 512, m).to(DEVICE) for m in (3, 130)]
    wants = [layer(x).clone() for x in xs]
    wrong = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in streams]
    torch.cuda.synchronize()
    started = time.monotonic()
    for _ in range(1000):
        for stream, x, want, bad in zip(streams, xs, wants, wrong, strict=True):
            with torch.cuda.stream(stream):
                bad += (layer(x) != want).any()
    torch.cuda.synchronize()
    assert [int(bad) for bad in wrong] == [0, 0]
    assert time.monotonic() - started < 60, "two streams wait for each other"


@pytest.mark.parametrize("name", OPS)
def test_a_captured_op_replays_with_new_inputs(cases: dict[str, tuple[Op, Tensor]], name: str) -> None:
    op, x = cases[name]
    static = x.to(DEVICE)
    op(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(static)
    for seed in range(100):
        fresh = x.roll(seed, 0) if x.dtype == torch.int8 else inputs(*x.shape, seed)
        static.copy_(fresh)
        graph.replay()
        same(y.clone(), op(fresh.to(DEVICE)), (name, seed))


@pytest.mark.parametrize("name", PLAIN)
def test_a_launch_inside_a_capture_allocates_nothing(name: str) -> None:
    launch = Launch(name, codes(16, 512), weights_for(name, 256, 512))
    if reason := launch.refused():
        pytest.skip(reason)
    launch()
    torch.cuda.synchronize()
    # A capture empties torch's cache, and its end instantiates the graph: the device's free memory moves whatever is
    # captured. What torch holds for tensors moves for what is inside alone.
    torch.cuda.empty_cache()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        launch()
    torch.cuda.synchronize()
    # A live graph holds the state of torch's random generator, which is allocated once for all of them.
    other, graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    spare = torch.zeros(1, device=DEVICE)
    with torch.cuda.graph(other):
        spare.zero_()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph):
        launch()
    assert torch.cuda.memory_allocated() == before
    launch.y.fill_(-1)
    graph.replay()
    torch.cuda.synchronize()
    assert wrong_rows(launch.y, launch.x, launch.w) == []


_FIRST_IN_A_CAPTURE = """
import sys, torch
sys.path[:0] = {paths!r}
from test_reliability import DEVICE, Launch, codes, weights_for, wrong_rows
launch = Launch({name!r}, codes(16, 512), weights_for({name!r}, 256, 512))
if launch.refused():
    print("refused", launch.refused())
    sys.exit()
launch.workspace = torch.empty(1 << 24, dtype=torch.uint8, device=DEVICE)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    launch()
for _ in range(2):
    launch.y.fill_(-1)
    graph.replay()
    torch.cuda.synchronize()
    assert wrong_rows(launch.y, launch.x, launch.w) == []
print("right")
"""


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_the_first_launch_of_a_process_may_be_captured(loading: str) -> None:
    """Code that is loaded when a kernel is first used, and the permission for its shared memory, must not disturb a
    capture: a process of its own for each row, of every family one."""
    here = Path(__file__).resolve()
    paths = [str(here.parent), str(here.parents[1] / "support"), str(here.parents[1]), str(here.parents[2])]
    first: dict[str, str] = {}
    for name in PLAIN:
        first.setdefault(ROWS[name]["family"], name)
    told = {}
    for name in first.values():
        done = subprocess.run(
            [sys.executable, "-c", _FIRST_IN_A_CAPTURE.format(paths=paths, name=name)],
            capture_output=True,
            text=True,
            env={**os.environ, "CUDA_MODULE_LOADING": loading},
            timeout=300,
            check=False,
        )
        told[name] = done.stdout.strip() if done.returncode == 0 else done.stderr[-1000:]
    assert all(words == "right" or words.startswith("refused") for words in told.values()), told
    assert "right" in told.values()


# ---- G10, G11, G12: memory, values, compilers


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ten_thousand_calls_keep_memory_where_it_is(scheme: str) -> None:
    layer, x = layer_of(scheme).to(DEVICE), inputs(16, 512).to(DEVICE)
    for _ in range(100):
        layer(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    for _ in range(10_000):
        layer(x)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]) == before


@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W4A8Dynamic(group_size=128)"])
def test_out_of_memory_leaves_nothing_broken(scheme: str) -> None:
    need_memory(4)
    layer = layer_of(scheme, 128, 8192).to(DEVICE)
    x = inputs(8, 128).to(DEVICE)
    want = layer(x).clone()
    big = torch.zeros(1 << 20, 128, device=DEVICE)  # its result needs 32 GiB
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    kept = torch.cuda.memory_allocated()
    try:
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 2**30) / total))
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError, match="allocate"):
                layer(big)
            same(layer(x), want)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == kept
    same(layer(x), want)


@pytest.mark.parametrize("m", [1, 7, 64, 129, 300])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_row_spoils_itself_alone(m: int, value: float) -> None:
    layer = layer_of("W8A8Dynamic")
    x = inputs(m, 512)
    bad = sorted({0, m // 2, m - 1})
    x[bad, [0, 100, 511][: len(bad)]] = value
    want = layer(x)
    got = layer.to(DEVICE)(x.to(DEVICE)).cpu()
    assert bool(got[bad].isnan().all())
    same(got, want)


def test_subnormals_and_zero_k() -> None:
    layer = layer_of("W8A8Dynamic")
    x = inputs(9, 512) * 2.0**-140
    x[3] = 0
    same(layer.to(DEVICE)(x.to(DEVICE)), layer.cpu()(x))
    empty = pyquant.QLinear(0, 24, scheme=pyquant.W8A8Dynamic())
    same(empty.to(DEVICE)(torch.zeros(5, 0, device=DEVICE)), empty.cpu()(torch.zeros(5, 0)))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W4A8Dynamic(group_size=128)"])
def test_compiled_equals_eager(scheme: str, mode: str) -> None:
    pytest.importorskip("triton", reason="inductor needs triton on a GPU")
    layer = layer_of(scheme).to(DEVICE)
    model = nn.Sequential(layer, nn.ReLU())
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    with torch.no_grad():
        for m in (1, 5, 64, 64, 5):
            x = inputs(m, 512, m).to(DEVICE)
            same(compiled(x).clone(), model(x), m)


def test_exported_equals_eager() -> None:
    layer = layer_of("W8A8Dynamic").to(DEVICE)
    x = inputs(6, 512).to(DEVICE)
    with torch.no_grad():
        program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
        other = inputs(33, 512, 1).to(DEVICE)
        same(program.module()(other), layer(other))


# ---- G13: the CPU's bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zero_point", [None, 7], ids=["symmetric", "affine"])
def test_a_hundred_million_values_quantise_as_on_the_cpu(dtype: torch.dtype, zero_point: int | None) -> None:
    """Random bit patterns: every exponent, NaN, infinities and subnormals among them."""
    generator = torch.Generator(DEVICE).manual_seed(BASE_SEED)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(integer)
    scale = torch.tensor([0.0371])
    zero = None if zero_point is None else torch.tensor([zero_point], dtype=torch.int32)
    low = -127 if zero is None else -128
    for _ in range(10):
        bits = torch.randint(limits.min, limits.max, (10_000_000,), generator=generator, device=DEVICE, dtype=integer)
        x = bits.view(dtype)
        there = ops.quantize(x, scale.to(DEVICE), None if zero is None else zero.to(DEVICE), "per_tensor", 0, low, 127)
        here = ops.quantize(x.cpu(), scale, zero, "per_tensor", 0, low, 127)
        same(there, here)
        same(ops.unpack_int4(ops.pack_int4(there.clamp(-8, 7)), there.numel()), here.clamp(-8, 7))


def test_requantised_outputs_are_the_cpus() -> None:
    total = 0
    w, w_scale = codes(4096, 64), torch.rand(4096, device=DEVICE) * 1e-3 + 1e-4
    out_scale = torch.tensor([0.021], device=DEVICE)
    for seed in range(12):
        x = codes(2048, 64, seed=seed)
        call = {"w_scale": w_scale, "out_scale": out_scale, "out_dtype": torch.int8}
        same(ops.gemm_s8s8(x, w, **call), specification(x, w, **call), seed)
        total += x.shape[0] * w.shape[0]
    assert total >= 10**8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fake_quantisers_and_histograms_are_the_cpus(dtype: torch.dtype) -> None:
    """As above, and finite for what refuses or sums: masks, results, gradients of learned scales, counts of bins."""
    generator = torch.Generator(DEVICE).manual_seed(BASE_SEED)
    scale = torch.rand(2500, generator=generator, device=DEVICE) * 0.1 + 1e-3
    for _ in range(10):
        x = torch.randn(2500, 4000, generator=generator, device=DEVICE).to(dtype)
        grad = torch.randn(2500, 4000, generator=generator, device=DEVICE).to(dtype)
        for there, here in zip(
            ops.fake_quantize(x, scale, granularity="per_channel"),
            ops.fake_quantize(x.cpu(), scale.cpu(), granularity="per_channel"),
            strict=True,
        ):
            same(there, here)
        for there, here in zip(ops.fake_quantize_dynamic(x), ops.fake_quantize_dynamic(x.cpu()), strict=True):
            same(there, here)
        for there, here in zip(
            ops.fake_quantize_lsq_backward(grad, x, scale, granularity="per_channel"),
            ops.fake_quantize_lsq_backward(grad.cpu(), x.cpu(), scale.cpu(), granularity="per_channel"),
            strict=True,
        ):
            same(there, here)
        same(ops.magnitude_histogram(x, 3), ops.magnitude_histogram(x.cpu(), 3))


# ---- G14 to G17: devices, threads, refusals, module loading


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_second_device_is_used_when_it_is_asked_for(scheme: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("not run: this machine has one CUDA device")
    layer, x = layer_of(scheme), inputs(33, 512)
    want = layer(x)
    there = layer.to("cuda:1")
    assert torch.cuda.current_device() == 0
    got = there(x.to("cuda:1"))
    assert got.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    same(got, want)
    with pytest.raises(pyquant.errors.ArgumentError, match="device"):
        there(x.to("cuda:0"))


_SECOND_DEVICE_ALONE = """
import os, subprocess, sys, torch
sys.path[:0] = {paths!r}
from test_reliability import layer_of, inputs
torch.cuda.set_device(1)
layer_of("W8A8Dynamic").to("cuda:1")(inputs(33, 512).to("cuda:1"))
torch.cuda.synchronize(1)
query = ["nvidia-smi", "--query-compute-apps=pid,gpu_bus_id", "--format=csv,noheader"]
told = subprocess.run(query, capture_output=True, text=True, check=False).stdout
print(sum(line.split(",")[0].strip() == str(os.getpid()) for line in told.splitlines()))
"""


def test_a_process_of_the_second_device_holds_nothing_on_the_first() -> None:
    """A context of the CUDA runtime costs hundreds of megabytes; ours is a runtime of its own beside torch's."""
    if torch.cuda.device_count() < 2:
        pytest.skip("not run: this machine has one CUDA device")
    here = Path(__file__).resolve()
    paths = [str(here.parent), str(here.parents[1] / "support"), str(here.parents[1]), str(here.parents[2])]
    done = subprocess.run(
        [sys.executable, "-c", _SECOND_DEVICE_ALONE.format(paths=paths)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if done.stdout.strip() == "0":
        pytest.skip("not run: nvidia-smi does not see this process (its numbers are a container's)")
    assert done.stdout.strip() == "1"


def test_threads_launch_rows_of_different_shared_memory() -> None:
    failures: list[BaseException | str] = []

    def work(number: int) -> None:
        try:
            order = random.Random(number)
            with torch.cuda.stream(torch.cuda.Stream()):
                launches = [Launch(n, codes(16, 256, seed=number), weights_for(n, 128, 256)) for n in PLAIN]
                launches = [launch for launch in launches if not launch.refused()]
                for _ in range(500):
                    order.choice(launches)()
                torch.cuda.current_stream().synchronize()
                for launch in launches:
                    if wrong_rows(launch(), launch.x, launch.w):
                        failures.append(f"thread {number}: {launch.name}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures


def test_five_hundred_refusals_leave_no_trace() -> None:
    layer, x = layer_of("W8A8Dynamic").to(DEVICE), inputs(8, 512).to(DEVICE)
    want = layer(x).clone()
    wrong: list[Callable[[], object]] = [
        lambda: layer(x.cpu()),
        lambda: layer(x[:, :100]),
        lambda: layer(x.to(torch.int64)),
        lambda: ops.quantize(x, torch.tensor([0.1])),
        lambda: ops.gemm_s8s8(codes(4, 64), codes(8, 32)),
    ]
    for i in range(500):
        with pytest.raises((pyquant.errors.PyquantError, RuntimeError)):
            wrong[i % len(wrong)]()
        if i % 5 == 4:
            same(layer(x), want, i)
    torch.cuda.synchronize()


_FIRST_AND_HUNDREDTH = """
import hashlib, sys, torch
sys.path[:0] = {paths!r}
from test_reliability import layer_of, inputs, SCHEMES
for scheme in SCHEMES:
    layer, x = layer_of(scheme).to("cuda"), inputs(33, 512).to("cuda")
    results = [layer(x).cpu() for _ in range(100)]
    assert all(torch.equal(r, results[0]) for r in results), scheme
    print(scheme, hashlib.sha256(results[0].numpy().tobytes()).hexdigest())
"""


def test_lazy_and_eager_module_loading_give_equal_bits() -> None:
    here = Path(__file__).resolve()
    paths = [str(here.parent), str(here.parents[1] / "support"), str(here.parents[1]), str(here.parents[2])]
    told = []
    for loading in ("LAZY", "EAGER"):
        done = subprocess.run(
            [sys.executable, "-c", _FIRST_AND_HUNDREDTH.format(paths=paths)],
            capture_output=True,
            text=True,
            env={**os.environ, "CUDA_MODULE_LOADING": loading},
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        told.append(done.stdout)
    assert told[0] == told[1]
    assert told[0].count("\n") == len(SCHEMES)


# ---- G18: everything at once


def _held() -> int:
    """Bytes of the device in use; of this process as torch knows them, where other processes run tests beside it."""
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_reserved() if "PYTEST_XDIST_WORKER" in os.environ else total - free


def test_a_long_mixed_run() -> None:
    """Random layers, sizes and streams; graphs among them; one result in a hundred is compared with the CPU's."""
    seconds = float(os.environ.get("PYQUANT_SOAK_SECONDS", "20"))
    order = random.Random(BASE_SEED)
    layers = {scheme: (layer_of(scheme), layer_of(scheme).to(DEVICE)) for scheme in SCHEMES}
    streams = [torch.cuda.Stream() for _ in range(3)]
    static = inputs(16, 512).to(DEVICE)
    captured = {}
    for scheme, (_, there) in layers.items():
        there(static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = there(static)
        captured[scheme] = graph, y
    calls = compared = 0
    flat = None
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        scheme = order.choice(SCHEMES)
        here, there = layers[scheme]
        if order.random() < 0.1:
            torch.cuda.synchronize()
            captured[scheme][0].replay()
            if calls % 100 == 0:
                same(captured[scheme][1], there(static), scheme)
        else:
            m = order.choice((1, 2, 7, 16, 33, 64, 100, 130, 300))
            x = inputs(m, 512, order.randrange(50))
            with torch.cuda.stream(order.choice(streams)):
                y = there(x.to(DEVICE))
                if calls % 100 == 0:
                    same(y, here(x), (scheme, m))
                    compared += 1
        calls += 1
        if calls == 2000:
            torch.cuda.synchronize()
            flat = _held()
    torch.cuda.synchronize()
    if flat is not None:
        assert _held() - flat <= 64 << 20
    assert compared > 0
