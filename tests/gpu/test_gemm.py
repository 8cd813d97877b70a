"""Every GEMM row of the kernel table against the executable specification, bit for bit: every output type, epilogue
option, tail and stride, in every mode of the simulator or on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import accept
import pytest
import torch
from gpu_device import SENTINEL, Memory
from problems import BASE_SEED, Draw
from torch import Tensor

from pyquant.numerics.gemm import gemm as specification
from pyquant.numerics.pack import pack_int4

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "s32": torch.int32, "s8": torch.int8}
ACTIVATIONS = ("none", "relu", "clamp", "gelu", "gelu_tanh", "silu")
NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
ROWS = {row["name"]: row for row in NATIVE.kernel_table() if row["compiled"]}
TYPES = {"s8": (-128, 127), "u8": (0, 255), "s4": (-8, 7)}
CASES = 24


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
        return specification(**self.call)


def _padded(codes: Tensor, ld: int) -> Tensor:
    """Rows of codes at a stride of ld, with junk between them."""
    wide = torch.full((codes.shape[0], ld), 113, dtype=codes.dtype)
    wide[:, : codes.shape[1]] = codes
    return wide


def _shape(draw: Draw, row: dict[str, Any]) -> tuple[int, int, int, int]:
    """m, n, k and the multiple that row strides need: tails on every side of the tile, small sizes often."""
    tile_m, tile_n, tile_k = row["tile"]
    m = draw.choice((1, 2, 7, 16, 33, 64, 65, 100, 130, tile_m, tile_m + 1, draw.integer(1, 130)))
    n = draw.choice((1, 3, 8, 24, 77, tile_n - 1, tile_n, tile_n + 9, draw.integer(1, 2 * tile_n)))
    if row["family"] == "sm80":
        return m, n, 16 * draw.integer(1, draw.choice((3, 8)) * tile_k // 16 + 2), 16
    k = draw.choice((1, 15, 16, 33, tile_k, tile_k + 1, 3 * tile_k + 5, draw.integer(1, 7 * tile_k)))
    if row["family"] == "simt":
        return m, n, draw.choice((0, k)), 1
    return m, n, k, 16


def _quantised(draw: Draw, row: dict[str, Any], m: int, n: int, k: int) -> dict[str, Any]:
    x_type = draw.choice(row["x"])
    w_type = draw.choice(row["w"])
    x = draw.codes(*TYPES[x_type], m, k).to(torch.uint8 if x_type == "u8" else torch.int8)
    w = draw.codes(*TYPES[w_type], n, k).to(torch.int8)
    return {"x": x, "w": w, "x_type": x_type, "w_type": w_type}


def make_case(name: str, out: str, index: int) -> Case:
    row = ROWS[name]
    draw = Draw(BASE_SEED, "gpu gemm", name, out, index)
    m, n, k, multiple = _shape(draw, row)
    q = _quantised(draw, row, m, n, k)
    x, w = q["x"], q["w"]
    size = max(k, 1) ** 0.5 * 3000.0
    call: dict[str, Any] = {"x": x, "w": w, "out_dtype": DTYPES[out]}
    problem: dict[str, Any] = {"m": m, "n": n, "k": k, "x": q["x_type"], "w": q["w_type"], "out": out}
    epilogue: dict[str, Any] = {}
    memory: dict[str, Tensor | None] = {}

    zero_point = draw.choice(("absent", "scalar", "token"))
    if zero_point != "absent":
        count = m if zero_point == "token" else 1
        zp = draw.codes(*TYPES[q["x_type"]], count)
        call["x_zero_point"] = zp if zero_point == "token" else zp[0]
        problem |= {"has_zero_point": True, "per_token_zero_point": zero_point == "token"}
        memory["x_zero_point"] = zp
    grouped = row["family"] == "simt" and out != "s32" and k > 0 and draw.chance(0.4)
    group_size = draw.choice([g for g in range(1, k + 1) if k % g == 0]) if grouped else 0
    groups = k // group_size if group_size else 1
    call["group_size"] = problem["group_size"] = group_size
    memory["w_sum"] = (
        w.to(torch.int32).reshape(n, groups, -1).sum(-1, dtype=torch.int32)
        if k
        else torch.zeros(n, 1, dtype=torch.int32)
    )

    if out != "s32":
        x_scale = draw.choice(("absent", "scalar", "token", "token"))
        if x_scale != "absent":
            s = torch.exp2(draw.normal(m if x_scale == "token" else 1))
            call["x_scale"] = s if x_scale == "token" else s[0]
            problem["per_token_scale"] = x_scale == "token"
            memory["x_scale"] = s
        if group_size or draw.chance(0.85):
            s = torch.exp2(draw.normal(n, groups)) / size
            call["w_scale"] = memory["w_scale"] = s if group_size else s[:, 0].contiguous()
        if draw.chance(0.6):
            call["bias"] = memory["bias"] = draw.normal(n)
        residual = draw.choice(("absent", "f16", "bf16", "f32"))
        if residual != "absent":
            ldr = n + draw.choice((0, 0, 1, 8))
            r = draw.normal(m, ldr).to(DTYPES[residual])
            call["residual"], memory["residual"] = r[:, :n], r
            problem |= {"residual": residual, "ldr": ldr, "residual_align": _alignment(ldr * r.element_size())}
        activation = draw.choice(ACTIVATIONS)
        call |= {"activation": activation, "clamp_min": -0.75, "clamp_max": 0.5}
        epilogue |= {"activation": activation, "clamp_min": -0.75, "clamp_max": 0.5}
    if out == "s8":
        scale = torch.full((1,), 0.013)
        zp = draw.codes(-20, 20, 1)
        low = draw.choice((-127, -128))
        call |= {"out_scale": scale, "out_zero_point": zp[0], "out_qmin": low, "out_qmax": 127}
        epilogue |= {"out_qmin": low, "out_qmax": 127}
        memory |= {"out_scale": scale, "out_zero_point": zp}

    ldx = -(-max(k, 1) // multiple) * multiple + multiple * draw.choice((0, 0, 1))
    ldw = -(-max(k, 1) // multiple) * multiple + multiple * draw.choice((0, 0, 1))
    memory["x"] = _padded(x, ldx)
    memory["w"] = _padded(w, ldw)
    if q["w_type"] == "s4":
        ldw = k + k % 2
        memory["w"] = pack_int4(w)
    out_bytes = DTYPES[out].itemsize
    step = 16 // out_bytes
    ldo = (
        -(-n // step) * step + step * draw.choice((0, 1)) if row["family"] == "sm90" else n + draw.choice((0, 0, 1, 8))
    )
    problem |= {"ldx": ldx, "ldw": ldw, "ldo": ldo, "out_align": _alignment(ldo * out_bytes)}
    if multiple == 1:
        problem |= {"x_align": 1, "w_align": 1}
    return Case(name, out, call, problem, epilogue, memory, f"make_case({name!r}, {out!r}, {index}) seed {BASE_SEED}")


def _alignment(nbytes: int) -> int:
    return min(16, nbytes & -nbytes) if nbytes else 16


def run(native: Any, device: Memory, case: Case) -> Tensor:
    """The output [m, n]; checks that nothing outside of it was written."""
    m, n, ldo = case.problem["m"], case.problem["n"], case.problem["ldo"]
    operands = {name: device.put(tensor) for name, tensor in case.memory.items()}
    dtype = DTYPES[case.out]
    nbytes = m * ldo * dtype.itemsize
    operands["out"] = device.put(torch.full((nbytes,), SENTINEL, dtype=torch.uint8))
    native.gemm(case.row, case.problem, operands, case.epilogue)
    raw = device.get(operands["out"], nbytes)
    outside = raw.reshape(m, ldo * dtype.itemsize)[:, n * dtype.itemsize :]
    assert bool((outside == SENTINEL).all()), f"{case.repeat}: wrote beyond the output's columns"
    return raw.view(dtype).reshape(m, ldo)[:, :n].contiguous()


def compare(got: Tensor, want: Tensor, what: str) -> None:
    waiver = "random options: a case of its own may be nearly constant, the sum of cases is not"
    if want.is_floating_point():
        accept.t1(got, want, what=what, waiver=waiver)
    else:
        accept.t0(got, want, what=what, waiver=waiver)


ROW_OUTPUTS = [(name, out) for name, row in ROWS.items() for out in row["out"]]


@pytest.mark.parametrize(("name", "out"), ROW_OUTPUTS, ids=[f"{n}-{o}" for n, o in ROW_OUTPUTS])
def test_row_equals_the_specification(native: Any, device: Memory, name: str, out: str) -> None:
    for index in range(CASES):
        case = make_case(name, out, index)
        compare(run(native, device, case), case.want(), case.repeat)
        device.free()


@pytest.mark.parametrize("name", ROWS)
def test_zero_sizes_are_legal(native: Any, plain_device: Memory, name: str) -> None:
    row = ROWS[name]
    for out in row["out"]:
        for m, n, k in ((0, 16, 32), (16, 0, 32), (5, 16, 0)):
            x, w = torch.zeros(m, k, dtype=torch.int8), torch.zeros(n, k, dtype=torch.int8)
            call: dict[str, Any] = {"x": x, "w": w, "out_dtype": DTYPES[out]}
            memory: dict[str, Tensor | None] = {"x": x, "w": w}
            if out != "s32":
                call["bias"] = memory["bias"] = torch.linspace(-1, 1, n)
            if out == "s8":
                call["out_scale"] = memory["out_scale"] = torch.tensor(0.01)
            problem = {"m": m, "n": n, "k": k, "ldx": 32, "ldw": 32, "ldo": 16, "out": out}
            got = run(native, plain_device, Case(name, out, call, problem, {}, memory, f"{name} {out} {m}x{n}x{k}"))
            compare(got, specification(**call), f"{name} {out} {m}x{n}x{k}")


def _launched(native: Any, device: Memory, name: str) -> tuple[Tensor, dict[str, Any]]:
    """One float32 or float16 launch with every epilogue step in it, and its operands."""
    out = "f32" if "f32" in ROWS[name]["out"] else ROWS[name]["out"][0]
    draw = Draw(BASE_SEED, "mutants", name)
    m, n, k = 65, 128, 128
    call: dict[str, Any] = {
        "x": draw.codes(-128, 127, m, k).to(torch.int8),
        "w": draw.codes(-127, 127, n, k).to(torch.int8),
        "x_zero_point": draw.codes(-9, 9, m),
        "x_scale": torch.exp2(draw.normal(m)),
        "w_scale": torch.exp2(draw.normal(n)) / 40000,
        "bias": draw.normal(n),
        "residual": draw.normal(m, n),
        "activation": "silu",
        "out_dtype": DTYPES[out],
    }
    memory = {key: call[key] for key in ("x", "w", "x_zero_point", "x_scale", "w_scale", "bias", "residual")}
    memory["w_sum"] = call["w"].sum(-1, dtype=torch.int32)
    problem = {
        "m": m,
        "n": n,
        "k": k,
        "out": out,
        "has_zero_point": True,
        "per_token_zero_point": True,
        "per_token_scale": True,
    }
    case = Case(
        name, out, call, problem | {"ldx": k, "ldw": k, "ldo": n, "ldr": n}, {"activation": "silu"}, memory, name
    )
    return run(native, device, case), call


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


FLOAT_ROWS = [n for n, r in ROWS.items() if {"f32", "f16"} & set(r["out"])]


@pytest.mark.parametrize("name", FLOAT_ROWS)
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
    # Storing 16 bits hides last-bit differences of the order; fp32 output hides none.
    allowed = {
        "multiply and add contracted",
        "scales in the other order",
        "scales multiplied first",
        "one rounding for all",
    }
    assert not set(unseen) - (allowed if got.dtype != torch.float32 else set()), unseen


@pytest.mark.parametrize("name", ROWS)
def test_refusals_name_both_numbers(native: Any, plain_device: Memory, name: str) -> None:
    row = ROWS[name]
    problem = {"m": 4, "n": 16, "k": 131072, "out": row["out"][0]}
    with pytest.raises(ValueError, match=r"K must be at most 131071 .* got K = 131072"):
        native.gemm(name, problem, {}, {})
    if row["family"] != "simt":
        with pytest.raises(ValueError, match=r"x rows need 16-byte alignment, got 4"):
            native.gemm(name, problem | {"k": 64, "x_align": 4}, {}, {})
        with pytest.raises(ValueError, match=r"group size must be 0 .* got 32"):
            native.gemm(name, problem | {"k": 64, "group_size": 32}, {}, {})
    if row["family"] == "sm80":
        with pytest.raises(ValueError, match=r"K must be a multiple of 16, got K = 24"):
            native.gemm(name, problem | {"k": 24}, {}, {})
    with pytest.raises(ValueError, match="unknown keys"):
        native.gemm(name, problem | {"typo": 1}, {}, {})
    with pytest.raises(ValueError, match="no kernel is called 'nonesuch'"):
        native.gemm("nonesuch", problem, {}, {})
