"""The machine code of the kernels: the tensor-core instruction that each row is built for, as often as its tile needs,
no local memory (spills), and the wait of every kernel that may start before its predecessor has ended. A family of
cmake/kernels.cmake is one line of FAMILIES."""

from __future__ import annotations

import collections
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine_code
import pytest

NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
LIBRARY = Path(NATIVE.__file__).parent / "lib" / "libpyquant_core.so"
TABLE = Path(__file__).resolve().parents[2] / "cmake" / "kernels.cmake"
WAIT = "ACQBULK"  # griddepcontrol.wait
Row = dict[str, Any]
Functions = dict[tuple[str, str], collections.Counter[str]]


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


def _warp_steps(depth: int) -> Callable[[Row], int]:
    """mma.sync: a warp's tile in products of 16 x 8 x depth, once."""

    def count(row: Row) -> int:
        m, n, k = machine_code.warp_shapes(TABLE)[row["family"], "x".join(map(str, row["tile"]))]
        return m * n * k // (16 * 8 * depth)

    return count


def _wgmma(types: str, depth: int) -> Callable[[Row], str]:
    """The wgmma of a row stands in its kernel's name: swapped rows have their tokens for columns."""

    def kernel(row: Row) -> str:
        columns = row["tile"][0 if row["schedule"].startswith("swapped") else 1]
        return rf"GemmUniversal.*MMA_64x{columns}x{depth}_{types}_SS"

    return kernel


def _mixed_input(row: Row) -> str:
    """CUTLASS's mixed-input kernel: a tile of 160 tokens is five products of 32."""
    return rf"GemmUniversal.*MMA_64x{32 if row['tile'][0] == 160 else row['tile'][0]}x32_S32S8S8_RS"


def _blocked(has_steps: bool) -> Callable[[Row], str]:
    """Our main loop over blocked weights: tokens, and behind buffers and schedule whether codes have steps."""

    def kernel(row: Row) -> str:
        return rf"GemmUniversal.*MainBlocked90ILi128ELi{row['tile'][0]}ELi\d+E[^L]*?Lb{int(has_steps)}E"

    return kernel


def _weight_only(math: str, float_type: str = "6__half") -> Callable[[Row], str]:
    """Our main loop over integer weights under floats, by its tokens."""

    def kernel(row: Row) -> str:
        return rf"gemm_weight_only90_kernel.*{math}I{float_type}EELi{row['tile'][0]}E"

    return kernel


def _weight_only_steps(row: Row) -> int:
    return 8 * (2 + (3 if row["tile"][0] <= 64 else 1))


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


def _decode(math: str, clusters: bool, groups: int = 0, tokens: int = 0) -> Callable[[Row], str]:
    """The decode kernel for a whole tile of tokens (or `tokens` of it); groups: 0 none, 1 whole steps of K, 2 parts."""

    def kernel(row: Row) -> str:
        m, n = tokens or row["tile"][0], row["tile"][1]
        return rf"decode_kernel.*{math}ELi{n}ELi{m}ELi\dELNS\w*_12DecodeGroupsE{groups}ELb{int(clusters)}E"

    return kernel


def _decode_families(prefix: str, architectures: tuple[str, ...], clusters: bool) -> dict[str, Family]:
    integers, floats, waits = r"IMMA\.16832\.S8\.S8", r"HMMA\.16816\.F32", int(clusters)
    return {
        prefix + "s8s8": Family(_decode("10DecodeS8S8", clusters), architectures, integers, waits=waits),
        prefix + "s8s4": Family(_decode("10DecodeS8S4", clusters), architectures, integers, waits=waits),
        prefix + "w8a16": Family(_decode("11DecodeW8A16I6__halfE", clusters), architectures, floats, waits=waits),
        prefix + "w4a16": Family(_decode("11DecodeW4A16I6__halfE", clusters), architectures, floats, waits=waits),
    }


BOTH = ("sm_80", "sm_90")
# Two waits of wgmma kernels: of the warp that fetches tiles, and of the epilogue before it reads scales.
FAMILIES = {
    "simt": Family("gemm_simt_kernel", BOTH, r"IDP\.4A"),
    "sm80_s8s8": Family(_multistage("a") + "(?!.*MixedInput)", BOTH, r"IMMA\.16832\.S8\.S8", _warp_steps(32)),
    "sm80_u8s8": Family(_multistage("h"), BOTH, r"IMMA\.16832\.U8\.S8", _warp_steps(32)),
    "sm80_s8s4": Family(_multistage("a") + ".*MixedInput", BOTH, r"IMMA\.16832\.S8\.S8", _warp_steps(32)),
    "sm80_s8s4_blocked": Family(
        lambda row: "gemm_blocked80_kernel.*BlockedTraits80ILi{}ELi{}E".format(*row["tile"]),
        BOTH,
        r"IMMA\.16832\.S8\.S8",
        _warp_steps(32),
    ),
    "sm80_s8s4_groups": Family(
        lambda row: "gemm_groups80_kernel.*GroupsTraits80ILi{}ELi{}E".format(*row["tile"]),
        BOTH,
        r"IMMA\.16832\.S8\.S8",
        _warp_steps(32),
    ),
    "sm80_s8s4_steps": Family(
        lambda row: "gemm_steps80_kernel.*GroupsTraits80ILi{}ELi{}E".format(*row["tile"]),
        BOTH,
        r"IMMA\.16832\.S8\.S8",
        _warp_steps(32),
    ),
    "sm80_s8s8_experts": Family(r"gemm_experts80_kernel.*Types80Iaai", BOTH, r"IMMA\.16832\.S8\.S8", _warp_steps(32)),
    "sm80_s8s4_experts": Family(
        r"gemm_experts80_kernel.*Types80IaN\w+integer_subbyte", BOTH, r"IMMA\.16832\.S8\.S8", _warp_steps(32)
    ),
    "sm80_s8s4_blocked_experts": Family(
        lambda row: "gemm_blocked_experts80_kernel.*BlockedTraits80ILi{}ELi{}E".format(*row["tile"]),
        BOTH,
        r"IMMA\.16832\.S8\.S8",
        _warp_steps(32),
    ),
    "sm80_s8s4_groups_experts": Family(
        lambda row: "gemm_groups_experts80_kernel.*GroupsTraits80ILi{}ELi{}E".format(*row["tile"]),
        BOTH,
        r"IMMA\.16832\.S8\.S8",
        _warp_steps(32),
    ),
    "sm80_w4a16": Family(
        lambda row: r"gemm_weight_only80_kernel.*11DecodeW4A16I6__halfEELi{}ELi{}E".format(*row["tile"]),
        BOTH,
        r"HMMA\.16816\.F32$",
        _warp_steps(16),
    ),
    "sm80_w8a16": Family(
        lambda row: r"gemm_weight_only80_kernel.*11DecodeW8A16I6__halfEELi{}ELi{}E".format(*row["tile"]),
        BOTH,
        r"HMMA\.16816\.F32$",
        _warp_steps(16),
    ),
    "sm80_s4s4": Family(
        _multistage("NS_15integer_subbyteILi4ELb1EEE"), ("sm_80",), r"IMMA\.16864\.S4\.S4", _warp_steps(64)
    ),
    "sm80_f16": Family(_multistage("NS_6half_t"), BOTH, r"HMMA\.16816\.F32$", _warp_steps(16)),
    "sm80_bf16": Family(_multistage("NS_10bfloat16_t"), BOTH, r"HMMA\.16816\.F32\.BF16", _warp_steps(16)),
    "sm90_s8s8": Family(_wgmma("S32S8S8", 32), ("sm_90a",), r"IGMMA\.64\w+\.S8\.S8", _warpgroup_steps(32), 2),
    "sm90_f16": Family(_wgmma("F32F16F16", 16), ("sm_90a",), r"HGMMA\.64\w+\.F32$", _warpgroup_steps(16), 2),
    "sm90_bf16": Family(_wgmma("F32BF16BF16", 16), ("sm_90a",), r"HGMMA\.64\w+\.F32\.BF16", _warpgroup_steps(16), 2),
    # Weights from registers. Ours: a tile of K is 4 steps, which stand once for each set of registers and once for a
    # last odd tile.
    "sm90_s8s4": Family(_mixed_input, ("sm_90a",), r"IGMMA\.64\w+\.S8\.S8", None, 2),
    "sm90_s8s4_blocked": Family(
        _blocked(has_steps=False),
        ("sm_90a",),
        r"IGMMA\.64\w+\.S8\.S8",
        lambda row: 24 if row["tile"][0] == 160 else 12,
        2,  # 160: twice 80
    ),
    "sm90_s8s4_steps": Family(
        _blocked(has_steps=True),
        ("sm_90a",),
        r"IGMMA\.64\w+\.S8\.S8",
        lambda row: 24 if row["tile"][0] == 160 else 12,
        2,
    ),
    "sm90_s8s4_groups": Family(
        lambda row: f"gemm_groups90_kernel.*BlockedTiles90ILi128ELi{row['tile'][0]}E",
        ("sm_90a",),
        r"IGMMA\.64\w+\.S8\.S8",
        # Groups of 128 codes: 4 steps to begin with, and for each set of registers; of 64: half of it; longer ones: 2.
        lambda row: 6 + (2 if row["tile"][0] > 80 else 1) * 12 + 2,
        2,
    ),
    # A step of 128 codes is 8 instructions. They stand in loops for groups of 32, 64 and 128 codes and more: there,
    # where there are registers for two products, in front of the loop and twice in it.
    "sm90_w8a16": Family(_weight_only("11DecodeW8A16"), ("sm_90a",), r"HGMMA\.64\w+\.F32$", _weight_only_steps, 2),
    "sm90_w4a16": Family(_weight_only("11DecodeW4A16"), ("sm_90a",), r"HGMMA\.64\w+\.F32$", _weight_only_steps, 2),
    **_decode_families("decode_", BOTH, clusters=False),
    "decode_s8s4_blocked": Family(_decode("17DecodeS8S4Blocked", False), BOTH, r"IMMA\.16832\.S8\.S8"),
    "decode_s8s4_wide": Family(_decode("10DecodeS8S4", False), BOTH, r"IMMA\.16832\.S8\.S8"),
    **_decode_families("sm90_decode_", ("sm_90a",), clusters=True),
    "decode_s8s4_steps": Family(_decode("15DecodeS8S4Steps", False), BOTH, r"IMMA\.16832\.S8\.S8"),
    "sm90_decode_s8s4_steps": Family(
        _decode("22DecodeS8S4BlockedSteps", True), ("sm_90a",), r"IMMA\.16832\.S8\.S8", waits=1
    ),
    "sm90_decode_s8s4_blocked": Family(
        _decode("17DecodeS8S4Blocked", True),
        ("sm_90a",),
        r"IMMA\.16832\.S8\.S8",
        waits=1,
    ),
}


@pytest.fixture(scope="module")
def tool() -> str:
    if not NATIVE.build_info()["cuda"]:
        pytest.skip("pyquant was built without CUDA kernels")
    tool = machine_code.cuobjdump()
    if tool is None:
        if os.environ.get("CI") == "true":
            pytest.fail("continuous integration must install nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm")
        pytest.skip("cuobjdump and nvdisasm are not there (pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm)")
    return tool


@pytest.fixture(scope="module")
def decode_kernels(tool: str) -> dict[tuple[str, str], list[machine_code.Line]]:
    return machine_code.listings(tool, LIBRARY, "decode_kernel")


@pytest.fixture(scope="module")
def functions(tool: str) -> Functions:
    return machine_code.read(tool, LIBRARY)


def _built_for(architecture: str) -> bool:
    """A build of one's own may be for the GPU at hand alone."""
    built = NATIVE.build_info()["architectures"].split(";")
    return architecture in {f"sm_{arch}" for arch in built} | {f"sm_{arch.rstrip('a')}" for arch in built}


def _rows(family: str) -> list[Row]:
    return [row for row in NATIVE.kernel_table() if row["compiled"] and row["family"] == family]


def test_every_family_has_a_line() -> None:
    assert {row["family"] for row in NATIVE.kernel_table()} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_has_machine_code_with_its_instruction(functions: Functions, family: str) -> None:
    """An emulated product is a call to a routine that holds a few MMAs; a native one stands inline, once per step."""
    facts = FAMILIES[family]
    for architecture in filter(_built_for, facts.architectures):
        kernels, want = {}, collections.defaultdict(list)
        for row in _rows(family):
            want[facts.pattern(row)].append(facts.count(row) if facts.count else 1)
        for pattern, counts in want.items():
            found = {n: c for (arch, n), c in functions.items() if arch == architecture and re.search(pattern, n)}
            kernels |= found
            got = [sum(n for op, n in count.items() if re.match(facts.instruction, op)) for count in found.values()]
            if facts.count is None:
                got = [min(n, 1) for n in got]
            assert sorted(got) == sorted(counts), f"{family} {architecture} {pattern}: {facts.instruction}"
        assert all(count[WAIT] >= facts.waits for count in kernels.values()), f"{family} {architecture}: {WAIT}"


def test_nothing_spills_to_local_memory(functions: Functions) -> None:
    assert functions
    spilled = {
        key: n for key, count in functions.items() if (n := sum(count[op] for op in count if op[:3] in ("LDL", "STL")))
    }
    assert not spilled


def test_no_kernel_holds_more_static_shared_memory_than_a_launch_allows_for(functions: Functions) -> None:
    """launch.h opts in where dynamic memory exceeds 32 KiB: with up to 16 KiB beside it no launch needs that sooner."""
    assert functions
    tool = machine_code.cuobjdump()
    assert tool is not None
    held = machine_code.static_shared(tool, LIBRARY)
    assert held
    assert max(held.values()) > 0, "the reader finds no static memory at all"
    assert {name: size for name, size in held.items() if size > 16 << 10} == {}


def test_quantisers_wait_for_their_predecessor_and_release_their_successor(functions) -> None:
    """On sm_90 each holds both halves of programmatic dependent launch; sm_80 has no such instructions."""
    for architecture, count_of_each in (("sm_90", 1), ("sm_80", 0)):
        if not _built_for(architecture):
            continue
        kernels = {
            name: count
            for (arch, name), count in functions.items()
            if arch == architecture
            and re.search(
                "quantize_((expert_)?rows|(short_)?groups|given)_kernel|range_parts_kernel|hadamard_rows_kernel", name
            )
        }
        # Element types x (rows to codes, chosen rows and rows of experts to codes, rows to values, gates, Hadamard
        # transforms to codes and to values, groups with and without scales, given, parts, short groups by their four
        # kinds of scales and three ways of sharing them between lanes); two norms, each by how a block holds a row:
        # five ways of 16-bit elements, three of 32.
        assert len(kernels) == 3 * (11 + 4 * 3) + 2 * (5 + 5 + 3), architecture
        for name, count in kernels.items():
            assert count["ACQBULK"] == count["PREEXIT"] == count_of_each, f"{architecture} {name}"


def test_nothing_is_read_before_the_wait_for_the_kernel_before(functions: Functions) -> None:
    """A load whose address the compiler knows may be moved up: past the wait it would see what stood there before.
    Kernels of warps with jobs of their own (wgmma) are left out: there each job waits, in any order of the text."""
    if not _built_for("sm_90"):
        pytest.skip("griddepcontrol.wait begins with sm_90")
    waiting = {
        key: count
        for key, count in functions.items()
        if count[machine_code.WAIT] and not any(re.match("[IH]GMMA", name) for name in count)
    }
    assert len(waiting) >= 40
    assert {key: count[machine_code.EARLY] for key, count in waiting.items() if count[machine_code.EARLY]} == {}


# Instructions of an output of the plain epilogue, 16 bits out (swapped: one of them a zero point's), and KiB of machine
# code of a wgmma kernel.
STRAIGHT, SWAPPED, CODE_BUDGET = 9, 11, 96
WIDE_CODE_BUDGET = 104  # where K is divided and a thread has 80 outputs or more
GROUPS_CODE_BUDGET = 112  # three loops, for groups of so many codes, each with the additions to the sums
CROWDED = 11.5  # swapped, 128 outputs a thread: no register is left to fetch ahead or to branch around zero points


@pytest.fixture(scope="module")
def wgmma_kernels(tool: str) -> dict[str, list[machine_code.Line]]:
    found = machine_code.listings(tool, LIBRARY, "GemmUniversal|gemm_(groups|weight_only)90_kernel")
    kernels = {name: lines for (architecture, name), lines in found.items() if architecture == "sm_90a"}
    return kernels or pytest.skip("no kernel of sm_90a is built")


def test_the_code_of_wgmma_kernels_stays_small(wgmma_kernels: dict[str, list[machine_code.Line]]) -> None:
    """The general epilogue stands once in each (csrc/cuda/gemm/steps90.cuh): unrolled over a tile it was 600 KiB."""
    large = {}
    for name, lines in wgmma_kernels.items():
        is_wide = "StreamK" in name and sum(line.operation.startswith("F2FP.BF16") for line in lines) >= 40
        kib = lines[-1].address / 1024
        has_groups = re.search("gemm_(groups|weight_only)90_kernel", name) is not None
        if kib > (GROUPS_CODE_BUDGET if has_groups else WIDE_CODE_BUDGET if is_wide else CODE_BUDGET):
            large[name] = kib
    assert not large


def test_exchanges_between_lanes_are_not_compiled_for_lanes_apart(
    wgmma_kernels: dict[str, list[machine_code.Line]],
) -> None:
    """Such a second form of all that follows is what the compiler adds where it cannot see that lanes are together."""
    apart = {
        name: count
        for name, lines in wgmma_kernels.items()
        if (count := sum(line.operation == "WARPSYNC.COLLECTIVE" for line in lines)) > 16
    }
    assert not apart


@pytest.mark.parametrize("is_swapped", [False, True], ids=["straight", "swapped"])
def test_the_plain_epilogue_is_a_few_instructions_an_output(
    wgmma_kernels: dict[str, list[machine_code.Line]], is_swapped: bool
) -> None:
    """From the converging instruction with which it begins to its last store, what a tile inside of M executes of it,
    of kernels with at least 64 outputs a thread: in smaller tiles what is done once counts. A conversion makes two
    outputs; a movmatrix turns what it made where rows are channels."""
    seen = 0
    for name, lines in wgmma_kernels.items():
        operations = [line.operation for line in lines]
        marks = [at for at, operation in enumerate(operations) if operation == "WARPSYNC.ALL"] + [len(operations)]
        for begin, end in itertools.pairwise(marks):
            stretch = operations[begin:end]
            if "BRX" in stretch or "STG.E.128" not in stretch or ("MOVM.16.MT88" in stretch) != is_swapped:
                continue
            converts = max(
                sum(operation.startswith(f"F2FP.{kind}") for operation in stretch) for kind in ("F16", "BF16")
            )
            if converts < 32:
                continue
            weight, length = machine_code.busiest_way(lines[begin:end], _work_of_halves)
            assert weight == 5 * converts + converts // 4, name  # all of it on one way
            budget = STRAIGHT if not is_swapped else SWAPPED if converts < 64 else CROWDED
            assert length <= budget * 2 * converts, f"{name}: {length} instructions for {2 * converts} outputs"
            seen += 1
    if not seen:
        pytest.skip("no such tile of 64 outputs a thread is built")


def _work_of_halves(operation: str) -> int:
    """So that a way through conversions to half words and their stores is worth more than one of int8 codes."""
    return 5 if operation.startswith("F2FP") else int(operation == "STG.E.128")


@pytest.fixture(scope="module")
def mma_kernels(tool: str) -> dict[str, list[machine_code.Line]]:
    """Of the families whose epilogue is csrc/cuda/gemm/plain80.cuh and a general one behind it."""
    found = machine_code.listings(tool, LIBRARY, r"GemmWithEpilogueVisitor|gemm_\w+80_kernel")
    kernels = {name: lines for (architecture, name), lines in found.items() if architecture == "sm_80"}
    return kernels or pytest.skip("no kernel of sm_80 is built")


# KiB of machine code of an mma.sync kernel: a straight-line form for each of three types, and the general one.
MMA_CODE_BUDGET = 144
# Instructions of a warp's step of 128 codes beside its products, of the units that do all but multiply (ALU): what is
# left of 400 that CUTLASS takes for weights in plain rows. A tile of 128 x 128 has 128 products meanwhile.
BLOCKED_STEP_BUDGET = 100


def test_the_code_of_mma_kernels_stays_small(mma_kernels: dict[str, list[machine_code.Line]]) -> None:
    sizes = {name: lines[-1].address / 1024 for name, lines in mma_kernels.items()}
    assert {name: kib for name, kib in sizes.items() if kib > MMA_CODE_BUDGET} == {}


def test_the_plain_epilogue_of_mma_kernels_is_a_few_instructions_an_output(
    mma_kernels: dict[str, list[machine_code.Line]],
) -> None:
    """16 bits out, from the first conversion (of two outputs) to the last of a form: nine instructions an output. None
    of it is there a second time, for lanes that the compiler believes apart."""
    forms = 0
    for name, lines in mma_kernels.items():
        assert not any(line.operation == "WARPSYNC.COLLECTIVE" for line in lines), name
        for conversion in ("F2FP.PACK_AB", "F2FP.BF16.PACK_AB"):
            places = [at for at, line in enumerate(lines) if line.operation == conversion]
            runs: list[list[int]] = []
            for at in places:
                if runs and at - runs[-1][-1] < 100:
                    runs[-1].append(at)
                else:
                    runs.append([at])
            for run in runs:
                if len(run) < 16:  # of eight neighbours, in the general form
                    continue
                length = run[-1] - run[0]
                assert length <= 18 * len(run), f"{name}: {length} instructions for {2 * len(run)} outputs"
                forms += 1
    assert forms


@pytest.mark.parametrize("family", ["sm80_s8s4_blocked", "sm80_s8s4_blocked_experts"])
def test_a_step_of_blocked_weights_on_mma_keeps_its_budget(
    mma_kernels: dict[str, list[machine_code.Line]], family: str
) -> None:
    rows = _rows(family)
    if not rows:
        pytest.skip("no row of blocked weights is built")
    for row in rows:
        (listing,) = (lines for name, lines in mma_kernels.items() if re.search(FAMILIES[family].pattern(row), name))
        loop = machine_code.loop_with_most(listing, "IMMA")
        assert sum("IMMA" in line.operation for line in loop) == _warp_steps(32)(row), row["name"]
        alu = sum(line.operation.split(".")[0] in machine_code.ALU for line in loop)
        assert alu <= BLOCKED_STEP_BUDGET, f"{row['name']}: {alu} a step"
        assert not any(line.operation.startswith("SHFL") for line in loop), row["name"]


# Integer, logic and move instructions of a warp for a step of 2 KiB of weights, by tokens: what a scheduler issues at
# half rate, beside which the weights have 441 clocks to come (docs/kernels.md). int4 weights and float activations have
# the most to widen.
DECODE_BUDGET = {
    ("sm90_decode_s8s8", 0): {8: 20, 16: 20},
    ("sm90_decode_s8s4_blocked", 0): {8: 45, 16: 50},
    ("sm90_decode_s8s4_steps", 0): {8: 105, 16: 112},
    ("sm90_decode_w8a16", 0): {8: 100, 16: 110},
    ("sm90_decode_w4a16", 0): {8: 170, 16: 195},
    ("sm90_decode_w4a16", 1): {8: 230, 16: 260},
}
MATHS = {
    "sm90_decode_s8s8": ["10DecodeS8S8"],
    "sm90_decode_s8s4_blocked": ["17DecodeS8S4Blocked"],
    "sm90_decode_s8s4_steps": ["22DecodeS8S4BlockedSteps"],
    "sm90_decode_w8a16": ["11DecodeW8A16I6__halfE", "11DecodeW8A16I13__nv_bfloat16E"],
    "sm90_decode_w4a16": ["11DecodeW4A16I6__halfE", "11DecodeW4A16I13__nv_bfloat16E"],
}


# Instructions of a warp for 128 codes of K of blocked weights with steps, which cost seven for eight codes.
STEPS_BUDGET = 128


def test_a_step_of_weights_with_steps_keeps_its_budget(wgmma_kernels: dict[str, list[machine_code.Line]]) -> None:
    """The loop takes two steps of K at a time, one for each set of registers."""
    seen = 0
    for row in _rows("sm90_s8s4_steps"):
        for name, lines in wgmma_kernels.items():
            if not re.search(_blocked(has_steps=True)(row), name):
                continue
            products = 16 if row["tile"][0] == 160 else 8
            loops = [
                loop
                for end in lines
                if end.target is not None and end.target < end.address
                for loop in [[line for line in lines if end.target <= line.address <= end.address]]
                if sum("GMMA" in line.operation for line in loop) == products
            ]
            assert min(map(len, loops)) <= 2 * STEPS_BUDGET, f"{name}: {min(map(len, loops)) / 2} a step"
            seen += 1
    if not seen:
        pytest.skip("no row with steps is built")


# Instructions of a warp for a group of 128 codes beside the three (convert, multiply, add) of each of its sums.
GROUPS_BUDGET = 100


def test_a_group_keeps_its_budget_and_products_overlap(wgmma_kernels: dict[str, list[machine_code.Line]]) -> None:
    """Two groups at a time, one for each set of registers, and a wait for each product that is started: where ptxas
    cannot prove that nobody touches a product under way, it waits after every instruction of the tensor cores."""
    seen = 0
    for row in _rows("sm90_s8s4_groups"):
        tokens = row["tile"][0]
        parts = 2 if tokens > 80 else 1
        for name, lines in wgmma_kernels.items():
            if not re.search(FAMILIES["sm90_s8s4_groups"].pattern(row), name):
                continue
            for steps in (2, 4):  # of 32 codes
                loops = [
                    loop
                    for end in lines
                    if end.target is not None and end.target < end.address
                    for loop in [[line for line in lines if end.target <= line.address <= end.address]]
                    if sum("GMMA" in line.operation for line in loop) == 2 * parts * steps
                ]
                loop = min(loops, key=len)
                count = collections.Counter(line.operation.removesuffix(".LE") for line in loop)
                assert count["WARPGROUP.ARRIVE"] == count["WARPGROUP.DEPBAR"] == 2 * parts, name
                _, length = machine_code.busiest_way(loop, _work_of_groups)
                assert length <= 2 * (GROUPS_BUDGET + 3 * tokens // 2), f"{name}: {length / 2} a group"
            seen += 1
    if not seen:
        pytest.skip("no row with group scales is built")


def _work_of_groups(operation: str) -> int:
    return int("GMMA" in operation or operation in ("FADD", "I2FP.F32.S32") or operation.startswith("LOP3"))


# Instructions of a warp for a step of 128 codes of integer weights under floats: of one that multiplies, beside the one
# for each of its sums (half a sum a token) that ends a group of as many codes; and of one that widens 128 codes a lane.
MULTIPLY_BUDGET = 170
WIDEN_BUDGET = {("sm90_w4a16", "__half"): 285, ("sm90_w4a16", "bfloat16"): 285}
WIDEN_BUDGET |= {("sm90_w8a16", "__half"): 245, ("sm90_w8a16", "bfloat16"): 440}


def _loops(lines: list[machine_code.Line], operation: str, count: int) -> list[list[machine_code.Line]]:
    """Loops with so many of an operation."""
    return [
        loop
        for end in lines
        if end.target is not None and end.target < end.address
        for loop in [[line for line in lines if end.target <= line.address <= end.address]]
        if sum(operation in line.operation for line in loop) == count
    ]


@pytest.mark.parametrize("family", ["sm90_w8a16", "sm90_w4a16"])
def test_steps_of_weights_under_floats_keep_their_budgets(
    wgmma_kernels: dict[str, list[machine_code.Line]], family: str
) -> None:
    """A wait for each product that is started; a step is widened by 16-byte loads and stores alone."""
    if not _rows(family):
        pytest.skip(f"no row of {family} is built")
    for row in _rows(family):
        tokens = row["tile"][0]
        steps = 2 if tokens <= 64 else 1  # of the loop
        for name, lines in wgmma_kernels.items():
            if not re.search(FAMILIES[family].pattern(row).replace("I6__half", r"I\w*?"), name):
                continue
            loop = min(_loops(lines, "GMMA", 8 * steps), key=len)
            count = collections.Counter(line.operation.removesuffix(".LE") for line in loop)
            assert count["WARPGROUP.ARRIVE"] == count["WARPGROUP.DEPBAR"] == steps, name
            assert len(loop) <= steps * (MULTIPLY_BUDGET + tokens // 2), f"{name}: {len(loop) / steps} a step"
            widens = min(_loops(lines, "STS.128", 16), key=len)
            _, length = machine_code.busiest_way(widens, lambda operation: int(operation == "STS.128"))
            loads = collections.Counter(line.operation for line in widens if line.operation.startswith("LDS"))
            assert loads == {"LDS.128": 4 if row["w"] == ["s4"] else 8}, name
            kind = next(kind for kind in ("__half", "bfloat16") if kind in name)
            assert length <= WIDEN_BUDGET[family, kind], f"{name}: {length} for 128 codes"


@pytest.mark.parametrize(("family", "groups"), DECODE_BUDGET)
def test_a_step_of_a_decode_kernel_keeps_its_budget(
    decode_kernels: dict[tuple[str, str], list[machine_code.Line]], family: str, groups: int
) -> None:
    rows = [row for row in _rows(family) if row["tile"][0] == 16]
    if not rows:
        pytest.skip(f"no row of {family} is built")
    for row in rows:
        for math in MATHS[family]:
            for tokens, budget in DECODE_BUDGET[family, groups].items():
                pattern = _decode(math, clusters=True, groups=groups, tokens=tokens)(row)
                (listing,) = (
                    lines for (arch, n), lines in decode_kernels.items() if arch == "sm_90a" and re.search(pattern, n)
                )
                loop = machine_code.loop_with_most(listing, "MMA")
                steps = sum(bool(re.match(r"LDG\..*128", line.operation)) for line in loop) / 4
                assert steps in (2, 3), pattern
                alu = sum(line.operation.split(".")[0] in machine_code.ALU for line in loop)
                assert alu / steps <= budget, f"{pattern}: {alu / steps:.1f} a step"


def test_decode_kernels_ask_for_weights_before_their_predecessor_ends(
    decode_kernels: dict[tuple[str, str], list[machine_code.Line]],
) -> None:
    """L2 is coherent; registers and shared memory may hold what was there before."""
    waiting = [
        [line.operation for line in listing]
        for (architecture, name), listing in decode_kernels.items()
        if architecture == "sm_90a"
    ]
    if not waiting:
        pytest.skip("no decode kernel of sm_90a is built")
    for operations in waiting:
        before = operations[: operations.index(machine_code.WAIT)]
        assert any(operation.startswith("CCTL.E.PF2") for operation in before)
        assert not any(operation.startswith("LDGSTS") for operation in before)
