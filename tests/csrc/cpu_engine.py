"""The CPU engine of the built library behind a plain C face, and an independent reference in numpy.

References multiply in int64 and scale in fp32 one rounded operation at a time (docs/numerics.md 2 to 4); only the
transcendental activations come from the executable specification.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from pyquant.core.names import ACTIVATIONS
from pyquant.numerics import activation as spec_activation

ROOT = Path(__file__).resolve().parents[2]
S4, S8, U8, S32, F16, BF16, F32 = range(7)  # csrc/core/dtype.h
# The lists of isas.h, one a processor: x86-64, Arm, all others.
LISTS = {"x86_64": 0, "AMD64": 0, "aarch64": 1}
ISAS_TEXT = re.split("#el", (ROOT / "csrc/cpu/isas.h").read_text())[LISTS.get(platform.machine(), 2)]
ISAS = tuple(re.findall(r"^ +X\((\w+),", ISAS_TEXT, re.M))
AMAX_FLOOR = np.float32(2.0**-100)
Array = np.ndarray

FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    *(["-fno-trapping-math"] if LISTS.get(platform.machine()) == 0 else []),
]


def isa_flags(source: Path) -> list[str] | None:
    """The flags that isa_*.cpp names in its first line; None: not for this processor."""
    if not source.stem.startswith("isa_"):
        return []
    head = re.match(r"// processors: (\w+)(?:, flags: (.*))?\n", source.read_text())
    assert head, source
    if head[1] not in ("any", {"AMD64": "x86_64"}.get(platform.machine(), platform.machine())):
        return None
    return (head[2] or "").split()


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++")


def compile_one(source: Path, folder: Path, extra: tuple[str, ...] = (), include: Path = ROOT / "csrc") -> Path:
    """The object file of one source in folder."""
    cxx = compiler()
    if cxx is None:
        raise FileNotFoundError("no C++ compiler: neither g++ nor c++ is in PATH")
    target = folder / f"{source.stem}.o"
    flags = [*FLAGS, *(isa_flags(source) or []), *extra]
    subprocess.run([cxx, *flags, f"-I{include}", "-c", str(source), "-o", str(target)], check=True)
    return target


def objects(folder: Path, harness: Path, extra: tuple[str, ...] = (), include: Path = ROOT / "csrc") -> list[Path]:
    """Object files of include/cpu and of a harness. extra: further compiler flags, e.g. of a sanitizer."""
    sources = [s for s in sorted((include / "cpu").glob("*.cpp")) if isa_flags(s) is not None] + [harness]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda source: compile_one(source, folder, extra, include), sources))


def link(target: Path, objects: Sequence[Path], *flags: str) -> Path:
    subprocess.run([str(compiler()), *flags, "-o", str(target), *map(str, objects), "-lpthread"], check=True)
    return target


NOT_COMPILED = ("avx512_vnni", "avx512_bf16", "amx_int8")  # the dearest files


def compile_for_edits(folder: Path) -> Path:
    """libcpu_engine.so and all of its object files in folder, for who changes some: half a minute, so made_once a run.
    It has the instruction sets below AVX-512: folder/include comes before csrc."""
    header, text = folder / "include/cpu/isas.h", (ROOT / "csrc/cpu/isas.h").read_text()
    fewer, lines = re.subn(rf" *\\\n +X\((?:{'|'.join(NOT_COMPILED)}), [^\\\n]*", "", text)
    assert lines == len(NOT_COMPILED), f"isas.h has {lines} lines of {NOT_COMPILED}"
    header.parent.mkdir(parents=True)
    header.write_text(fewer)
    left_out = {f"isa_{name}" for name in NOT_COMPILED}
    sources = [s for s in sorted((ROOT / "csrc/cpu").glob("*.cpp")) if isa_flags(s) is not None]
    sources = [s for s in sources if s.stem not in left_out] + [Path(__file__).with_name("cpu_harness.cpp")]
    flags = ("-O1", f"-I{header.parents[1]}")
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda source: compile_one(source, folder, flags), sources))
    return link(folder / "libcpu_engine.so", made, "-shared")


LIBRARY = ROOT / "pyquant/lib/libpyquant_core.so"


def build(folder: Path) -> Path:
    """libcpu_engine.so in folder: the harness before a copy of the built library under another name, so that threads
    and instruction sets that a test sets are not those of torch's operators."""
    copy = folder / "libpyquant_copy.so"
    name = LIBRARY.name.encode() + b"\0"
    data = LIBRARY.read_bytes()
    assert data.count(name) == 1, f"{LIBRARY.name} does not say its own name once"
    copy.write_bytes(data.replace(name, copy.name.encode() + b"\0"))
    harness = compile_one(Path(__file__).with_name("cpu_harness.cpp"), folder, ("-O1",))
    return link(folder / "libcpu_engine.so", [harness, copy], "-shared", "-Wl,-rpath,$ORIGIN,--no-undefined")


@dataclass(frozen=True)
class Symbol:
    """A function of a library. file: the source it was compiled from."""

    address: int
    size: int
    name: str
    file: str
    is_weak: bool


SYMBOL = re.compile(r"^([0-9a-f]{16}) (.{7}) (\S+)\t([0-9a-f]{16}) +(?:\.hidden )?(.*)$", re.MULTILINE)


def symbols(library: Path) -> list[Symbol]:
    """The functions of a library that is not stripped, by address. One that other files see has the file of the one
    before it: the linker lays the code of one object file together."""
    told = subprocess.run(["objdump", "-t", "-C", str(library)], check=True, capture_output=True, text=True).stdout
    found, file = [], ""
    for address, flags, _, size, name in SYMBOL.findall(told):
        if flags[6] == "f":
            file = name
        elif flags[6] == "F":
            is_local = flags[0] == "l"
            found.append(Symbol(int(address, 16), int(size, 16), name, file if is_local else "", flags[1] == "w"))
    found.sort(key=lambda symbol: symbol.address)
    for place, symbol in enumerate(found):
        if not symbol.file and place:
            found[place] = replace(symbol, file=found[place - 1].file)
    return found


def at(a: Array | None) -> ctypes.c_void_p:
    """Address of an array; null for None."""
    return ctypes.c_void_p(None if a is None else a.ctypes.data)


def load(path: Path, mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    """mode: os.RTLD_DEEPBIND where its functions are those of its copy, not of a namesake that all libraries see."""
    library = ctypes.CDLL(str(path), mode)
    library.t_packed_bytes.restype = ctypes.c_int64
    return library


# ---- 16-bit floats


def to_bf16(x: Array) -> Array:
    """fp32 -> bits of bf16, half to even; NaN is 0x7fc0."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    r = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), r)


def stored(x: Array, kind: int) -> Array:
    """fp32 values in their storage type."""
    with np.errstate(all="ignore"):
        return {F32: lambda: x.astype(np.float32), F16: lambda: x.astype(np.float16), BF16: lambda: to_bf16(x)}[kind]()


def widened(a: Array, kind: int) -> Array:
    if kind == BF16:
        return (a.astype(np.uint32) << 16).view(np.float32)
    return a.astype(np.float32)


def canonical(a: Array, kind: int) -> Array:
    """Bits, with every NaN as the same one."""
    if kind in (F32, F16):
        bits = np.ascontiguousarray(a).view(np.uint32 if kind == F32 else np.uint16)
        return np.where(np.isnan(a), bits.dtype.type(0x7FC0), bits)
    if kind == BF16:
        return np.where(np.isnan(widened(a, BF16)), np.uint16(0x7FC0), a)
    return a


STORAGE = {F32: np.float32, F16: np.float16, BF16: np.uint16, S32: np.int32, S8: np.int8}


# ---- formulas


def code_from_real(x: Array, recip: Array, zero: Array, qmin: int, qmax: int) -> Array:
    with np.errstate(all="ignore"):
        v = np.rint((x * recip).astype(np.float32))
    zero = np.asarray(zero, np.int64)
    v = np.clip(np.where(np.isnan(v), 0, v), qmin - zero, qmax - zero)
    return (v.astype(np.int64) + zero).astype(np.int8)


def row_params(x: Array, symmetric: bool, qmin: int, qmax: int) -> tuple[Array, Array]:
    """scale fp32 and zero point of each row of x [rows, cols]."""
    rows = len(x)
    x = np.concatenate([x, np.zeros((rows, 1), np.float32)], axis=1)  # a range always contains zero
    finite = np.isfinite(x).all(axis=1)
    x = np.where(finite[:, None], x, np.float32(0))
    low, high = x.min(axis=1), x.max(axis=1)
    amax = np.maximum(high, -low)
    if symmetric:
        scale = np.where(amax < AMAX_FLOOR, np.float32(1), amax / np.float32(qmax))
        return np.where(finite, scale, np.float32(np.nan)).astype(np.float32), np.zeros(rows, np.int32)
    steps = np.float32(qmax - qmin)
    scale = np.where(amax < AMAX_FLOOR, np.float32(1), high / steps - low / steps).astype(np.float32)
    recip = np.float32(1) / scale
    zero = np.clip(qmin - np.rint(low * recip).astype(np.int64), qmin, qmax)
    return np.where(finite, scale, np.float32(np.nan)), np.where(finite, zero, 0).astype(np.int32)


_TRANSCENDENTAL = {
    "gelu": spec_activation.gelu_erf,
    "gelu_tanh": spec_activation.gelu_tanh,
    "silu": spec_activation.silu,
}


def activate(t: Array, activation: int, low: float, high: float) -> Array:
    name = ACTIVATIONS[activation]
    if name == "relu":
        return np.where(t < 0, np.float32(0), t)
    if name == "clamp":
        t = np.where(t < low, np.float32(low), t)
        return np.where(t > high, np.float32(high), t)
    if name == "none":
        return t
    return _TRANSCENDENTAL[name](torch.from_numpy(np.ascontiguousarray(t))).numpy()


@dataclass
class Finish:
    """What follows the accumulator; None: absent. Shapes as in csrc/core/problem.h."""

    w_scale: Array | None = None
    x_scale: Array | None = None
    bias: Array | None = None
    residual: Array | None = None
    residual_type: int = F32
    activation: int = 0
    clamp: tuple[float, float] = (0.0, 0.0)
    out: int = F32
    out_scale: Array | None = None
    out_zero: Array | None = None
    out_range: tuple[int, int] = (-127, 127)

    def float_steps(self, t: Array) -> Array:
        """Bias, activation, residual, store."""
        if self.bias is not None:
            t = t + self.bias
        t = activate(t.astype(np.float32), self.activation, *self.clamp)
        if self.residual is not None:
            t = t + widened(self.residual, self.residual_type)
        if self.out != S8:
            return stored(t, self.out)
        recip = np.float32(1) / self.out_scale[0]
        return code_from_real(t, recip, self.out_zero[0] if self.out_zero is not None else 0, *self.out_range)


@dataclass
class Gemm:
    """x, w: real integer codes (int64); zero: [] or [m] in the terms of x."""

    x: Array
    w: Array
    zero: Array | None = None
    group: int = 0
    finish: Finish = field(default_factory=Finish)

    def accumulators(self) -> Array:
        """int64 [groups, m, n] after the zero-point term."""
        k = self.x.shape[1]
        groups, group = (k // self.group, self.group) if self.group else (1, k)
        shifted = self.x - (0 if self.zero is None else self.zero.reshape(-1, 1))
        # Exact: every product and partial sum is an integer below 2^53.
        x, w = shifted.astype(np.float64), self.w.astype(np.float64)
        parts = [x[:, g * group : (g + 1) * group] @ w[:, g * group : (g + 1) * group].T for g in range(groups)]
        return np.array(parts, np.float64).reshape(groups, len(self.x), len(self.w)).astype(np.int64)

    def result(self) -> Array:
        f, acc = self.finish, self.accumulators()
        if f.out == S32:
            return acc[0].astype(np.int32)
        with np.errstate(all="ignore"):
            if self.group:
                t = np.zeros(acc.shape[1:], np.float32)
                for g, part in enumerate(acc):
                    t = t + part.astype(np.float32) * (f.w_scale[:, g] if f.w_scale is not None else np.float32(1))
            else:
                t = acc[0].astype(np.float32)
            if f.x_scale is not None and f.x_scale.ndim == 0 and not self.group:
                t = t * (f.x_scale * f.w_scale if f.w_scale is not None else f.x_scale)
            else:
                if f.w_scale is not None and not self.group:
                    t = t * f.w_scale
                if f.x_scale is not None:
                    t = t * f.x_scale.reshape(-1, 1)
            return f.float_steps(t.astype(np.float32))


def packed_nibbles(codes: Array) -> Array:
    """[rows, k] codes -> uint8 [rows, ceil(k / 2)]."""
    even, odd = codes[:, 0::2], codes[:, 1::2]
    out = (even & 15).astype(np.uint8)
    out[:, : odd.shape[1]] |= ((odd & 15) << 4).astype(np.uint8)
    return out
