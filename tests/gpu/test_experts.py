"""The experts of a bank in two launches, where they multiply codes: every row has the bits of its expert's own layer,
whoever else has rows, in every mode of the simulator; nothing is copied and nobody waits: a call can be captured."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import accept
import problems
import pytest
import simulator
import torch
from cuda_ops import CudaOps
from expert_banks import Bank, Biased, Interleaved, register_banks, routing
from launches import Captured, counted, ok
from sample import sampled
from steps import draw_steps, products
from torch import Tensor, nn

import pyquant
from pyquant import QLinear, ops
from pyquant.nn import expert_rows, expert_rules
from pyquant.ops import one_launch, plan, routed

NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
SM = NATIVE.device_info(0)["sm"] if NATIVE.device_count() else 80  # without a device every test is skipped
ROWS = {
    row["name"]: row
    for row in NATIVE.kernel_table()
    if row["compiled"] and row["experts_only"] and "s8" in row["x"] and row["sm_min"] <= SM < row["sm_end"]
}
pytestmark = pytest.mark.skipif(not ROWS, reason="no row of experts for this chip is built")
CPU = ops.layout_for(torch.device("cpu"))
FIRST = list({row["engine"]: name for name, row in reversed(ROWS.items())}.values())  # of mma.sync, of wgmma
N, K = 72, 192
# Rows of each expert; the last number: rows of none.
COUNTS = ([0, 5, 1, 0, 130, 2, 0], [0, 0, 70, 0], [1] * 9 + [3], [64, 64, 0], [0, 0, 4], [0, 0])


@pytest.fixture
def device(there: CudaOps) -> CudaOps:
    return there


@pytest.fixture
def any_mode(anywhere: CudaOps) -> CudaOps:
    return anywhere


@dataclass
class Layers:
    """Layers of one spec: their float operands, packed for the CPU and for the device."""

    spec: ops.LinearSpec
    codes: list[Tensor]
    scale: list[Tensor]
    bias: list[Tensor | None]
    inputs: list[tuple[Tensor | None, Tensor | None]]  # scale and zero point of static ones
    one_level: Layers | None = None  # of two levels: the 8-bit products, which the CPU multiplies by

    @staticmethod
    def of(count: int, spec: ops.LinearSpec, seed: object = 0) -> Layers:
        draw = problems.Draw(problems.BASE_SEED, "experts", seed, spec.n, spec.k, spec.w_bits)
        if spec.two_level:
            return Layers._of_two_levels(count, spec, draw)
        groups = spec.k // spec.group_size if spec.group_size else 1
        top = 7 if spec.w_bits == 4 else 127
        codes = [draw.codes(-top, top, spec.n, spec.k).to(torch.int8) for _ in range(count)]
        scale = [draw.uniform(spec.n, groups) / 40 + 1e-3 for _ in range(count)]
        scale = [s if spec.group_size else s[:, 0].contiguous() for s in scale]
        return Layers(spec, codes, scale, *Layers._rest(count, spec, draw))

    @staticmethod
    def _of_two_levels(count: int, spec: ops.LinearSpec, draw: problems.Draw) -> Layers:
        codes, scale, products_of, bases = [], [], [], []
        for _ in range(count):
            own, step = draw_steps(draw, spec.n, spec.k, spec.group_size)
            step[:, :1] = 1  # the scale of a channel is then the one that packing reads off
            bases.append(torch.exp2(draw.codes(-9, -4, spec.n).float()) * 1.25)
            codes.append(own), scale.append(bases[-1][:, None] * step), products_of.append(products(own, step))
        rest = Layers._rest(count, spec, draw)
        one_level = Layers(replace(spec, w_bits=8, group_size=0, two_level=False), products_of, bases, *rest)
        return Layers(spec, codes, scale, *rest, one_level)

    @staticmethod
    def _rest(count: int, spec: ops.LinearSpec, draw: problems.Draw) -> tuple[Any, Any]:
        bias = [draw.normal(spec.n) if spec.has_bias else None for _ in range(count)]
        inputs: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * count
        if spec.input == "static":
            zero = [None if spec.x_symmetric else draw.codes(-100, 100, 1).to(torch.int32) for _ in range(count)]
            inputs = [(draw.uniform(1) / 20 + 0.01, z) for z in zero]
        return bias, inputs

    def packed(self, layout: str, device: CudaOps | None = None) -> tuple[ops.LinearSpec, list[Tensor]]:
        spec = replace(self.spec, layout=layout)
        pack = device.pack_linear if device else ops.pack_linear
        stored = [ops.pack_int4(c) if spec.w_bits == 4 else c for c in self.codes]
        parts = zip(stored, self.scale, self.bias, self.inputs, strict=True)
        return spec, [pack(c, s, spec.to_ints(), b, *inputs) for c, s, b, inputs in parts]

    def want(self, x: Tensor, counts: list[int]) -> Tensor:
        """Each layer by itself, on the CPU; zeros for the rows of none."""
        spec, packed = (self.one_level or self).packed(CPU)
        parts = [ops.qlinear(part, p, None, spec.to_ints()) for part, p in zip(x.split(counts)[:-1], packed)]
        return torch.cat([*parts, torch.zeros(counts[-1], spec.n, dtype=x.dtype)])


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts[:-1]).cumsum(0).to(torch.int32)


def call_there(device: CudaOps, x: Any, packed: Any, ends: Any, spec: ops.LinearSpec, *more: Any) -> Tensor:
    """The op on operands that lie on the device. more: rows, x_scale, x_zero_point, out_dtype, kernel."""
    library = torch.ops.pyquant_sim if device.is_simulator else torch.ops.pyquant
    y: Tensor = library._grouped_linear.default(x, packed, ends, spec.to_ints(), *more)
    return y


def grouped(device: CudaOps, x: Tensor, packed: Any, counts: list[int], spec: ops.LinearSpec, *more: Any) -> Tensor:
    there = [device.put(t) for t in packed]
    y = call_there(device, device.put(x), there, device.put(ends_of(counts)), spec, *map(device.put, more))
    device.finish()
    got: Tensor = device.get(y)
    return got


def spec_of(name: str, n: int = N, k: int = K, **more: Any) -> ops.LinearSpec:
    row = ROWS[name]
    group = row["group_multiple"] if row["groups_only"] else row["step_multiple"] if row["steps_only"] else 0
    layout = "rows_blocked128" if "blocked128" in row["w_layouts"] else "rows"
    bits = 4 if "s4" in row["w"] else 8
    return ops.LinearSpec(n, k, bits, group, layout=layout, two_level=row["steps_only"], **more)


def same(got: Tensor, want: Tensor, what: str) -> None:
    accept.t1(got, want, what=what, waiver="few rows, or rows of no expert: nearly constant")


# ---- the op


@pytest.mark.parametrize("name", ROWS)
def test_every_row_has_the_bits_of_its_layer(any_mode: CudaOps, name: str) -> None:
    for index, counts in enumerate(COUNTS):
        symmetric = index % 2 == 0
        spec = spec_of(
            name,
            x_qmin=-127 if symmetric else -128,
            x_symmetric=symmetric,
            has_bias=index % 3 != 1,
            activation=("none", "relu", "silu")[index % 3],
            input=("dynamic", "static")[index // 2 % 2],
        )
        layers = Layers.of(len(counts) - 1, spec, (name, index))
        x = problems.Draw(problems.BASE_SEED, "experts x", index).normal(sum(counts), K)
        x = x.to((torch.bfloat16, torch.float32, torch.float16)[index % 3])
        _, packed = layers.packed(spec.layout, any_mode)
        got = grouped(any_mode, x, packed, counts, spec, None, None, None, None, name)
        same(got, layers.want(x, counts), f"{name} {counts}")


@pytest.mark.parametrize("name", ROWS)
def test_tiles_that_begin_at_any_row_store_whole_rows(any_mode: CudaOps, name: str) -> None:
    """Channels that vector stores take, over more than one tile of them: the epilogue that nearly all layers run."""
    for index, counts in enumerate(([3, 0, 70, 1, 129, 6], [0, 33, 2, 260, 1])):
        spec = spec_of(name, 272 if index else 144, has_bias=True, activation=("relu", "none")[index])
        layers = Layers.of(len(counts) - 1, spec, (name, "plain", index))
        x = problems.Draw(problems.BASE_SEED, "experts plain", index).normal(sum(counts), K).to(torch.bfloat16)
        _, packed = layers.packed(spec.layout, any_mode)
        got = grouped(any_mode, x, packed, counts, spec, None, None, None, None, name)
        same(got, layers.want(x, counts), f"{name} {counts}")


TILES = [*product(ROWS, ["many experts", "long ones"])]


@pytest.mark.parametrize("case", sampled(TILES, len(TILES) // 4, "tiles"))
def test_blocks_take_tile_after_tile(any_mode: CudaOps, case: tuple[str, str]) -> None:
    """More tiles than a device has multiprocessors, so that blocks which stay take several, and more steps of K than a
    pipeline has buffers; experts of more tiles of rows than lie abreast; rows of no expert behind each."""
    name, shape = case
    k, which, counts = (1600, [e * e % 3 for e in range(150)], [1 + e % 4 * 11 for e in range(150)] + [200])
    if shape == "long ones":
        k, which, counts = (192, [0, 1, 2, 1, 0], [2307, 0, 5, 700, 33, 150])
    spec = spec_of(name, 272, k, has_bias=True)
    few = Layers.of(3, spec, (name, shape))
    x = problems.Draw(problems.BASE_SEED, "experts tiles", shape).normal(sum(counts), k).to(torch.bfloat16)
    ends = torch.tensor(counts[:-1]).cumsum(0)
    owner = torch.tensor([*which, 3]).repeat_interleave(torch.tensor(counts))
    there = [any_mode.put(p) for p in few.packed(spec.layout, any_mode)[1]]
    everyone = [there[e] for e in which]
    where = [any_mode.put(t) for t in (x, ends.to(torch.int32))]
    y = call_there(any_mode, where[0], everyone, where[1], spec, None, None, None, None, name)
    any_mode.finish()
    order = owner.argsort(stable=True)
    want = torch.empty(len(x), spec.n, dtype=x.dtype)
    want[order] = few.want(x[order], torch.bincount(owner, minlength=4).tolist())
    same(any_mode.get(y), want, f"{name} {shape}")


@pytest.mark.parametrize("name", ROWS)
def test_the_sums_are_those_of_64_bits(device: CudaOps, name: str) -> None:
    """Codes that come ready, their scales and zero points a row, against products of int64."""
    spec, counts = spec_of(name, x_qmin=-128, x_symmetric=False, has_bias=True), [0, 3, 40, 0, 1, 0]
    if spec.group_size:
        pytest.skip("sums of groups are float sums: numerics.gemm has their order, and the test above compares with it")
    layers, total = Layers.of(5, spec, "int64"), sum(counts)
    draw = problems.Draw(problems.BASE_SEED, "experts codes")
    codes = draw.codes(-128, 127, total, K).to(torch.int8)
    x_scale, zero = draw.uniform(total) / 9 + 0.01, draw.codes(-128, 127, total).to(torch.int32)
    _, packed = layers.packed(spec.layout, device)
    got = grouped(device, codes, packed, counts, spec, None, x_scale, zero, torch.float32, name)
    want, owner = [], torch.repeat_interleave(torch.arange(5), torch.tensor(counts[:-1]))
    for row, e in enumerate(owner.tolist()):
        acc = (codes[row].long() - zero[row].long()) @ layers.codes[e].long().T
        t = acc.to(torch.float32) * layers.scale[e] * x_scale[row]
        want.append(t + layers.bias[e])  # type: ignore[operator]
    accept.t1(got, torch.stack(want), what=name)


@pytest.mark.parametrize("inputs", ["dynamic", "static"])
@pytest.mark.parametrize("name", ROWS)
def test_chosen_rows_are_quantised_in_the_order_of_their_experts(any_mode: CudaOps, name: str, inputs: str) -> None:
    spec, counts = spec_of(name, x_qmin=-128, x_symmetric=False, input=inputs), [0, 9, 0, 20, 1, 2]
    layers = Layers.of(5, spec, "chosen")
    draw = problems.Draw(problems.BASE_SEED, "experts chosen")
    wide = draw.normal(13, 2 * K).to(torch.bfloat16)
    wide[4, 7] = float("nan")  # poisons its own rows alone
    x, rows = wide[:, :K], draw.codes(0, 12, sum(counts)).long()
    _, packed = layers.packed(spec.layout, any_mode)
    got = grouped(any_mode, x, packed, counts, spec, rows, None, None, None, name)
    want = layers.want(x[rows], counts)
    assert torch.equal(got.isnan(), want.isnan())
    assert bool(got[:-2].isnan().any()) == (inputs == "dynamic" and bool((rows[:-2] == 4).any()))
    same(got.nan_to_num(3.0), want.nan_to_num(3.0), name)


@pytest.mark.parametrize("name", FIRST)
def test_more_experts_than_one_launch_knows(device: CudaOps, name: str) -> None:
    """513 experts and more are two launches of products."""
    spec, counts = spec_of(name, 16, 32 * max(1, spec_of(name).group_size // 32)), [0] * 601
    counts[3], counts[511], counts[512], counts[599], counts[600] = 2, 1, 20, 3, 2
    few = Layers.of(4, spec, "many")
    which = {3: 0, 511: 1, 512: 2, 599: 3}
    stocks = (few.codes, few.scale, few.bias, few.inputs)
    layers = Layers(spec, *([stock[which.get(e, 0)] for e in range(600)] for stock in stocks))
    _, packed = few.packed(spec.layout, device)
    x = problems.Draw(problems.BASE_SEED, "many").normal(sum(counts), spec.k)
    there = [device.put(p) for p in packed]
    everyone = [there[which.get(e, 0)] for e in range(600)]
    y = call_there(device, device.put(x), everyone, device.put(ends_of(counts)), spec, None, None, None, None, name)
    device.finish()
    same(device.get(y), layers.want(x, counts), "600 experts")


@pytest.mark.parametrize("name", FIRST)
def test_experts_lie_anywhere(device: CudaOps, name: str) -> None:
    """In any order, at distances that have only 16 bytes in common; the first one need not be the lowest."""
    spec, counts = spec_of(name, has_bias=True), [3, 1, 9, 0, 4, 1]
    layers, total = Layers.of(5, spec, "anywhere"), sum(counts)
    _, packed = layers.packed(spec.layout, device)
    size = packed[0].numel()
    heap = device.put(torch.zeros(8 * size + 16 * 100, dtype=torch.uint8))
    there = []
    for place, one in zip((5, 0, 3, 1, 6), packed, strict=True):
        at = place * (size // 16 * 16 + 16) + 16 * 7 * place
        heap[at : at + size] = device.put(one)
        there.append(heap[at : at + size])
    x = problems.Draw(problems.BASE_SEED, "anywhere").normal(total, K)
    y = call_there(device, device.put(x), there, device.put(ends_of(counts)), spec, None, None, None, None, name)
    device.finish()
    same(device.get(y), layers.want(x, counts), name)


def test_no_k_and_no_columns(device: CudaOps) -> None:
    for n, k in ((N, 0), (0, 32)):
        spec = ops.LinearSpec(n, k, has_bias=True, layout="rows")
        layers, counts = Layers.of(3, spec), [2, 0, 3, 1]
        _, packed = layers.packed(spec.layout, device)
        x = torch.zeros(6, k)
        assert torch.equal(grouped(device, x, packed, counts, spec), layers.want(x, counts))


@pytest.mark.parametrize("name", FIRST)
def test_ends_that_lead_nowhere_do_not_leave_the_matrices(device: CudaOps, name: str) -> None:
    """Nobody looks at the numbers on a device: wrong ones give wrong rows, and touch nothing else."""
    spec, layers = spec_of(name), Layers.of(4, spec_of(name), "nowhere")
    _, packed = layers.packed(spec.layout, device)
    there = [device.put(p) for p in packed]
    device.mode("checked")
    for ends in ([3, 1, 9, 4], [-5, 2, 1000, 2**31 - 1], [2**31 - 1, -(2**31), 0, 8]):
        x, where = device.put(torch.ones(8, K)), device.put(torch.tensor(ends).int())
        y = call_there(device, x, there, where, spec, None, None, None, None, name)
        device.finish()
        assert y.shape == (8, N)


def test_what_does_not_go_is_refused(device: CudaOps) -> None:
    name = next(iter(ROWS))
    spec = spec_of(name)
    layers, counts, x = Layers.of(2, spec), [3, 3, 0], torch.randn(6, K)
    _, packed = layers.packed(spec.layout, device)
    for words, call in (
        ("argument 'ends'", lambda: grouped(device, x, packed[:1], counts, spec)),
        ("argument 'rows'", lambda: grouped(device, x, packed, counts, spec, torch.zeros(6))),
        ("argument 'kernel'", lambda: grouped(device, x, packed, counts, spec, None, None, None, None, "no such row")),
        (
            "experts must be 0",
            lambda: grouped(device, x, packed, counts, spec, None, None, None, None, "gemm_simt_any"),
        ),
    ):
        with pytest.raises((RuntimeError, pyquant.PyquantError), match=words):
            call()
    odd = replace(spec, w_bits=4, group_size=16)
    _, few = Layers.of(2, odd).packed(odd.layout, device)
    with pytest.raises((RuntimeError, pyquant.PyquantError), match="no kernel takes this problem"):
        grouped(device, x, few, counts, odd)


# ---- launches


@pytest.mark.skipif(simulator.runtime is None, reason="the simulator counts; a GPU's profiler is another tool")
@pytest.mark.parametrize("experts", [1, 3, 40, 300])
@pytest.mark.parametrize("name", FIRST)
def test_a_projection_is_two_launches_whatever_the_number_of_experts(device: CudaOps, name: str, experts: int) -> None:
    spec = spec_of(name, 16)
    _, packed = Layers.of(1, spec).packed(spec.layout, device)
    there = [device.put(packed[0])] * experts
    x, rows = device.put(torch.randn(5, K)), device.put(torch.arange(10) % 5)
    ends = device.put(torch.tensor([10] * experts, dtype=torch.int32))
    nodes, _ = counted(lambda: call_there(device, x, there, ends, spec, rows, None, None, None, name))
    nodes.pop("tensor_map_encode", None)  # on the host, once for an address
    assert nodes == {"kernel": 2}, "neither copies nor memsets nor synchronisation"


@pytest.mark.skipif(simulator.runtime is None, reason="of a GPU: test_torch_ops.py")
@pytest.mark.parametrize("mode", ["plain", "lazy"])
@pytest.mark.parametrize("name", FIRST)
def test_a_captured_call_runs_again_with_another_routing(device: CudaOps, name: str, mode: str) -> None:
    runtime = simulator.runtime
    assert runtime is not None
    spec = spec_of(name, has_bias=True)
    layers = Layers.of(4, spec, "graph")
    there = [device.put(p) for p in layers.packed(spec.layout, device)[1]]
    x, rows = device.put(torch.zeros(20, K)), device.put(torch.zeros(30, dtype=torch.int64))
    ends = device.put(torch.zeros(4, dtype=torch.int32))
    call_there(device, x, there, ends, spec, rows, None, None, None, name)  # before a capture, as torch asks for
    device.finish()
    stream = ctypes.c_void_p()
    ok(runtime.cudaStreamCreate(ctypes.byref(stream)))
    graph = Captured(
        device, int(stream.value or 0), lambda: call_there(device, x, there, ends, spec, rows, None, None, None, name)
    )
    assert graph.nodes == 2
    device.mode(mode)
    draw = problems.Draw(problems.BASE_SEED, "graph")
    for counts in ([30, 0, 0, 0, 0], [0, 7, 0, 20, 3], [1, 2, 3, 4, 20]):
        x.copy_(draw.normal(20, K)), rows.copy_(draw.codes(0, 19, 30).long()), ends.copy_(ends_of(counts))
        graph()
        device.finish()
        same(device.get(graph.out), layers.want(x.clone()[rows.clone()], counts), str(counts))
    graph.free(device)
    ok(runtime.cudaStreamDestroy(stream))


# ---- whole banks


class Served:
    """torch.ops.pyquant for expert_rows, carried out on the device; counts the calls."""

    def __init__(self, device: CudaOps) -> None:
        self._device, self.calls = device, 0
        self._grouped_linear = self

    def default(self, x: Tensor, packed: Any, ends: Tensor, spec: Any, rows: Tensor | None, out_dtype: Any) -> Tensor:
        put, self.calls = self._device.put, self.calls + 1
        where = [put(v) for v in (x, ends, rows)]
        layout = ops.LinearSpec.from_ints(spec)
        y = call_there(self._device, where[0], packed, where[1], layout, where[2], None, None, out_dtype)
        self._device.finish()
        got: Tensor = self._device.get(y)
        return got


def move(bank: Any, device: CudaOps) -> None:
    """The layers of a bank to the simulator's memory, in the layout of a GPU: what `.cuda()` does."""
    for layer in (layer for pair in bank.experts() for layer in pair):
        spec = replace(ops.LinearSpec.from_ints(layer._spec), layout="rows")
        state = layer.state_dict()
        scale = state["weight_scale"].reshape(spec.n, -1)
        scale = scale if spec.group_size else scale[:, 0].contiguous()
        inputs = (state.get("input_scale"), state.get("input_zero_point"))
        codes = ops.unpack_linear(layer.storage, layer._spec)
        packed = device.pack_linear(codes, scale, spec.to_ints(), state.get("bias"), *inputs)
        layer._buffers["storage"], layer._spec = device.put(packed), spec.to_ints()


class Routed(nn.Module):
    """A bank under a routing of its own."""

    def __init__(self, bank: nn.Module, ids: Tensor, weights: Tensor) -> None:
        super().__init__()
        self.experts, self.ids, self.weights = bank, ids, weights

    def forward(self, x: Tensor) -> Any:
        return self.experts(x, self.ids, self.weights)


SCHEMES = {  # by the families, of any chip
    "s8s8_experts": (pyquant.W8A8Dynamic(), pyquant.W8A8Dynamic(symmetric_inputs=False), pyquant.W8A8()),
    "s8s4_experts": (pyquant.W4A8Dynamic(None), pyquant.W4A8(None, symmetric_inputs=False)),
    "s8s4_groups_experts": (pyquant.W4A8Dynamic(32), pyquant.W4A8(32)),
}


@pytest.mark.parametrize(("family", "scheme"), [(f, s) for f, all_of in SCHEMES.items() for s in all_of], ids=str)
@pytest.mark.parametrize("kind", [Bank, Biased, Interleaved])
def test_a_bank_waits_for_nobody_and_has_the_bits_of_the_cpu(
    device: CudaOps, monkeypatch: pytest.MonkeyPatch, kind: Any, family: str, scheme: Any
) -> None:
    if not any(row["family"].partition("_")[2] == family for row in ROWS.values()):
        pytest.skip("no row for these experts is built")
    monkeypatch.setattr(expert_rules, "_RULES", dict(expert_rules._RULES))
    register_banks()
    torch.manual_seed(3)
    x, (ids, weights) = torch.randn(23, 64, dtype=torch.bfloat16), routing(23, 6, 3)
    ids[0] = torch.tensor([3, 4, 5])
    model = Routed(kind(6, 64, 32), ids, weights)
    data = None if scheme.inputs.dynamic else [x.float()]
    bank: Any = pyquant.quantize_(model, scheme, data=data, check_speed=False).experts
    ids[4, 1], ids[7, 0] = 6, -1  # experts elsewhere
    cases = [(x, ids, weights), (x[:1], ids[:1], weights[:1]), (x[:0], ids[:0], weights[:0])]
    cases.append((x, torch.full_like(ids, 2), weights))  # all to one
    cases.append((x, torch.full_like(ids, 9), weights))  # all elsewhere
    want = [bank(*case) for case in cases]
    if device.is_simulator:
        move(bank, device)
        served = Served(device)
        monkeypatch.setattr(expert_rows, "_ops", served)
        monkeypatch.setattr(one_launch, "is_on_gpu", lambda _: True)
        monkeypatch.setattr(plan.Device, "of", staticmethod(lambda _: plan.Device(**NATIVE.device_info(0))))
        one_launch.forget()
        monkeypatch.setattr(expert_rows.Sorted, "split", None)  # would wait
        for case, wanted in zip(cases, want, strict=True):
            assert torch.equal(bank(*case), wanted)
        assert served.calls == 2 * len(cases)
        return
    bank.cuda()
    there = [[t.cuda() for t in case] for case in cases]  # copies of pageable memory wait
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = [bank(*case) for case in there]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for one, wanted in zip(got, want, strict=True):
        assert torch.equal(one.cpu(), wanted)


@pytest.mark.parametrize("inputs", ["dynamic", "static"])
def test_a_compiled_graph_takes_the_same_launch(device: CudaOps, monkeypatch: pytest.MonkeyPatch, inputs: str) -> None:
    """The op of graphs, which is Python: the numbers of rows stay on the device."""
    if not device.is_simulator:
        pytest.skip("of a GPU: test_whole_models.py")
    spec, counts = spec_of(next(iter(ROWS)), input=inputs), [3, 0, 12, 1, 4]
    layers, x = Layers.of(4, spec, "graph op"), torch.randn(20, K)
    x_scale = None
    want = layers.want(x, counts)
    if inputs == "dynamic":  # codes are given, as a token has the same for all of its experts
        x, x_scale, _ = ops.quantize_dynamic(x, "per_token", 0, True, spec.x_qmin, spec.x_qmax)
    packed = [device.put(one) for one in layers.packed(spec.layout, device)[1]]

    class ServedCodes:
        def default(self, x: Tensor, packed: Any, ends: Tensor, spec: Any, *more: Any) -> Tensor:
            where = [device.put(v) for v in (x, ends, *more)]
            y = call_there(device, where[0], packed, where[1], ops.LinearSpec.from_ints(spec), *where[2:])
            device.finish()
            return device.get(y)  # type: ignore[no-any-return]

    monkeypatch.setattr(routed, "_ops", SimpleNamespace(_grouped_linear=ServedCodes()))
    monkeypatch.setattr(routed._Rows, "of", None)  # would wait
    monkeypatch.setattr(one_launch, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(plan.Device, "of", staticmethod(lambda _: plan.Device(**NATIVE.device_info(0))))
    one_launch.forget()
    got = routed.routed_linear(x, torch.tensor(counts[:-1]), packed, spec.to_ints(), torch.float32, x_scale)
    one_launch.forget()
    assert torch.equal(got, want)


def test_layers_of_other_kinds_are_called_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plan has no row for: is_one_call asks it."""
    monkeypatch.setattr(one_launch, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(plan, "select", lambda *a, only_compiled=True, **k: _select(*a, only_compiled=False, **k))
    x = torch.zeros(2, 64)
    for scheme, layout, goes, on_hopper in (
        (pyquant.W8A8Dynamic(), "rows", True, True),
        (pyquant.W4A8Dynamic(32), "rows", True, True),
        (pyquant.W4A8Dynamic(None), "rows", True, True),
        (pyquant.W4A8Dynamic(None), "rows_blocked128", True, True),
        (pyquant.W4A8Dynamic(64), "rows_blocked128", False, True),
        (pyquant.W4A8TwoLevelDynamic(64), "rows_blocked128", False, True),
        (pyquant.W4A8TwoLevelDynamic(64), "rows", False, False),
        (pyquant.W4A8Dynamic(16), "rows", False, False),
        (pyquant.W4A16(32), "rows", False, False),
    ):
        layers = [QLinear.from_float(nn.Linear(64, 16), scheme).eval() for _ in range(2)]
        for layer in layers:
            if layer._spec:
                spec = ops.LinearSpec.from_ints(layer._spec)
                if "TwoLevel" in str(scheme):  # a CPU has the products
                    spec = replace(spec, w_bits=4, group_size=64, two_level=True)
                layer._spec = replace(spec, layout=layout).to_ints()
        for served, device in ((goes, (80, 108, 166912, 41943040)), (on_hopper, (90, 132, 232448, 52428800))):
            monkeypatch.setattr(plan.Device, "of", staticmethod(lambda _, of=device: plan.Device(*of)))
            one_launch.forget()
            with torch.no_grad():
                assert expert_rows.is_one_call(layers, x, 2) == served, (scheme, device)
    one_launch.forget()


_select = plan.select
