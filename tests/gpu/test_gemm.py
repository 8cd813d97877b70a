"""Every GEMM row of the kernel table against the executable specification, bit for bit: every output type, epilogue
option, tail and stride, in every mode of the simulator or on a GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import accept
import pytest
import torch
from blocked import pack_blocked128
from gpu_device import SENTINEL, Memory, shared_out
from images import as_images
from problems import BASE_SEED, Draw
from steps import draw_steps, natural_steps, pack_blocked_steps, products
from torch import Tensor

from pyquant.core.names import ACTIVATIONS
from pyquant.numerics.gemm import gemm as specification
from pyquant.numerics.pack import pack_int4

DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "s32": torch.int32,
    "s8": torch.int8,
    "s4": torch.uint8,
}
BITS = {"f16": 16, "bf16": 16, "f32": 32, "s32": 32, "s8": 8, "u8": 8, "s4": 4}
NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
SM = NATIVE.device_info(0)["sm"] if NATIVE.device_count() else 80  # without a device every test is skipped
# Rows for other chips: tests/gpu/test_other_devices.py.
ROWS = {row["name"]: row for row in NATIVE.kernel_table() if row["compiled"] and row["sm_min"] <= SM < row["sm_end"]}
TYPES = {"s8": (-128, 127), "u8": (0, 255), "s4": (-8, 7)}
# Launches of a row, output type and mode. A run for every day is short; `make test-kernels` asks for more.
CASES = int(os.environ.get("PYQUANT_CASES", "6"))
# Float operands are eighths: products and sums are exact in float32 whatever their order, and so are scales that are
# powers of two. The specification sees them as integers with a scale.
EIGHTHS = 0.125


@dataclass
class Case:
    """One launch: operands as tensors, and the words of the native interface for the same thing."""

    row: str
    out: str
    call: dict[str, Any]
    problem: dict[str, Any]
    epilogue: dict[str, Any]
    memory: dict[str, Tensor | None] = field(default_factory=dict)
    repeat: str = ""

    def want(self) -> Tensor:
        result = specification(**self.call)
        return pack_int4(result) if self.out == "s4" else result


def _padded(codes: Tensor, ld: int) -> Tensor:
    """Rows of codes at a stride of ld, with junk between them."""
    wide = torch.full((codes.shape[0], ld), 113, dtype=codes.dtype)
    wide[:, : codes.shape[1]] = codes
    return wide


def _multiple_up(value: int, multiple: int) -> int:
    return -(-max(value, 1) // multiple) * multiple


def _shape(draw: Draw, row: dict[str, Any], plain: bool, finished: bool) -> tuple[int, int, int]:
    """m, n, k: tails on every side of the tile, small sizes often. plain: one whole tile of channels at
    least; finished: or a multiple of 16."""
    tile_m, tile_n, tile_k = row["tile"]
    m = draw.choice((1, 2, 7, 16, 33, 64, 65, 100, 130, tile_m, tile_m + 1, draw.integer(1, 130)))
    if row["m_max"]:
        m = min(m, draw.integer(1, row["m_max"]))
    n = draw.choice((1, 3, 8, 24, 77, tile_n - 1, tile_n, tile_n + 9, draw.integer(1, 2 * tile_n)))
    if plain:
        n = draw.choice((tile_n, 2 * tile_n, tile_n + 16))
    if finished:
        n = draw.choice((16, max(16, tile_n - 16), tile_n, tile_n + 48))
    k = draw.choice((1, 15, 16, 33, tile_k, tile_k + 1, 3 * tile_k + 5, draw.integer(1, 7 * tile_k)))
    if row["schedule"] == "splitk":  # one share or many
        k = draw.choice((k, draw.integer(2, 12) * tile_k, draw.integer(18 * 128, 30 * 128)))
    k = max(_multiple_up(k, row["k_multiple"]), row["k_least"])
    if row["x_align"] == 1:
        k = draw.choice((0, k))
    return m, n, k


def _group_size(draw: Draw, row: dict[str, Any], out: str, k: int) -> tuple[int, int]:
    """The group size, and K changed to a multiple of it where the kernel has no choice."""
    multiple = row["group_multiple"]
    if not multiple or out == "s32" or k == 0:
        return 0, k
    step = row["group_step"]

    def takes(size: int) -> bool:
        return not step or size <= step // 2 or size % step == 0

    if row["groups_only"] or (multiple > 1 and draw.chance(0.5)):
        group_size = draw.choice(
            [g for g in (multiple, 2 * multiple, step or 3 * multiple, 2 * step) if g and takes(g)]
        )
        return group_size, group_size * max(1, round(k / group_size))
    sizes = [g for g in range(multiple, k + 1, multiple) if k % g == 0 and takes(g)]
    return (draw.choice(sizes), k) if sizes and draw.chance(0.4) else (0, k)


def _step_size(draw: Draw, row: dict[str, Any], k: int) -> tuple[int, int]:
    """How many codes share a step, and K changed to a multiple of it where the kernel has no choice."""
    multiple = row["step_multiple"]
    if row["steps_only"]:
        size = multiple * draw.choice((1, 2, 3))
        return size, size * max(1, round(k / size))
    sizes = [size for size in range(multiple, k + 1, multiple) if k % size == 0] if multiple else []
    return (draw.choice(sizes), k) if sizes and draw.chance(0.4) else (0, k)


def _operand(draw: Draw, kind: str, rows: int, k: int) -> Tensor:
    """Integer codes of a type; of float types, eighths times eight."""
    low, high = TYPES.get(kind, (-16, 16))
    return draw.codes(low, high, rows, k).to(torch.uint8 if kind == "u8" else torch.int8)


def _in_memory(codes: Tensor, kind: str, ld: int, packed: bool) -> Tensor:
    """The operand as it lies in memory, rows ld elements apart."""
    wide = _padded(codes, ld)
    if packed:
        return pack_int4((wide & 15 ^ 8) - 8)  # the junk is a nibble too
    return (wide * EIGHTHS).to(DTYPES[kind]) if kind in ("f16", "bf16") else wide


def _weights(
    row: dict[str, Any], codes: Tensor, kind: str, ld: int, step: Tensor | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """The weights as the row wants them, and what the problem says of their order."""
    if "blocked128" in row["w_layouts"]:
        return pack_blocked128(codes) if step is None else pack_blocked_steps(codes, step)
    return _in_memory(codes, kind, ld, kind == "s4"), {"ldw": ld}


def _stride(draw: Draw, k: int, kind: str, packed: bool, align: int) -> int:
    """Elements from row to row, so that rows start on `align` bytes."""
    step = max(align * 8 // (BITS[kind] if packed or kind != "s4" else 8), 2 if packed else 1)
    return _multiple_up(k, step) + step * draw.choice((0, 0, 1))


def experts_of_one_matrix(draw: Draw, m: int) -> tuple[int, Tensor]:
    """Experts that share m rows, and the ends of their rows: without shifts all have the same weights."""
    experts = draw.choice((1, 2, 5))
    ends = draw.codes(0, m, experts).sort().values
    ends[-1] = m
    return experts, ends


def make_case(name: str, out: str, index: int, plain: bool = False, finished: bool = False) -> Case:
    """plain: with no more than zero points, scales and a bias, which most rows have straight-line code for; of three
    indices one has no zero point, one has one, one has one a token. finished: plain, then an activation, by index, and
    a residual of 16 bits or none, which wgmma rows have straight-line code for."""
    row = ROWS[name]
    draw = Draw(BASE_SEED, "gpu gemm" + " plain" * plain + " finished" * finished, name, out, index)
    plain = plain or finished
    m, n, k = _shape(draw, row, plain, finished)
    group_size, k = _group_size(draw, row, out, k)
    x_type = draw.choice(row["x"])
    w_type = x_type if x_type in row["w"] and len(row["x"]) == len(row["w"]) > 1 else draw.choice(row["w"])
    step_size, k = _step_size(draw, row, k) if row["step_multiple"] and w_type == "s4" and not group_size else (0, k)
    groups = k // group_size if group_size else 1
    real_x, real_w = x_type in ("f16", "bf16"), w_type in ("f16", "bf16")
    x, w = _operand(draw, x_type, m, k), _operand(draw, w_type, n, k)
    x_packed = x_type == "s4" and draw.choice(
        {"bytes": (False,), "nibbles": (True,)}.get(row["x_packing"], (True, False))
    )
    size = max(k, 1) ** 0.5 * (100.0 if real_x else 3000.0)
    call: dict[str, Any] = {"x": x, "w": w, "out_dtype": torch.int8 if out == "s4" else DTYPES[out]}
    problem: dict[str, Any] = {
        "m": m,
        "n": n,
        "k": k,
        "x": x_type,
        "w": w_type,
        "out": out,
        "x_packed": x_packed,
        "group_size": group_size,
    }
    call["group_size"] = group_size
    epilogue: dict[str, Any] = {}
    memory: dict[str, Tensor | None] = {}
    if row["experts_only"]:
        problem["experts"], memory["expert_ends"] = experts_of_one_matrix(draw, m)
    step: Tensor | None = None
    if step_size:
        problem["step_size"] = step_size
        w, step = draw_steps(draw, n, k, step_size)
        call["w"] = products(w, step)
        memory["w_step"] = natural_steps(step)

    if row["w_zero_point"] and draw.chance(0.6):
        wzp = draw.codes(*TYPES[w_type], n, groups)
        call["w"] = w.to(torch.int16) - wzp.repeat_interleave(k // groups, 1).to(torch.int16)
        problem["has_w_zero_point"] = True
        memory["w_zero_point"] = wzp if group_size else wzp[:, 0].contiguous()
    zero_points = ("absent", "scalar", "token")
    zero_point = zero_points[index % 3] if plain and not finished else draw.choice(zero_points)
    if not row["zero_point"]:
        zero_point = "absent"
    if zero_point != "absent":
        count = m if zero_point == "token" else 1
        zp = draw.codes(*TYPES[x_type], count)
        call["x_zero_point"] = zp if zero_point == "token" else zp[0]
        problem |= {"has_zero_point": True, "per_token_zero_point": zero_point == "token"}
        memory["x_zero_point"] = zp
        memory["w_sum"] = (
            (w if step is None else call["w"]).to(torch.int32).reshape(n, groups, -1).sum(-1, dtype=torch.int32)
            if k
            else torch.zeros(n, 1, dtype=torch.int32)
        )

    if out != "s32":
        if real_x:
            call["x_scale"] = torch.tensor(EIGHTHS)
        elif (x_scale := draw.choice(("absent", "scalar", "token", "token"))) != "absent":
            s = torch.exp2(draw.normal(m if x_scale == "token" else 1))
            call["x_scale"] = s if x_scale == "token" else s[0]
            problem["per_token_scale"] = x_scale == "token"
            memory["x_scale"] = s
        if real_w:
            call["w_scale"] = torch.full((n,), EIGHTHS)
        elif group_size or draw.chance(0.85):
            exponent = draw.codes(-8, -5, n, groups).float() if real_x else draw.normal(n, groups)
            s = torch.exp2(exponent) / (1.0 if real_x else size)
            call["w_scale"] = memory["w_scale"] = s if group_size else s[:, 0].contiguous()
        if draw.chance(0.6):
            call["bias"] = memory["bias"] = draw.normal(n)
        residual = draw.choice(("absent", "f16", "bf16", "f32"))
        if plain:
            residual = draw.choice(("absent", "f16", "bf16")) if finished else "absent"
        if residual != "absent":
            ldr = n + draw.choice((0, 8) if finished else (0, 0, 1, 8))
            r = draw.normal(m, ldr).to(DTYPES[residual])
            call["residual"], memory["residual"] = r[:, :n], r
            problem |= {"residual": residual, "ldr": ldr, "residual_align": _alignment(ldr * r.element_size())}
        activation = draw.choice(ACTIVATIONS)
        if plain:
            activation = ACTIVATIONS[index % len(ACTIVATIONS)] if finished else "none"
        call |= {"activation": activation, "clamp_min": -0.75, "clamp_max": 0.5}
        epilogue |= {"activation": activation, "clamp_min": -0.75, "clamp_max": 0.5}
    if out in ("s8", "s4"):
        scale = torch.full((1,), 0.013 if out == "s8" else 0.3)
        zp = draw.codes(-20, 20, 1) if out == "s8" else draw.codes(-3, 3, 1)
        if plain and out == "s8":
            zp[0] = draw.choice((0, -127, 127, draw.integer(-127, 127)))
        low, high = (draw.choice((-127, -128)), 127) if out == "s8" else (draw.choice((-7, -8)), 7)
        call |= {"out_scale": scale, "out_zero_point": zp[0], "out_qmin": low, "out_qmax": high}
        epilogue |= {"out_qmin": low, "out_qmax": high}
        memory |= {"out_scale": scale, "out_zero_point": zp}

    ldx = _stride(draw, k, x_type, x_packed, row["x_align"])
    ldw = _stride(draw, k, w_type, w_type == "s4", row["w_align"])
    memory["x"] = _in_memory(x, x_type, ldx, x_packed)
    problem |= as_images(row, m, k, ldx)
    memory["w"], order = _weights(row, w, w_type, ldw, step)
    step = 16 * 8 // BITS[out]
    free = n + draw.choice((0, 0, 1, 8))
    if out == "s4":
        free += free % 2
    aligned = plain or row["out_align"] == 16 or draw.chance(0.4)
    ldo = _multiple_up(n, step) + step * draw.choice((0, 1)) if aligned else free
    problem |= order | {"ldx": ldx, "ldo": ldo, "out_align": _alignment(ldo * BITS[out] // 8)}
    if row["x_align"] == 1:
        problem |= {"x_align": 1, "w_align": 1}
    repeat = f"make_case({name!r}, {out!r}, {index}, {plain}, {finished}) seed {BASE_SEED}"
    return Case(name, out, call, problem, epilogue, memory, repeat)


def _alignment(nbytes: int) -> int:
    return min(16, nbytes & -nbytes) if nbytes else 16


def run(native: Any, device: Memory, case: Case) -> Tensor:
    """The output [m, n], or [m, ceil(n / 2)] bytes of int4 pairs; checks that nothing outside of it was written."""
    m, n, ldo = case.problem["m"], case.problem["n"], case.problem["ldo"]
    operands = {name: device.put(tensor) for name, tensor in case.memory.items()}
    dtype = DTYPES[case.out]
    pitch, width = ldo * BITS[case.out] // 8, -(-n * BITS[case.out] // 8)
    operands["out"] = device.put(torch.full((m * pitch,), SENTINEL, dtype=torch.uint8))
    needed = native.workspace_bytes(case.row, case.problem)
    operands["workspace"] = device.put(torch.full((needed,), SENTINEL, dtype=torch.uint8)) if needed else 0
    native.gemm(case.row, case.problem, operands, case.epilogue)
    raw = device.get(operands["out"], m * pitch).reshape(m, pitch)
    assert bool((raw[:, width:] == SENTINEL).all()), f"{case.repeat}: wrote beyond the output's columns"
    return raw[:, :width].contiguous().view(dtype).reshape(m, width // dtype.itemsize)


def compare(got: Tensor, want: Tensor, what: str) -> None:
    waiver = "random options: a case of its own may be nearly constant, the sum of cases is not"
    if want.is_floating_point():
        accept.t1(got, want, what=what, waiver=waiver)
    else:
        accept.t0(got, want, what=what, waiver=waiver)


ROW_OUTPUTS = [(name, out) for name, row in ROWS.items() for out in row["out"]]


@pytest.mark.parametrize(("name", "out"), ROW_OUTPUTS, ids=[f"{n}-{o}" for n, o in ROW_OUTPUTS])
def test_row_equals_the_specification(native: Any, device: Memory, name: str, out: str) -> None:
    for index in shared_out(device, range(CASES), name, out):
        case = make_case(name, out, index)
        compare(run(native, device, case), case.want(), case.repeat)
        device.free()


PLAIN_OUTPUTS = [(name, out) for name, out in ROW_OUTPUTS if out in ("f16", "bf16", "s8")]


@pytest.mark.parametrize(("name", "out"), PLAIN_OUTPUTS, ids=[f"{n}-{o}" for n, o in PLAIN_OUTPUTS])
def test_row_with_no_more_than_zero_points_scales_and_a_bias_equals_the_specification(
    native: Any, device: Memory, name: str, out: str
) -> None:
    """What the straight-line epilogues store (csrc/cuda/gemm/plain80.cuh, plain90.cuh). One token is poisoned, and one
    channel's scale is at an end of float32."""
    for index in shared_out(device, range(max(3, CASES // 3)), name, out, "plain"):
        case = make_case(name, out, index, plain=True)
        if "x_scale" in case.memory and case.problem.get("per_token_scale"):
            case.memory["x_scale"][index % case.problem["m"]] = torch.nan
        if index % 2 == 1 and "w_scale" in case.memory and case.problem["x"] not in ("f16", "bf16"):
            case.memory["w_scale"].view(-1)[case.problem["n"] // 2] = (1e-40, 2.0**-122, 3e38)[index // 2 % 3]
        compare(run(native, device, case), case.want(), case.repeat)
        device.free()


FINISHED_OUTPUTS = [(n, o) for n, o in ROW_OUTPUTS if "_sm90_" in f"_{n}" and o in ("f16", "bf16", "f32", "s8")]


@pytest.mark.parametrize(("name", "out"), FINISHED_OUTPUTS, ids=[f"{n}-{o}" for n, o in FINISHED_OUTPUTS])
def test_row_with_activations_and_residuals_of_16_bits_equals_the_specification(
    native: Any, device: Memory, name: str, out: str
) -> None:
    """What the straight-line epilogue of wgmma rows stores besides, float32 and the ends of N among it."""
    for index in shared_out(device, range(2 * len(ACTIVATIONS)), name, out, "finished"):
        case = make_case(name, out, index, finished=True)
        compare(run(native, device, case), case.want(), case.repeat)
        device.free()


def _bare(name: str, out: str, m: int, n: int, k: int) -> Case:
    """Zeros without scales: only a bias, and what the row cannot do without."""
    row = ROWS[name]
    x_type, w_type, group_size = row["x"][0], row["w"][0], row["group_multiple"] if row["groups_only"] else 0
    x, w = torch.zeros(m, k, dtype=torch.int8), torch.zeros(n, k, dtype=torch.int8)
    step_size = row["step_multiple"] if row["steps_only"] else 0
    step = torch.ones(n, k // step_size, dtype=torch.uint8) if step_size else None
    call: dict[str, Any] = {"x": x, "w": w, "out_dtype": torch.int8 if out == "s4" else DTYPES[out]}
    x_packed = row["x_packing"] == "nibbles"
    weights, order = _weights(row, w, w_type, 128, step)
    problem = order | {
        "m": m,
        "n": n,
        "k": k,
        "ldx": 128,
        "ldo": 32,
        "x": x_type,
        "w": w_type,
        "out": out,
        "x_packed": x_packed,
        "group_size": group_size,
        "step_size": step_size,
        "experts": int(row["experts_only"]),
    }
    problem |= as_images(row, m, k, 128)
    memory: dict[str, Tensor | None] = {"x": _in_memory(x, x_type, 128, x_packed), "w": weights}
    if row["experts_only"]:
        memory["expert_ends"] = torch.tensor([m], dtype=torch.int32)
    if step is not None:
        memory["w_step"] = natural_steps(step)
    if group_size:
        call |= {"group_size": group_size, "w_scale": torch.ones(n, k // group_size)}
        memory["w_scale"] = call["w_scale"]
    epilogue: dict[str, Any] = {}
    if out != "s32":
        call["bias"] = memory["bias"] = torch.linspace(-1, 1, n)
    if out in ("s8", "s4"):
        call["out_scale"] = memory["out_scale"] = torch.tensor(0.01 if out == "s8" else 0.2)
        limits = {"out_qmin": -7, "out_qmax": 7} if out == "s4" else {}
        call |= limits
        epilogue |= limits
    return Case(name, out, call, problem, epilogue, memory, f"{name} {out} {m}x{n}x{k}")


@pytest.mark.parametrize("name", ROWS)
def test_zero_sizes_are_legal(native: Any, plain_device: Memory, name: str) -> None:
    k = 2 * ROWS[name]["group_multiple"] if ROWS[name]["groups_only"] else 64  # of steps: a multiple of all
    for out in ROWS[name]["out"]:
        for m, n, depth in ((0, 16, k), (16, 0, k), (5, 16, 0), (3, 16, k)):
            if depth < ROWS[name]["k_least"] or (depth == 0 and ROWS[name]["channel_multiple"]):
                continue  # no channel: a matrix
            case = _bare(name, out, m, n, depth)
            compare(run(native, plain_device, case), case.want(), case.repeat)


def _launched(native: Any, device: Memory, name: str) -> tuple[Tensor, dict[str, Any]]:
    """One float32 launch with every epilogue step in it, and its operands."""
    row = ROWS[name]
    draw = Draw(BASE_SEED, "mutants", name)
    x_type, w_type = row["x"][0], row["w"][0]
    m, n, k = min(65, row["m_max"] or 65), 128, 128
    call: dict[str, Any] = {
        "x": draw.codes(*TYPES[x_type], m, k).to(torch.uint8 if x_type == "u8" else torch.int8),
        "w": draw.codes(*TYPES[w_type], n, k).to(torch.int8),
        "x_zero_point": draw.codes(-9, 9, m) if x_type != "u8" else draw.codes(0, 9, m),
        "x_scale": torch.exp2(draw.normal(m)),
        "w_scale": torch.exp2(draw.normal(n)) / (40000 if w_type == "s8" and x_type != "s4" else 2000),
        "bias": draw.normal(n),
        "residual": draw.normal(m, n),
        "activation": "silu",
        "out_dtype": torch.float32,
    }
    codes, step = call["w"], None
    if row["steps_only"]:
        codes, step = draw_steps(draw, n, k, row["step_multiple"])
        call["w"], call["w_scale"] = products(codes, step), call["w_scale"] / 16
    memory = {key: call[key] for key in ("x_zero_point", "x_scale", "w_scale", "bias", "residual")}
    memory["w_step"] = None if step is None else natural_steps(step)
    memory["w_sum"] = call["w"].sum(-1, dtype=torch.int32)
    x_packed = row["x_packing"] == "nibbles"
    weights, order = _weights(row, codes, w_type, k, step)
    memory |= {"x": _in_memory(call["x"], x_type, k, x_packed), "w": weights}
    experts = experts_of_one_matrix(draw, m) if row["experts_only"] else (0, None)
    memory["expert_ends"] = experts[1]
    problem = (
        order
        | {
            "m": m,
            "n": n,
            "k": k,
            "x": x_type,
            "w": w_type,
            "out": "f32",
            "x_packed": x_packed,
            "has_zero_point": True,
            "per_token_zero_point": True,
            "per_token_scale": True,
            "step_size": row["step_multiple"] if row["steps_only"] else 0,
            "experts": experts[0],
            "ldx": k,
            "ldo": n,
            "ldr": n,
        }
        | as_images(row, m, k)
    )
    return run(native, device, Case(name, "f32", call, problem, {"activation": "silu"}, memory, name)), call


def _mutants(call: dict[str, Any]) -> dict[str, Tensor]:
    """The same epilogue, wrong in one place each."""
    from pyquant.numerics.epilogue import activate
    from pyquant.numerics.gemm import accumulate

    acc = accumulate(call["x"], call["w"], call["x_zero_point"]).to(torch.float32)
    rough = accumulate(call["x"], call["w"]).to(torch.float32)
    s, w, b, r = call["x_scale"][:, None], call["w_scale"], call["bias"], call["residual"]
    fused = (acc.double() * w.double() * s.double() + b.double()).float()
    steps = {
        "scales in the other order": activate(acc * s * w + b, "silu") + r,
        "scales multiplied first": activate(acc * (s * w) + b, "silu") + r,
        "multiply and add contracted": activate(((acc * w).double() * s.double() + b.double()).float(), "silu") + r,
        "one rounding for all": activate(fused, "silu") + r,
        "bias after the activation": activate(acc * w * s, "silu") + b + r,
        "residual before the activation": activate(acc * w * s + b + r, "silu"),
        "residual not added": activate(acc * w * s + b, "silu"),
        "zero point left out": activate(rough * w * s + b, "silu") + r,
        "another sigmoid": torch.nn.functional.gelu(acc * w * s + b) + r,
        "token scales of the next row": activate(acc * w * s.roll(1, 0) + b, "silu") + r,
        "channel scales of the next column": activate(acc * w.roll(1) * s + b, "silu") + r,
    }
    return {name: value.to(call["out_dtype"]) for name, value in steps.items()}


# Groups have an order of their own, checked by the specification; float sums have no zero-point term to plant bugs in.
CHANNEL_ROWS = [n for n, r in ROWS.items() if r["zero_point"] and not r["groups_only"]]


@pytest.mark.parametrize("name", CHANNEL_ROWS)
def test_planted_bugs_are_seen(native: Any, plain_device: Memory, name: str) -> None:
    got, call = _launched(native, plain_device, name)
    accept.t1(got, specification(**call), what=name)
    unseen = []
    for bug, wrong in _mutants(call).items():
        try:
            accept.t1(got, wrong)
        except accept.Rejected:
            continue
        unseen.append(bug)
    assert not unseen


@pytest.mark.parametrize("name", ROWS)
def test_refusals_name_both_numbers(native: Any, plain_device: Memory, name: str) -> None:
    row = ROWS[name]
    problem: dict[str, Any] = {
        "m": 4,
        "n": 16,
        "k": 768,
        "x": row["x"][0],
        "w": row["w"][0],
        "out": row["out"][0],
        "x_packed": row["x_packing"] == "nibbles",
        "w_layout": row["w_layouts"][0],
    }
    problem |= as_images(row, 4, 768)
    if multiple := row["channel_multiple"]:
        with pytest.raises(ValueError, match=rf"channels of images must be a multiple of {multiple}, got 24"):
            native.gemm(name, problem | {"image": problem["image"] | {"channels": 24}}, {}, {})
        with pytest.raises(ValueError, match=rf"channels of images must be a multiple of {multiple}, got 0"):
            native.gemm(name, {key: value for key, value in problem.items() if key != "image"}, {}, {})
    else:
        images = as_images({"channel_multiple": 16}, 4, 64) | {"experts": int(row["experts_only"])}
        with pytest.raises(ValueError, match=r"channels of images must be 0 .*, got 64"):
            native.gemm(name, problem | images, {}, {})
    other = int(not row["experts_only"])
    with pytest.raises(ValueError, match=rf"experts must be .*, got {other}$"):
        native.gemm(name, problem | {"experts": other}, {}, {})
    problem["experts"] = 1 - other
    if row["groups_only"]:
        with pytest.raises(ValueError, match=rf"group size must be a multiple of {row['group_multiple']}, got 0"):
            native.gemm(name, problem, {}, {})
        problem |= {"group_size": row["group_multiple"], "out": "f32"}
    if row["steps_only"]:
        with pytest.raises(ValueError, match=rf"share a step must be a multiple of {row['step_multiple']}, got 0"):
            native.gemm(name, problem, {}, {})
        problem["step_size"] = row["step_multiple"]
    if row["groups_only"]:
        pass
    elif problem["x"] not in ("f16", "bf16"):
        bound = native.k_bound(problem) // row["acc_scale"]
        beyond = (bound // 64 + 1) * 64
        with pytest.raises(ValueError, match=rf"K must be at most {bound} .* got K = {beyond}"):
            native.gemm(name, problem | {"k": beyond}, {}, {})
    if row["x_align"] > 1:
        with pytest.raises(ValueError, match=rf"x rows need {row['x_align']}-byte alignment, got 4"):
            native.gemm(name, problem | {"x_align": 4}, {}, {})
    if row["group_multiple"] == 0:
        with pytest.raises(ValueError, match=r"group size must be 0 .* got 32"):
            native.gemm(name, problem | {"group_size": 32}, {}, {})
    if row["step_multiple"] == 0:
        with pytest.raises(ValueError, match=r"share a step must be 0 .* got 32"):
            native.gemm(name, problem | {"step_size": 32}, {}, {})
    elif row["step_multiple"] > 1:
        size = row["step_multiple"] // 2
        with pytest.raises(ValueError, match=rf"share a step must be a multiple of {2 * size}, got {size}"):
            native.gemm(name, problem | {"step_size": size}, {}, {})
    if row["k_multiple"] > 8:
        multiple = max(row["k_multiple"], problem.get("step_size", 0))
        with pytest.raises(ValueError, match=rf"K must be a multiple of {multiple}, got K = 776"):
            native.gemm(name, problem | {"k": 776, "group_size": 0}, {}, {})
    if row["m_max"]:
        with pytest.raises(ValueError, match=rf"M must be at most {row['m_max']}, got M = 1000"):
            native.gemm(name, problem | {"m": 1000}, {}, {})
    with pytest.raises(ValueError, match="unknown keys"):
        native.gemm(name, problem | {"typo": 1}, {}, {})
    with pytest.raises(ValueError, match="no kernel is called 'nonesuch'"):
        native.gemm("nonesuch", problem, {}, {})
