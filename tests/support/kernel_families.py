"""What the machine code of a kernel's row looks like: which function it is, and how often that holds the instruction of
the tensor cores for which the row is built. A family of cmake/kernels.cmake is one line of FAMILIES."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import machine_code
import pytest
from problems import BASE_SEED

NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
LIBRARY = Path(NATIVE.__file__).parent / "lib" / "libpyquant_core.so"
TABLE = Path(__file__).resolve().parents[2] / "cmake" / "kernels.cmake"
Row = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """kernel: in the mangled names of the family's kernels, and of no other's, as a function of a row where it tells
    rows apart. count: how often a row's kernel holds the instruction; None: once at least. waits: for the predecessor
    in the stream, of kernels that are launched to overlap with it; as many at least."""

    kernel: str | Callable[[Row], str]
    architectures: tuple[str, ...]
    instruction: str
    count: Callable[[Row], int] | None = None
    waits: int = 0

    def pattern(self, row: Row) -> str:
        return self.kernel if isinstance(self.kernel, str) else self.kernel(row)


def warp_steps(depth: int) -> Callable[[Row], int]:
    """mma.sync: a warp's tile in products of 16 x 8 x depth, once."""

    def count(row: Row) -> int:
        m, n, k = machine_code.warp_shapes(TABLE)[row["family"], "x".join(map(str, row["tile"]))]
        return m * n * k // (16 * 8 * depth)

    return count


def _universal(row: Row) -> str:
    """CUTLASS's kernel, for one matrix or for experts."""
    return "GemmUniversal.*ExpertMain.*" if row["experts_only"] else "GemmUniversal(?!.*ExpertMain).*"


def _wgmma(types: str, depth: int) -> Callable[[Row], str]:
    """The wgmma of a row stands in its kernel's name: swapped rows have their tokens for columns."""

    def kernel(row: Row) -> str:
        columns = row["tile"][0 if row["schedule"].startswith("swapped") else 1]
        return rf"{_universal(row)}MMA_64x{columns}x{depth}_{types}_SS"

    return kernel


def _mixed_input(row: Row) -> str:
    """CUTLASS's mixed-input kernel: a tile of 160 tokens is five products of 32."""
    return rf"GemmUniversal.*MMA_64x{32 if row['tile'][0] == 160 else row['tile'][0]}x32_S32S8S8_RS"


def blocked(has_steps: bool) -> Callable[[Row], str]:
    """Our main loop over blocked weights: tokens, and behind buffers and schedule whether codes have steps."""

    def kernel(row: Row) -> str:
        return rf"{_universal(row)}MainBlocked90ILi128ELi{row['tile'][0]}ELi\d+E[^L]*?Lb{int(has_steps)}E"

    return kernel


def _groups90(name: str, row: Row) -> str:
    """Our kernel of Hopper for group scales, by its tokens."""
    return rf"gemm_groups90_kernel\w*?\d{name}I\w*BlockedTiles90ILi128ELi{row['tile'][0]}E"


def in_registers(row: Row) -> bool:
    """Whether a row of integer weights under floats widens them in the registers of the warps that multiply."""
    return bool(row["rounds_weights"] or row["tile"][2] == 256)


def _weight_only(math: str, float_type: str = "6__half") -> Callable[[Row], str]:
    """Our main loops over integer weights under floats, by their tokens: widened in registers, of rounded weights or of
    scaled sums, or in shared memory."""

    def kernel(row: Row) -> str:
        in_sums = "RegisterTiles90" if in_registers(row) else "WeightOnlyTiles90"
        tiles = "RoundedTiles90" if row["rounds_weights"] else in_sums
        kernel = "WeightOnlyExpertsKernel90" if row["experts_only"] else "WeightOnlyKernel90"
        return rf"gemm_weight_only90_kernel\w*?\d{kernel}I.*{tiles}I\w*{math}I{float_type}EELi{row['tile'][0]}E"

    return kernel


def _weight_only80(bits: int, experts: str) -> Callable[[Row], str]:
    """The same by mma.sync."""

    def kernel(row: Row) -> str:
        m, n, _ = row["tile"]
        return rf"gemm_weight_only{experts}80_kernel.*11DecodeW{bits}A16I6__halfEELi{m}ELi{n}E"

    return kernel


def _weight_only_steps(row: Row) -> int:
    """Instructions of the three loops, for groups of 32, 64 and 128 codes and more. In shared memory: a step of 128
    codes each, of the last one where two products are alive another in front and one more in the loop; of a fourth
    loop, under a scale a channel, one in front and one. In registers: two groups each. Of rounded weights: two loops,
    with groups and without, of 64 codes."""
    if row["rounds_weights"]:
        return 2 * 64 // 16
    if in_registers(row):
        return (32 + 64 + 128) * 2 // 16
    return 8 * (2 + (3 if row["tile"][0] <= 64 else 1) + 2)


def _warpgroup_steps(depth: int) -> Callable[[Row], int]:
    """wgmma: 64 rows by `depth` at a time, in the first step of K and in the loop over the others."""

    def count(row: Row) -> int:
        rows = row["tile"][1 if row["schedule"].startswith("swapped") else 0]
        warpgroups = 2 if row["schedule"].endswith(("cooperative", "streamk")) else 1
        return 2 * (row["tile"][2] // depth) * (rows // (64 * warpgroups))

    return count


def _multistage(x: str) -> str:
    """CUTLASS's mma.sync kernel, by how the mangled name spells the type of the activations."""
    return rf"GemmWithEpilogueVisitor[^P]*PredicatedTileAccessIteratorINS_11MatrixShapeILi\d+ELi\d+EEE{x}"


def decode(math: str, clusters: bool, groups: int = 0, tokens: int = 0) -> Callable[[Row], str]:
    """The decode kernel for a whole tile of tokens (or `tokens` of it); groups: 0 none, 1 whole steps of K, 2 parts."""

    def kernel(row: Row) -> str:
        m, n = tokens or row["tile"][0], row["tile"][1]
        own = rf"9decode256I.*{math}EE" if row["schedule"] == "decode256" else math
        return rf"decode_kernel.*{own}ELi{n}ELi{m}ELi\dELNS\w*_12DecodeGroupsE{groups}ELb{int(clusters)}E"

    return kernel


def _decode_families(prefix: str, architectures: tuple[str, ...], clusters: bool) -> dict[str, Family]:
    integers, floats, waits = r"IMMA\.16832\.S8\.S8", r"HMMA\.16816\.F32", int(clusters)
    return {
        prefix + "s8s8": Family(decode("10DecodeS8S8", clusters), architectures, integers, waits=waits),
        prefix + "s8s4": Family(decode("10DecodeS8S4", clusters), architectures, integers, waits=waits),
        prefix + "w8a16": Family(decode("11DecodeW8A16I6__halfE", clusters), architectures, floats, waits=waits),
        prefix + "w4a16": Family(decode("11DecodeW4A16I6__halfE", clusters), architectures, floats, waits=waits),
    }


BOTH = ("sm_80", "sm_90")
# Two waits of wgmma kernels: of the warp that fetches tiles, and of the epilogue before it reads scales.
FAMILIES = {
    "simt": Family("gemm_simt_kernel", BOTH, r"IDP\.4A"),
    "sm80_s8s8": Family(_multistage("a") + "(?!.*MixedInput)", BOTH, r"IMMA\.16832\.S8\.S8", warp_steps(32)),
    "sm80_u8s8": Family(_multistage("h"), BOTH, r"IMMA\.16832\.U8\.S8", warp_steps(32)),
    "sm80_s8s4": Family(_multistage("a") + ".*MixedInput", BOTH, r"IMMA\.16832\.S8\.S8", warp_steps(32)),
    "sm80_s8s4_blocked": Family(
        lambda row: "gemm_blocked80_kernel.*BlockedTraits80ILi{}ELi{}E".format(*row["tile"]),
        BOTH,
        r"IMMA\.16832\.S8\.S8",
        warp_steps(32),
    ),
    "sm80_s8s4_groups": Family(
        lambda row: "gemm_groups80_kernel.*GroupsTraits80ILi{}ELi{}E".format(*row["tile"]),
        BOTH,
        r"IMMA\.16832\.S8\.S8",
        warp_steps(32),
    ),
    "sm80_s8s4_steps": Family(
        lambda row: "gemm_steps80_kernel.*GroupsTraits80ILi{}ELi{}E".format(*row["tile"]),
        BOTH,
        r"IMMA\.16832\.S8\.S8",
        warp_steps(32),
    ),
    "sm80_s8s8_conv": Family(r"gemm_conv80_kernel.*Types80Iaai", BOTH, r"IMMA\.16832\.S8\.S8", warp_steps(32)),
    "sm80_s8s8_experts": Family(r"gemm_experts80_kernel.*Types80Iaai", BOTH, r"IMMA\.16832\.S8\.S8", warp_steps(32)),
    "sm80_s8s4_experts": Family(
        r"gemm_experts80_kernel.*Types80IaN\w+integer_subbyte", BOTH, r"IMMA\.16832\.S8\.S8", warp_steps(32)
    ),
    "sm80_s8s4_blocked_experts": Family(
        lambda row: "gemm_blocked_experts80_kernel.*BlockedTraits80ILi{}ELi{}E".format(*row["tile"]),
        BOTH,
        r"IMMA\.16832\.S8\.S8",
        warp_steps(32),
    ),
    "sm80_s8s4_groups_experts": Family(
        lambda row: "gemm_groups_experts80_kernel.*GroupsTraits80ILi{}ELi{}E".format(*row["tile"]),
        BOTH,
        r"IMMA\.16832\.S8\.S8",
        warp_steps(32),
    ),
    **{
        f"sm80_w{bits}a16{experts}": Family(_weight_only80(bits, experts), BOTH, r"HMMA\.16816\.F32$", warp_steps(16))
        for bits in (4, 8)
        for experts in ("", "_experts")
    },
    "sm80_s4s4": Family(
        _multistage("NS_15integer_subbyteILi4ELb1EEE"), ("sm_80",), r"IMMA\.16864\.S4\.S4", warp_steps(64)
    ),
    "sm80_f16": Family(_multistage("NS_6half_t"), BOTH, r"HMMA\.16816\.F32$", warp_steps(16)),
    "sm80_bf16": Family(_multistage("NS_10bfloat16_t"), BOTH, r"HMMA\.16816\.F32\.BF16", warp_steps(16)),
    "sm90_s8s8": Family(_wgmma("S32S8S8", 32), ("sm_90a",), r"IGMMA\.64\w+\.S8\.S8", _warpgroup_steps(32), 2),
    "sm90_s8s8_experts": Family(_wgmma("S32S8S8", 32), ("sm_90a",), r"IGMMA\.64\w+\.S8\.S8", _warpgroup_steps(32), 2),
    "sm90_f16": Family(_wgmma("F32F16F16", 16), ("sm_90a",), r"HGMMA\.64\w+\.F32$", _warpgroup_steps(16), 2),
    "sm90_bf16": Family(_wgmma("F32BF16BF16", 16), ("sm_90a",), r"HGMMA\.64\w+\.F32\.BF16", _warpgroup_steps(16), 2),
    # Weights from registers. Ours: a tile of K is 4 steps, which stand once for each set of registers and once for a
    # last odd tile.
    "sm90_s8s4": Family(_mixed_input, ("sm_90a",), r"IGMMA\.64\w+\.S8\.S8", None, 2),
    **{
        f"sm90_s8s4_{weights}{experts}": Family(
            blocked(has_steps=weights == "steps"),
            ("sm_90a",),
            r"IGMMA\.64\w+\.S8\.S8",
            lambda row: 24 if row["tile"][0] == 160 else 12,
            2,  # 160: twice 80
        )
        for weights in ("blocked", "steps")
        for experts in ("", "_experts")
    },
    **{
        f"sm90_s8s4_groups{experts}": Family(
            partial(_groups90, "GroupsExpertsKernel" if experts else "GroupsKernel"),
            ("sm_90a",),
            r"IGMMA\.64\w+\.S8\.S8",
            # Groups of 128 codes: 4 steps to begin with, for each set of registers; of 64: half of it; longer ones: 2.
            lambda row: 6 + (2 if row["tile"][0] > 80 else 1) * 12 + 2,
            2,
        )
        for experts in ("", "_experts")
    },
    "sm90_w8a16": Family(_weight_only("11DecodeW8A16"), ("sm_90a",), r"HGMMA\.64\w+\.F32$", _weight_only_steps, 2),
    "sm90_w4a16": Family(_weight_only("11DecodeW4A16"), ("sm_90a",), r"HGMMA\.64\w+\.F32$", _weight_only_steps, 2),
    **{
        f"sm90_w{bits}a16_rounded{experts}": Family(
            _weight_only(f"11DecodeW{bits}A16"), ("sm_90a",), r"HGMMA\.64\w+\.F32$", _weight_only_steps, 2
        )
        for bits in (4, 8)
        for experts in ("", "_experts")
    },
    **_decode_families("decode_", BOTH, clusters=False),
    "decode_s8s4_blocked": Family(decode("17DecodeS8S4Blocked", False), BOTH, r"IMMA\.16832\.S8\.S8"),
    "decode_s8s4_wide": Family(decode("10DecodeS8S4", False), BOTH, r"IMMA\.16832\.S8\.S8"),
    **_decode_families("sm90_decode_", ("sm_90a",), clusters=True),
    "decode_s8s4_steps": Family(decode("15DecodeS8S4Steps", False), BOTH, r"IMMA\.16832\.S8\.S8"),
    "sm90_decode_s8s4_steps": Family(
        decode("22DecodeS8S4BlockedSteps", True), ("sm_90a",), r"IMMA\.16832\.S8\.S8", waits=1
    ),
    "sm90_decode_s8s4_blocked": Family(
        decode("17DecodeS8S4Blocked", True),
        ("sm_90a",),
        r"IMMA\.16832\.S8\.S8",
        waits=1,
    ),
}


def built_for(architecture: str) -> bool:
    """A build of one's own may be for the GPU at hand alone."""
    built = NATIVE.build_info()["architectures"].split(";")
    return architecture in {f"sm_{arch}" for arch in built} | {f"sm_{arch.rstrip('a')}" for arch in built}


def rows_of(family: str) -> list[Row]:
    return [row for row in NATIVE.kernel_table() if row["compiled"] and row["family"] == family]


PRODUCTS = "GemmUniversal|GemmWithEpilogue|gemm_\\w+_kernel|decode_kernel"
ELEMENT = re.compile(r"13__nv_bfloat16|6__half|(?<=I)f(?=[EL])|S\d_")


def measured(keys: Iterable[machine_code.Key]) -> frozenset[machine_code.Key]:
    """The kernels whose steps are counted: a product's, on the oldest GPU that runs it."""
    return frozenset(key for key in keys if key[0] in ("sm_80", "sm_90a") and re.search(PRODUCTS, key[1]))


def others(keys: Iterable[machine_code.Key]) -> frozenset[machine_code.Key]:
    """The other ones that are read, for an instruction that they hold or must not hold: products on newer GPUs; and of
    what makes codes, half of all code, every form with one of its element types on sm_90, and one form of each kernel
    on sm_80. The bytes of the library say which one: each change of it reads others. Nightly all of them."""
    keys = frozenset(keys) - measured(keys)
    if os.environ.get("PYQUANT_NIGHTLY", "") not in ("", "0"):
        return keys
    coin = hashlib.sha256(f"{BASE_SEED}".encode() + LIBRARY.read_bytes())
    forms: dict[Any, list[tuple[bytes, machine_code.Key]]] = {}
    for arch, name in keys:
        if re.search(PRODUCTS, name):
            form = name
        else:
            form = ELEMENT.sub("T", name) if arch == "sm_90" else name.partition("_kernel")[0]
        toss = coin.copy()
        toss.update(f"{arch} {name}".encode())
        forms.setdefault((arch, form), []).append((toss.digest(), (arch, name)))
    return frozenset(min(some)[1] for some in forms.values())
