"""What a layer's call asks of the device and of the driver, counted by the simulator: kernels, memsets, tensor maps. A
call inside of a graph and on two streams at once, as far as the simulator has them: it runs what a graph holds in its
order, and one launch at a time, in the order in which two threads come."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import accept
import problems
import pytest
import simulator
import torch
from cuda_ops import CudaOps
from launches import Captured, counted, ok
from torch import Tensor

from pyquant import ops
from pyquant.ops import tuned

NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
M, N, K = 40, 128, 4096  # few tokens and channels: K is divided
FORMS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "affine": {"x_qmin": -128, "x_symmetric": False},
    "static": {"input": "static"},
}


@pytest.fixture(autouse=True)
def _stream_k() -> Iterator[None]:
    """One row, which is in every build, takes the problems below, whatever rows the build has beside it."""
    rows = [row["name"] for row in NATIVE.kernel_table() if row["family"] == "sm90_s8s8" and row["compiled"]]
    row = next((name for name in rows if "streamk" in name), None)
    if row is None or not NATIVE.device_count():
        pytest.skip("no row of sm90_s8s8 that divides K is built, or there is no device")
    sizes = {(48, N, K), (48, N + 64, K), (48, 2 * N, K), (32, N, K // 2), (32, N, K)}
    kinds = [("s8", "s8", out, False, "natural", 0) for out in ("bf16", "s32")]
    table = tuned.Table()
    choices = [tuned.Choice(*kind, n, k, m, row, 1.0, row, 1.0) for kind in kinds for m, n, k in sizes]
    table.add(NATIVE.device_info(0)["name"], choices)
    tuned.activate(table)
    yield
    tuned.activate(tuned.load())


@pytest.fixture
def device(simulated: CudaOps) -> CudaOps:
    return simulated


def codes_of(name: str, *shape: int) -> Tensor:
    return problems.Draw(problems.BASE_SEED, "launches", name).codes(-127, 127, *shape).to(torch.int8)


class Layer:
    """A W8A8 layer whose weights lie on the device, with its input, and the same on the CPU."""

    def __init__(self, device: CudaOps, name: str, m: int = M, n: int = N, **options: Any) -> None:
        self._device, self._spec = device, ops.LinearSpec(n, K, **options)
        scale = problems.Draw(problems.BASE_SEED, "launches", name).uniform(n) + 0.1
        x_scale = torch.tensor([0.02]) if self._spec.input == "static" else None
        self._operands = (codes_of(name, n, K), scale, None, x_scale, None, None, None)
        self._packed = device.put(device.pack_linear(*self._operands[:2], self._spec.to_ints(), x_scale=x_scale))
        self.take(problems.Draw(problems.BASE_SEED, "launches", name, "x").normal(m, K).to(torch.bfloat16))

    def take(self, x: Tensor) -> None:
        self.take_there(x, self._device.put(x))

    def take_there(self, x: Tensor, there: Tensor) -> None:
        self._x, self._there = x, there

    def write(self, x: Tensor) -> None:
        """Other rows where the others lie."""
        self._x = x
        self._there.copy_(x)

    def move_weights(self) -> None:
        self._packed = self._device.put(self._packed.clone())

    def __call__(self) -> Tensor:
        spec = self._spec.to_ints()
        return torch.ops.pyquant_sim.qlinear.default(self._there, self._packed, None, spec, torch.bfloat16)

    def check(self, got: Tensor) -> None:
        self._device.finish()
        spec = dataclasses.replace(self._spec, layout=ops.layout_for(torch.device("cpu"))).to_ints()
        packed = torch.ops.pyquant.pack_linear.default(*self._operands, spec)
        accept.t1(self._device.get(got), torch.ops.pyquant.qlinear.default(self._x, packed, None, spec, torch.bfloat16))


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_is_two_kernels_that_overlap(device: CudaOps, form: str) -> None:
    counts, kernels = counted(Layer(device, form, **FORMS[form]))
    assert (counts["kernel"], counts.get("memset", 0)) == (2, 0), counts
    assert "StreamK" in str(kernels[1]), "K is not divided: nothing counts"
    for kernel in kernels:
        assert "programmatic_stream_serialization" in kernel["attributes"], kernel


@pytest.mark.parametrize("mode", ["plain", "random"])
def test_a_gated_block_is_four_kernels(device: CudaOps, mode: str) -> None:
    """down(silu(gate(x)) * up(x)), gate and up merged: as nn.GatedFeed calls them, the gate is computed by what
    quantises for `down`."""
    device.mode(mode)
    x = problems.Draw(problems.BASE_SEED, "launches", "gated").normal(M, K).to(torch.bfloat16)
    spec, back = ops.LinearSpec(2 * K, K), ops.LinearSpec(N, K)
    scales = [problems.Draw(problems.BASE_SEED, "launches", "gated", n).uniform(n) + 0.1 for n in (2 * K, N)]
    layers = [(codes_of("gated", s.n, K), scale, s) for s, scale in zip((spec, back), scales, strict=True)]

    def block(there: Any, x: Tensor, packed: list[Tensor]) -> Tensor:
        both = there.qlinear.default(x, packed[0], None, spec.to_ints(), torch.bfloat16)
        codes, scale, _ = there.activation_mul_quantize.default(both.narrow(1, 0, K), both.narrow(1, K, K))
        y: Tensor = there.qlinear.default(codes, packed[1], None, back.to_ints(), torch.bfloat16, scale)
        return y

    on_device = [device.put(device.pack_linear(w, scale, s.to_ints())) for w, scale, s in layers]
    there = device.put(x)
    found: list[Tensor] = []
    counts, kernels = counted(lambda: found.append(block(torch.ops.pyquant_sim, there, on_device)))
    # Where codes come in, K is divided after a launch that clears the counters: here it is, as there are few channels.
    products = [kernel["kernel"] for kernel in kernels if "clear" not in kernel["kernel"]]
    assert (len(products), len(kernels), counts.get("memset", 0)) == (4, 5, 0), counts
    assert [("GemmUniversal" in name, "Gate" in name) for name in products] == [
        (False, False),
        (True, False),
        (False, True),
        (True, False),
    ]
    assert all("programmatic_stream_serialization" in kernel["attributes"] for kernel in kernels), kernels
    device.finish()
    rows = [dataclasses.replace(s, layout=ops.layout_for(torch.device("cpu"))) for *_, s in layers]
    here = [ops.pack_linear(w, scale, s.to_ints()) for (w, scale, _), s in zip(layers, rows, strict=True)]
    spec, back = rows
    accept.t1(device.get(found[0]), block(torch.ops.pyquant, x, here))


@pytest.mark.parametrize("mode", ["plain", "checked", "lazy", "random"])
def test_counters_are_cleared_by_what_writes_the_codes(device: CudaOps, mode: str) -> None:
    """Two layers in turn, in memory that nobody clears between."""
    layers = [Layer(device, form, **FORMS[form]) for form in ("dynamic", "static")]
    device.mode(mode)
    for _ in range(2):
        for layer in layers:
            layer.check(layer())


def test_counters_are_cleared_where_codes_come_in(device: CudaOps) -> None:
    layer = Layer(device, "codes", **FORMS["static"])
    layer.take(codes_of("x", M, K))
    counts, kernels = counted(layer)
    assert (counts["kernel"], counts.get("memset", 0)) == (2, 0), counts
    assert all("programmatic_stream_serialization" in kernel["attributes"] for kernel in kernels), kernels
    for _ in range(2):
        layer.check(layer())


def test_tensor_maps_are_made_once(device: CudaOps) -> None:
    layer = Layer(device, "maps", M - 1, N + 64)  # as no other test has them
    calls = [counted(layer)[0] for _ in range(6)]
    made = [counts.get("tensor_map_encode", 0) for counts in calls]
    assert made[0] == 2, "one of x and one of the weights"
    # The codes of x lie where the allocator puts them; the weights stay.
    assert min(made) == 0, made
    assert max(made[1:]) <= 1, made
    assert all("driver_entry_point" not in counts for counts in calls[1:]), calls
    layer.move_weights()
    assert counted(layer)[0]["tensor_map_encode"] >= 1
    layer.check(layer())


def test_tensor_maps_are_of_a_shape(device: CudaOps) -> None:
    """Other matrices at the same addresses."""
    x, w = device.put(codes_of("flat x", M * K)), device.put(codes_of("flat w", 2 * N * K))
    for m, n, k in ((M, N, K), (M, 2 * N, K), (M - 8, N, K // 2), (M, N, K), (M - 8, N, K)):
        a, b = x[: m * k].view(m, k), w[: n * k].view(n, k)
        out: list[Tensor] = []
        call = lambda a=a, b=b, out=out: out.append(  # noqa: E731
            torch.ops.pyquant_sim.gemm_s8s8.default(a, b, *[None] * 7, 0, "none", 0.0, 0.0, -127, 127, torch.int32)
        )
        _, kernels = counted(call)
        assert "Sm90" in str(kernels[-1]), kernels
        device.finish()
        assert torch.equal(device.get(out[0]).double(), a.double() @ b.double().T), (m, n, k)


@pytest.fixture
def streams() -> Iterator[list[int]]:
    runtime = simulator.runtime
    assert runtime is not None
    made = [ctypes.c_void_p() for _ in range(2)]
    for stream in made:
        ok(runtime.cudaStreamCreate(ctypes.byref(stream)))
    yield [int(stream.value or 0) for stream in made]
    for stream in made:
        ok(runtime.cudaStreamDestroy(stream))


def rows_of(name: str, form: str) -> Tensor:
    if form == "codes":
        return codes_of(name, M, K)
    return problems.Draw(problems.BASE_SEED, "streams", name).normal(M, K).to(torch.bfloat16)


@pytest.mark.parametrize("mode", ["plain", "lazy"])
@pytest.mark.parametrize("form", [*FORMS, "codes"])
def test_a_captured_call_runs_again_on_other_rows(device: CudaOps, streams: list[int], form: str, mode: str) -> None:
    layer = Layer(device, form, **FORMS["static" if form == "codes" else form])
    layer.take(rows_of("first", form))
    layer.check(layer())  # a call before a capture, as torch asks for
    graph = Captured(device, streams[0], layer)
    assert graph.nodes == 2
    device.mode(mode)
    for name in ("second", "third"):
        layer.write(rows_of(name, form))
        counts, kernels = counted(graph)
        assert counts == {"kernel": 2}, "neither memsets nor synchronisation"
        assert all("programmatic_stream_serialization" in kernel["attributes"] for kernel in kernels)
        layer.check(graph.out)
    graph.free(device)


def test_a_capture_sees_the_legacy_stream(device: CudaOps, streams: list[int]) -> None:
    """The planted bug: a layer that launches elsewhere than it was told."""

    class Elsewhere(Layer):
        def __call__(self) -> Tensor:
            torch.ops.pyquant_sim.use_stream(torch.empty(0), 0, True)
            return super().__call__()

    layer = Elsewhere(device, "elsewhere")
    with pytest.raises(RuntimeError, match="device 0"):
        Captured(device, streams[0], layer)
    assert b"legacy stream while a stream is captured" in simulator.runtime.ptxsim_last_report()
    with device.on_stream(0):
        pass


def test_two_streams_do_not_disturb_each_other(device: CudaOps, streams: list[int]) -> None:
    """Two layers, each with its own stream and its own thread: rows, codes, counters and sums are of a call."""
    calls = 6
    layers = [Layer(device, form, **FORMS[form]) for form in ("dynamic", "affine")]
    rows = [[rows_of(f"{index} {call}", "float") for call in range(calls)] for index in range(2)]
    taken = [[(x, device.put(x)) for x in own] for own in rows]
    results: list[list[Tensor]] = [[], []]
    start = threading.Barrier(2)

    def work(index: int) -> None:
        start.wait()
        with device.on_stream(streams[index]):
            for x, there in taken[index]:
                layers[index].take_there(x, there)
                results[index].append(layers[index]())

    def both() -> None:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    _, kernels = counted(both)
    used = [kernel["stream"] for kernel in kernels]
    assert 0 not in used
    assert [used.count(stream) for stream in set(used)] == [2 * calls] * 2
    for index in range(2):
        for (x, there), out in zip(taken[index], results[index], strict=True):
            layers[index].take_there(x, there)
            layers[index].check(out)
