"""The experts of a bank, integer weights under 16-bit activations, in one launch: real numbers within the stated bound,
a row's bits whatever else is multiplied, in every mode of the simulator; nothing is copied and nobody waits."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field, replace
from typing import Any

import accept
import pytest
import simulator
import torch
from cuda_ops import CudaOps
from expert_banks import Bank, Biased, Interleaved, register_banks, routing
from gpu_device import MODES, SENTINEL, Memory
from launches import Captured, counted, ok
from problems import BASE_SEED, Draw
from torch import Tensor, nn

import pyquant
from pyquant import QLinear
from pyquant.nn import expert_rows, expert_rules
from pyquant.numerics.pack import pack_int4
from pyquant.ops import one_launch, plan, routed

NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
SM = NATIVE.device_info(0)["sm"] if NATIVE.device_count() else 80  # without a device every test is skipped
FAMILIES = (
    *("sm80_w8a16_experts", "sm80_w4a16_experts"),
    *("sm90_w8a16_rounded_experts", "sm90_w4a16_rounded_experts"),
)
ROWS = {
    row["name"]: row
    for row in NATIVE.kernel_table()
    if row["compiled"] and row["family"] in FAMILIES and row["sm_min"] <= SM < row["sm_end"]
}
ONE_OF_EACH = tuple({row["family"]: name for name, row in ROWS.items()}.values())
ONE_MATRIX = {row["family"]: row["name"] for row in NATIVE.kernel_table() if row["compiled"]}
pytestmark = pytest.mark.skipif(not ROWS, reason="no row of experts for this chip is built")
FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16}
OUTS = {**FLOATS, "f32": torch.float32}
# Rows of each expert; the last number: rows of none.
COUNTS = ([0, 5, 1, 0, 70, 2, 0], [0, 0, 130, 0], [1] * 9 + [3], [64, 64, 0], [0, 0, 4])
GROUPS = ((0, False), (0, True), (32, True), (64, False), (128, True))


@dataclass
class Layers:
    """Layers of one kind, and rows of x for them."""

    x: Tensor  # [rows of x, k]
    codes: list[Tensor]  # [n, k] each
    scale: list[Tensor]  # [n, groups]
    zero_point: list[Tensor]  # likewise, or []
    bias: list[Tensor]  # [n], or []
    group_size: int
    bits: int
    rounds: bool = False  # whether the row multiplies rounded weights, where scales are those of groups
    more: dict[str, Any] = field(default_factory=dict)  # of the problem

    @staticmethod
    def of(
        row: str | int,
        dtype: str,
        experts: int,
        rows: int,
        group_size: int = 0,
        affine: bool = True,
        n: int = 100,
        k: int = 384,
    ) -> Layers:
        """row: for which one, or bits of weights."""
        bits = row if isinstance(row, int) else bits_of(row)
        d = Draw(BASE_SEED, "weight-only experts", bits, dtype, experts, rows, group_size, n, k)
        low, high = (-8, 7) if bits == 4 else (-128, 127)
        groups = k // group_size if group_size else 1
        each = range(experts)
        return Layers(
            d.normal(rows, k).to(FLOATS[dtype]),
            [d.codes(low, high, n, k).to(torch.int8) for _ in each],
            [d.uniform(n, groups) * 0.01 + 0.001 for _ in each],
            [d.codes(low, high, n, groups).to(torch.int32) for _ in each] if affine else [],
            [d.normal(n) for _ in each],
            group_size,
            bits,
            isinstance(row, str) and ROWS[row]["rounds_weights"] and group_size > 0,
        )

    @property
    def dtype(self) -> str:
        return next(text for text, dtype in FLOATS.items() if dtype == self.x.dtype)

    def stored(self) -> list[Tensor]:
        return [pack_int4(c) if self.bits == 4 else c for c in self.codes]

    @property
    def steps(self) -> int:
        """Roundings a product: docs/numerics.md 8."""
        return 1 if self.rounds else 2

    def weights(self, e: int) -> Tensor:
        """What the row multiplies with, in float64: dequantised, or that rounded as docs/numerics.md 2.3 says."""
        codes = self.codes[e].double().unflatten(1, (self.scale[e].shape[1], -1))
        shifted = codes - self.zero_point[e].double()[..., None] if self.zero_point else codes
        if self.rounds:
            return (shifted.float() * self.scale[e][..., None]).to(self.x.dtype).double().flatten(1)
        return (shifted * self.scale[e].double()[..., None]).flatten(1)

    def exact(self, counts: list[int], rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """In float64, with the magnitudes of the sums; and torch's products of 16-bit weights."""
        x = self.x if rows is None else self.x[rows]
        parts = []
        for e, part in enumerate(x.split(counts)[:-1]):
            w, bias = self.weights(e), self.bias[e].double() if self.bias else torch.zeros(len(self.codes[e])).double()
            wide = part.double()
            torchs = (part @ w.to(part.dtype).T).float() + bias.float()
            parts.append((wide @ w.T + bias, wide.abs() @ w.abs().T + bias.abs(), torchs.to(part.dtype)))
        exact, magnitude, torchs = (torch.cat(part) for part in zip(*parts, strict=True))
        return exact, magnitude, torchs


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts[:-1]).cumsum(0).to(torch.int32)


def run(
    device: Memory,
    name: str,
    layers: Layers,
    counts: list[int],
    rows: Tensor | None = None,
    out: str = "f32",
    ends: list[int] | None = None,
) -> Tensor:
    """A row of the table on layers that lie wherever the device puts them; x in order where the row wants it so."""
    if rows is not None and not ROWS[name]["chooses_rows"]:
        layers, rows = replace(layers, x=layers.x[rows]), None
    m, k, n, experts = sum(counts), layers.x.shape[1], len(layers.codes[0]), len(layers.codes)
    w = "s4" if layers.bits == 4 else "s8"
    problem: dict[str, Any] = {
        "m": m,
        "n": n,
        "k": k,
        "ldx": k,
        "ldw": k,
        "ldo": n,
        "x": layers.dtype,
        "w": w,
        "out": out,
    }
    problem |= {"group_size": layers.group_size, "has_w_zero_point": bool(layers.zero_point), "experts": experts}
    row_bytes = n * OUTS[out].itemsize
    problem["out_align"] = min(16, row_bytes & -row_bytes)
    problem |= layers.more
    places = [[device.put(t) for t in of] for of in (layers.stored(), layers.scale, layers.zero_point, layers.bias)]
    shifts = [p - of[0] for of in ((at or [0] * experts) for at in places) for p in of]
    first = dict(zip(("w", "w_scale", "w_zero_point", "bias"), (of[0] if of else 0 for of in places), strict=True))
    operands: dict[str, Any] = {**first, "x": device.put(layers.x), "x_rows": device.put(rows)}
    operands |= {"expert_ends": device.put(torch.tensor(ends).int() if ends else ends_of(counts))}
    operands["expert_shifts"] = shifts
    size = m * n * OUTS[out].itemsize
    operands["out"] = device.put(torch.full((size,), SENTINEL, dtype=torch.uint8))
    NATIVE.gemm(name, problem, operands, {})
    got = device.get(operands["out"], size).view(OUTS[out]).reshape(m, n)
    device.free()
    return got


def bits_of(name: str) -> int:
    return 4 if "w4" in name else 8


# ---- the kernels


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("group_size", "affine"), GROUPS)
@pytest.mark.parametrize("name", ROWS)
def test_real_numbers_stay_within_the_bound(
    plain_device: Memory, name: str, group_size: int, affine: bool, dtype: str
) -> None:
    for index, counts in enumerate(COUNTS):
        layers = Layers.of(name, dtype, len(counts) - 1, 1 + sum(counts) // 2, group_size, affine)
        if index % 2:
            layers.bias = []
        rows = Draw(BASE_SEED, "rows", name, index).codes(0, len(layers.x) - 1, sum(counts)).long()
        exact, magnitude, torchs = layers.exact(counts, rows)
        for out in ("f32", dtype):
            got = run(plain_device, name, layers, counts, rows, out)
            present = sum(counts[:-1])
            assert torch.equal(got[present:], torch.zeros_like(got[present:])), "rows of no expert"
            what, why = f"{counts} {out}", "an expert or two"
            accept.t3(got[:present], exact, magnitude, 384, torchs, c=layers.steps, what=what, waiver=why)


@pytest.mark.parametrize("name", ROWS)
def test_bits_depend_on_neither_timing_nor_neighbours_nor_tiles(plain_device: Memory, name: str) -> None:
    """The modes of the simulator; other routings; the other rows of the family; each expert by the row for one matrix,
    where that does not divide K."""
    counts, family = [3, 0, 140, 20, 7], ROWS[name]["family"]
    layers = Layers.of(name, "bf16", 4, sum(counts), 64, True, n=72, k=256)
    want = run(plain_device, name, layers, counts)
    if plain_device.is_simulator:
        for mode in MODES:
            plain_device.mode(mode)
            assert torch.equal(run(plain_device, name, layers, counts), want), mode
        plain_device.mode("plain")
    for first, last in ((0, 2), (30, 141), (143, 160)):  # others than these belong to nobody, or to another
        part = replace(layers, x=layers.x[first:last])
        e = 0 if last <= 3 else 2 if last <= 143 else 3
        alone = [last - first if i == e else 0 for i in range(4)]
        assert torch.equal(run(plain_device, name, part, [*alone, 0]), want[first:last]), (first, last)
    for other in ROWS:
        if ROWS[other]["family"] == family:
            assert torch.equal(run(plain_device, other, layers, counts), want), other
    dense = ONE_MATRIX.get(family.removesuffix("_experts"))
    begin = 0
    for e, count in enumerate(counts[:-1]):
        if dense and count:
            part = layers.x[begin : begin + count]
            assert torch.equal(one_matrix(plain_device, dense, layers, e, part), want[begin : begin + count]), dense
        begin += count


@pytest.mark.parametrize("name", [name for name in ONE_OF_EACH if ROWS[name]["engine"] == "wgmma"])
def test_blocks_that_take_several_tiles_carry_their_buffers_on(plain_device: Memory, name: str) -> None:
    """More tiles than multiprocessors, of three steps: buffers and their phases go on from tile to tile, past rows of
    no expert."""
    (tokens, channels, depth), (_, together) = ROWS[name]["tile"], ROWS[name]["cluster"]
    counts = [3, 0, tokens + 9, 2, 130]
    tiles = NATIVE.device_info(0)["sm_count"] // together // 4 + 2
    layers = Layers.of(name, "bf16", 4, sum(counts), 64, True, n=tiles * channels * together - 40, k=3 * depth)
    exact, magnitude, torchs = layers.exact(counts, None)
    got, present = run(plain_device, name, layers, counts), sum(counts[:-1])
    for mode in MODES if plain_device.is_simulator else ():
        plain_device.mode(mode)
        assert torch.equal(run(plain_device, name, layers, counts), got), mode
    plain_device.mode("plain")
    assert not got[present:].any()
    accept.t3(got[:present], exact, magnitude, 3 * depth, torchs, c=layers.steps, what=name)


def one_matrix(device: Memory, name: str, layers: Layers, e: int, x: Tensor) -> Tensor:
    (m, k), n = x.shape, len(layers.codes[e])
    problem = {"m": m, "n": n, "k": k, "ldx": k, "ldw": k, "ldo": n, "x": layers.dtype, "out": "f32"}
    problem |= {"w": "s4" if layers.bits == 4 else "s8", "group_size": layers.group_size, "has_w_zero_point": True}
    memory = {"x": x, "w": layers.stored()[e], "w_scale": layers.scale[e], "w_zero_point": layers.zero_point[e]}
    operands: dict[str, Any] = {key: device.put(t) for key, t in (memory | {"bias": layers.bias[e]}).items()}
    operands["out"] = device.put(torch.zeros(m * n))
    assert NATIVE.workspace_bytes(name, problem) == 0, "K is divided"
    NATIVE.gemm(name, problem, operands, {})
    got = device.get(operands["out"], 4 * m * n).view(torch.float32).reshape(m, n)
    device.free()
    return got


@pytest.mark.parametrize("name", ROWS)
def test_what_lies_behind_k_and_in_other_rows_is_not_read_into_a_sum(plain_device: Memory, name: str) -> None:
    """Rows further apart than K, NaN between them and in a row of another expert; K that ends inside of a stage."""
    counts = [17, 2, 20, 1]
    layers = Layers.of(bits_of(name), "f16", 3, 40, 32, True, n=40, k=96)
    want = run(plain_device, name, layers, counts)
    wide = torch.full((40, 160), torch.nan, dtype=torch.float16)
    wide[:, :96] = layers.x
    wide[17] = torch.nan  # of the second expert
    codes = [torch.cat([c, torch.full((40, 64), -1, dtype=torch.int8)], 1) for c in layers.codes]
    got = run(plain_device, name, replace(layers, x=wide, codes=codes, more={"k": 96, "ldx": 160, "ldw": 160}), counts)
    assert got[17].isnan().all()
    got[17] = want[17]
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ROWS)
def test_operands_may_lie_anywhere(plain_device: Memory, name: str) -> None:
    """Scales, zero points and biases start on 4 bytes; a launch whose biases lie alike takes the straight epilogue."""
    counts = [20, 30, 0]
    layers = Layers.of(bits_of(name), "bf16", 2, 50, 128, True, n=128)
    want = run(plain_device, name, layers, counts, out="bf16")
    put, moved = plain_device.put, []

    def shifted(tensor: Tensor | None) -> int:
        """Every second float or number by one place."""
        if tensor is None or tensor.dtype not in (torch.float32, torch.int32):
            return put(tensor)
        moved.append(tensor)
        before = tensor.new_zeros(len(moved) % 2)
        return put(torch.cat([before, tensor.flatten()])) + 4 * len(before)

    plain_device.put = shifted  # type: ignore[method-assign]
    try:
        assert torch.equal(run(plain_device, name, layers, counts, out="bf16"), want)
    finally:
        del plain_device.put
    assert len(moved) > 5


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_more_experts_than_one_launch_knows(plain_device: Memory, name: str) -> None:
    """513 experts and more are two launches; the operands of the second table are its own."""
    few = Layers.of(bits_of(name), "bf16", 4, 28, 32, True, n=24, k=64)
    counts = [0] * 601
    counts[3], counts[511], counts[512], counts[599], counts[600] = 2, 1, 20, 3, 2
    which = [{511: 1, 512: 2, 599: 3}.get(e, 0) for e in range(600)]
    stocks = (few.codes, few.scale, few.zero_point, few.bias)
    many = Layers(few.x, *([stock[e] for e in which] for stock in stocks), 32, few.bits)
    want = run(plain_device, name, few, [2, 1, 20, 3, 2])
    assert torch.equal(run(plain_device, name, many, counts), want)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_ends_that_lead_nowhere_do_not_leave_the_matrices(plain_device: Memory, name: str) -> None:
    """Nobody looks at the numbers on a device: wrong ones give wrong rows, and touch nothing else."""
    layers = Layers.of(name, "f16", 4, 8)
    plain_device.mode("checked")
    for ends in ([3, 1, 9, 4], [-5, 2, 1000, 2**31 - 1], [2**31 - 1, -(2**31), 0, 8]):
        assert run(plain_device, name, layers, [2, 2, 2, 2, 0], ends=ends).shape == (8, 100)


# ---- the op


def put_operands(device: CudaOps, layers: Layers) -> list[list[Tensor]]:
    """As the op takes them, on the device."""
    scale = [s if layers.group_size else s[:, 0].contiguous() for s in layers.scale]
    zero = [z if layers.group_size else z[:, 0].contiguous() for z in layers.zero_point]
    return [[device.put(t) for t in of] for of in (layers.stored(), scale, zero, layers.bias)]


def call_there(device: CudaOps, layers: Layers, x: Tensor, ends: Tensor, rows: Tensor | None, act: str = "none") -> Any:
    """The op on operands that lie on the device."""
    library = torch.ops.pyquant_sim if device.is_simulator else torch.ops.pyquant
    how = (layers.bits, layers.group_size, act, 0.0, 0.0, rows)
    return library._grouped_weight_only.default(x, *put_operands(device, layers), ends, *how)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("activation", ["none", "silu", "gelu"])
def test_the_op_has_the_numbers_of_the_cpu(there: CudaOps, bits: int, activation: str) -> None:
    if not any(bits_of(name) == bits for name in ROWS):
        pytest.skip("no row for these weights is built")
    for counts, rows_of_x, group in (([0, 5, 1, 0, 60, 2, 3], 20, 32), ([2, 2, 2, 0], 6, 0), ([0, 0, 0], 4, 64)):
        layers = Layers.of(bits, "bf16", len(counts) - 1, rows_of_x, group, n=40, k=128)
        rows = Draw(BASE_SEED, "op rows").codes(0, rows_of_x - 1, sum(counts)).long()
        rows = None if sum(counts) == rows_of_x else rows
        y = call_there(there, layers, there.put(layers.x), there.put(ends_of(counts)), there.put(rows), activation)
        there.finish()
        got = there.get(y)
        flat = [s if group else s[:, 0].contiguous() for s in layers.scale]
        zero = [z if group else z[:, 0].contiguous() for z in layers.zero_point]
        how = (bits, group, activation, 0.0, 0.0, rows)
        want = torch.ops.pyquant._grouped_weight_only.default(
            layers.x, layers.stored(), flat, zero, layers.bias, ends_of(counts), *how
        )
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-8)
        assert not got[sum(counts[:-1]) :].any()


def test_what_does_not_go_is_refused(there: CudaOps) -> None:
    bits = bits_of(next(iter(ROWS)))
    layers, counts = Layers.of(bits, "bf16", 3, 6, n=16, k=64), [2, 2, 2, 0]
    x, ends = there.put(layers.x), there.put(ends_of(counts))
    inside = torch.zeros(2 * 16 * 64 + 8, dtype=torch.uint8 if bits == 4 else torch.int8)
    odd = [inside[8 * e :][: layers.stored()[0].numel()].reshape(layers.stored()[0].shape) for e in range(2)]
    for words, change in (
        ("argument 'w'", {"codes": []}),
        ("argument 'w_scale'", {"scale": layers.scale[:2]}),
        ("argument 'w_zero_point'", {"zero_point": layers.zero_point[:1]}),
        ("argument 'bias'", {"bias": layers.bias[:1]}),
        ("argument 'bias'", {"bias": [b[:8] for b in layers.bias]}),
        ("argument 'w'", {"codes": [*layers.codes[:2], layers.codes[2][:8]]}),
        ("argument 'ends'", {"codes": layers.codes[:2]} | {"scale": layers.scale[:2]} | {"zero_point": [], "bias": []}),
    ):
        with pytest.raises((RuntimeError, pyquant.PyquantError), match=words):
            call_there(there, replace(layers, **change), x, ends, None)
    with pytest.raises((RuntimeError, pyquant.PyquantError), match="no kernel takes this problem"):
        call_there(there, layers, x.float(), ends, None)
    with pytest.raises((RuntimeError, pyquant.PyquantError), match="argument 'rows'"):
        call_there(there, layers, x, ends, there.put(torch.zeros(3, dtype=torch.int32)))
    library = torch.ops.pyquant_sim if there.is_simulator else torch.ops.pyquant
    there_odd = there.put(inside)
    odd = [there_odd[8 * e :][: odd[0].numel()].view(odd[0].shape) for e in range(2)]
    scale = [there.put(s[:, 0].contiguous()) for s in layers.scale[:2]]
    with pytest.raises((RuntimeError, pyquant.PyquantError), match=r"8 bytes apart.*multiples of 16"):
        library._grouped_weight_only.default(x, odd, scale, [], [], ends[:2], bits, 0, "none", 0.0, 0.0, None)


@pytest.mark.skipif(simulator.runtime is None, reason="the simulator counts; a GPU's profiler is another tool")
@pytest.mark.parametrize("experts", [1, 3, 40, 300])
def test_a_projection_is_one_launch_whatever_the_number_of_experts(there: CudaOps, experts: int) -> None:
    """Rows are taken from where they lie: no pass gathers them, and of a divided K there is none."""
    layers = Layers.of(bits_of(next(iter(ROWS))), "bf16", 1, 5, n=16, k=64)
    for of in (layers.codes, layers.scale, layers.zero_point, layers.bias):
        of.extend(of * (experts - 1))
    x, rows = there.put(layers.x), there.put(torch.arange(10) % 5)
    ends = there.put(torch.tensor([10] * experts, dtype=torch.int32))
    operands, how = put_operands(there, layers), (layers.bits, 0, "none", 0.0, 0.0, rows)
    nodes, _ = counted(lambda: torch.ops.pyquant_sim._grouped_weight_only.default(x, *operands, ends, *how))
    assert nodes == {"kernel": 1}, "neither copies nor memsets nor synchronisation"


def test_chosen_rows_are_copied_in_order_for_a_row_that_wants_them_so(there: CudaOps) -> None:
    """Of real size, so that the plan takes one: the bits of rows that lie in order, and of experts without rows."""
    name = next((name for name in ONE_OF_EACH if not ROWS[name]["chooses_rows"]), None)
    if name is None:
        pytest.skip("no such row is built for this chip")
    more = {"experts": 2, "chooses_rows": True, "group_size": 64, "has_w_zero_point": True}
    problem: dict[str, Any] = {"m": 1024, "x": "bf16", "out": "bf16", "w": ROWS[name]["w"][0]} | more
    for n, k in ((1024, 512), (2048, 1024), (4096, 2048)):  # other rows are built for every commit
        problem |= {"n": n, "k": k}
        form, taken, *_ = NATIVE.route("float_linear", problem, NATIVE.device_info(0))
        if form == "sorted":
            break
    assert (form, ROWS[taken]["family"]) == ("sorted", ROWS[name]["family"])
    d, counts = Draw(BASE_SEED, "copied"), [480, 0, 544]
    layers = Layers.of(name, "bf16", 2, 24, 64, True, n=n, k=k)
    rows = d.codes(0, 23, sum(counts)).long()
    x, ends = layers.x.clone(), ends_of(counts)
    x[7] = torch.nan
    got = there.get(call_there(there, layers, there.put(x), there.put(ends), there.put(rows)))
    want = there.get(call_there(there, layers, there.put(x[rows]), there.put(ends), None))
    there.finish()
    accept.t1(got, want, what=taken)
    assert got[:480].isnan().any(1).equal(rows[:480] == 7)
    assert not got[480:].any()


@pytest.mark.skipif(simulator.runtime is None, reason="of a GPU: test_torch_ops.py")
@pytest.mark.parametrize("mode", ["plain", "lazy"])
def test_a_captured_call_runs_again_with_another_routing(there: CudaOps, mode: str) -> None:
    runtime = simulator.runtime
    assert runtime is not None
    layers = Layers.of(bits_of(next(iter(ROWS))), "f16", 4, 20, 32, n=40, k=64)
    x, rows = there.put(torch.zeros_like(layers.x)), there.put(torch.zeros(30, dtype=torch.int64))
    ends = there.put(torch.zeros(4, dtype=torch.int32))
    call_there(there, layers, x, ends, rows)  # before a capture, as torch asks for
    there.finish()
    stream = ctypes.c_void_p()
    ok(runtime.cudaStreamCreate(ctypes.byref(stream)))
    held, how = put_operands(there, layers), (layers.bits, 32, "none", 0.0, 0.0)
    call = torch.ops.pyquant_sim._grouped_weight_only.default
    graph = Captured(there, int(stream.value or 0), lambda: call(x, *held, ends, *how, rows))
    assert graph.nodes == 1
    there.mode(mode)
    draw = Draw(BASE_SEED, "weight-only graph")
    for counts in ([30, 0, 0, 0, 0], [0, 7, 0, 20, 3], [1, 2, 3, 4, 20]):
        now = draw.normal(20, 64).half()
        x.copy_(now), rows.copy_(draw.codes(0, 19, 30).long()), ends.copy_(ends_of(counts))
        graph()
        there.finish()
        want = torch.ops.pyquant._grouped_weight_only.default(
            now, layers.stored(), layers.scale, layers.zero_point, layers.bias, ends_of(counts), *how, rows.clone()
        )
        torch.testing.assert_close(there.get(graph.out), want, rtol=2**-9, atol=2**-10)
    graph.free(there)
    there.mode("plain")
    ok(runtime.cudaStreamDestroy(stream))


# ---- whole banks


class Served:
    """torch.ops.pyquant for expert_rows, carried out on the simulator; counts the calls."""

    def __init__(self, device: CudaOps) -> None:
        self._device, self.calls = device, 0
        self._grouped_weight_only = self

    def default(self, x: Tensor, *operands: Any) -> Tensor:
        put, self.calls = self._device.put, self.calls + 1
        there = [[put(t) for t in o] if isinstance(o, list) else put(o) for o in operands]
        y = torch.ops.pyquant_sim._grouped_weight_only.default(put(x), *there)
        self._device.finish()
        got: Tensor = self._device.get(y)
        return got


class Routed(nn.Module):
    """A bank under a routing of its own."""

    def __init__(self, bank: nn.Module) -> None:
        super().__init__()
        self.experts = bank

    def forward(self, x: Tensor, *routed: Tensor) -> Any:
        return self.experts(x, *routed)


@pytest.mark.parametrize("scheme", [pyquant.W4A16(32), pyquant.W4A16(None, symmetric=False), pyquant.W8A16()], ids=str)
@pytest.mark.parametrize("kind", [Bank, Biased, Interleaved])
def test_a_bank_waits_for_nobody_and_gives_the_numbers_of_the_cpu(
    there: CudaOps, monkeypatch: pytest.MonkeyPatch, kind: Any, scheme: Any
) -> None:
    if not any(bits_of(name) == scheme.weights.bits for name in ROWS):
        pytest.skip("no row for these weights is built")
    monkeypatch.setattr(expert_rules, "_RULES", dict(expert_rules._RULES))
    register_banks()
    torch.manual_seed(3)
    x, (ids, weights) = torch.randn(23, 64, dtype=torch.bfloat16), routing(23, 6, 3)
    ids[0] = torch.tensor([3, 4, 5])
    bank: Any = pyquant.quantize_(Routed(kind(6, 64, 32).to(torch.bfloat16)), scheme, check_speed=False).experts
    ids[4, 1], ids[7, 0] = 6, -1  # experts elsewhere
    cases = [(x, ids, weights), (x[:1], ids[:1], weights[:1]), (x[:0], ids[:0], weights[:0])]
    cases.append((torch.randn(23, 129, dtype=torch.bfloat16)[:, 1:65], ids, weights))  # rows that start anywhere
    cases.append((x, torch.full_like(ids, 2), weights))  # all to one
    cases.append((x, torch.full_like(ids, 9), weights))  # all elsewhere
    want = [bank(*case) for case in cases]
    if there.is_simulator:
        served = Served(there)
        monkeypatch.setattr(expert_rows, "_ops", served)
        monkeypatch.setattr(one_launch, "is_on_gpu", lambda _: True)
        monkeypatch.setattr(plan.Device, "of", staticmethod(lambda _: plan.Device(**NATIVE.device_info(0))))
        one_launch.forget()
        monkeypatch.setattr(expert_rows.Sorted, "split", None)  # would wait
        with torch.no_grad():
            got = [bank(*case) for case in cases]
        one_launch.forget()
        assert served.calls == 2 * len(cases)
    else:
        bank.cuda()
        on_gpu = [[t.cuda() for t in case] for case in cases]  # copies of pageable memory wait
        with torch.cuda.device(0):
            torch.cuda.set_sync_debug_mode("error")
            try:
                got = [bank(*case) for case in on_gpu]
            finally:
                torch.cuda.set_sync_debug_mode("default")
            got = [one.cpu() for one in got]
    for one, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(
            one, wanted, rtol=2**-5, atol=2**-6 * float(wanted.abs().max()) if len(wanted) else 0
        )


def test_a_compiled_graph_takes_the_same_launch(there: CudaOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op of graphs, which is Python: the numbers of rows stay on the device."""
    if not there.is_simulator:
        pytest.skip("of a GPU: test_whole_models.py")
    layers, counts = Layers.of(bits_of(next(iter(ROWS))), "bf16", 4, 20, 32, n=40, k=64), [3, 0, 12, 1]
    served = Served(there)
    operands = (layers.stored(), layers.scale, layers.zero_point, layers.bias, 40, layers.bits, 32, "none", 0.0, 0.0)
    want = routed.routed_weight_only(layers.x, torch.tensor(counts), *operands)
    monkeypatch.setattr(routed, "_ops", served)
    monkeypatch.setattr(routed._Rows, "of", None)  # would wait
    monkeypatch.setattr(one_launch, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(plan.Device, "of", staticmethod(lambda _: plan.Device(**NATIVE.device_info(0))))
    one_launch.forget()
    got = routed.routed_weight_only(layers.x, torch.tensor(counts), *operands)
    one_launch.forget()
    assert served.calls == 1
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-8)
    assert not got[16:].any()


H200 = plan.Device(90, 132, 232448, 62914560, 4800, "", 1980)
A100 = plan.Device(80, 108, 166912, 41943040, 2039)


@pytest.mark.parametrize(
    ("device", "experts", "rows", "goes"),
    [
        *((H200, 128, 8, True), (H200, 128, 1024, True), (H200, 8, 2, True), (H200, 8, 16384, True)),
        *((A100, 8, 64, True), (A100, 8, 16384, False)),
    ],
)
def test_one_launch_is_taken_where_it_is_quicker(
    monkeypatch: pytest.MonkeyPatch, device: plan.Device, experts: int, rows: int, goes: bool
) -> None:
    """By the model, with every row: on an A100 torch's product wins where each expert has a thousand rows."""
    monkeypatch.setattr(one_launch, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(plan.Device, "of", staticmethod(lambda _: device))
    routed, native = plan.routed, plan._native()
    monkeypatch.setattr(plan, "routed", lambda *a: routed(*a, only_compiled=False))

    class All:
        """The native module with every row."""

        def layer_time(self, entry: str, problem: Any, at: Any) -> Any:
            return native.layer_time(entry, problem, at, only_compiled=False)

        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

    monkeypatch.setattr(plan, "_native", All)
    one_launch.forget()
    held = [torch.zeros(16, dtype=torch.uint8)] * experts
    found = one_launch.of_weight_only(held, 4096, 2048, 4, 128, False, rows, torch.bfloat16, torch.device("cpu"))
    one_launch.forget()
    assert re.search("w4a16_(rounded_)?experts", str(found.kernel)), found
    assert (not found.why_not) == goes, found


def test_layers_that_no_kernel_takes_are_called_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_launch, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(plan.Device, "of", staticmethod(lambda _: A100))
    for scheme, k, dtype, goes in (
        (pyquant.W4A16(32), 64, torch.bfloat16, True),
        (pyquant.W8A16(), 64, torch.float16, True),
        (pyquant.W4A16(32), 64, torch.float32, False),
        (pyquant.W4A16(16), 64, torch.bfloat16, False),
        (pyquant.W4A16(None), 40, torch.bfloat16, False),
    ):
        if not any(bits_of(name) == scheme.weights.bits for name in ROWS):
            continue
        one_launch.forget()
        layers = [QLinear.from_float(nn.Linear(k, 16), scheme).eval() for _ in range(3)]
        with torch.no_grad():
            assert expert_rows.is_one_call(layers, torch.zeros(6, k, dtype=dtype), 6) == goes, (scheme, k, dtype)
    one_launch.forget()


def test_weights_that_start_anywhere_are_called_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As views into a file's memory may."""
    monkeypatch.setattr(one_launch, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(plan.Device, "of", staticmethod(lambda _: A100))
    bits = bits_of(next(iter(ROWS)))
    layers = [QLinear.from_float(nn.Linear(64, 16), pyquant.W4A16(32) if bits == 4 else pyquant.W8A16()).eval()] * 2
    x = torch.zeros(6, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert expert_rows.is_one_call(layers, x, 6)
        held = layers[0]._buffers["storage"]
        assert held is not None
        layers[0]._buffers["storage"] = torch.cat([held.new_zeros(8), held.flatten()])[8:].view(held.shape)
        assert not expert_rows.is_one_call(layers, x, 6)
    one_launch.forget()
