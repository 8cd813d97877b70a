"""The machine code of the kernels: the tensor-core instruction that each row is built for, as often as its tile needs,
no local memory (spills), no division of 64 bits, the wait of every kernel that may start before its predecessor has
ended, the size of the code and of the plain epilogue. A family of cmake/kernels.cmake is one line of FAMILIES
(tests/support/kernel_families.py); what a step of K costs is in test_step_budgets.py."""

from __future__ import annotations

import collections
import re

import machine_code
import pytest
from kernel_families import FAMILIES, NATIVE, built_for, rows_of

Functions = dict[tuple[str, str], collections.Counter[str]]


def test_every_family_has_a_line() -> None:
    assert {row["family"] for row in NATIVE.kernel_table()} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_has_machine_code_with_its_instruction(functions: Functions, family: str) -> None:
    """An emulated product is a call to a routine that holds a few MMAs; a native one stands inline, once per step."""
    facts = FAMILIES[family]
    for architecture in filter(built_for, facts.architectures):
        kernels, want = {}, collections.defaultdict(list)
        for row in rows_of(family):
            want[facts.pattern(row)].append(facts.count(row) if facts.count else 1)
        for pattern, counts in want.items():
            found = {n: c for (arch, n), c in functions.items() if arch == architecture and re.search(pattern, n)}
            kernels |= found
            got = [sum(n for op, n in count.items() if re.match(facts.instruction, op)) for count in found.values()]
            if facts.count is None:
                got = [min(n, 1) for n in got]
            assert sorted(got) == sorted(counts), f"{family} {architecture} {pattern}: {facts.instruction}"
        assert all(count[machine_code.WAIT] >= facts.waits for count in kernels.values()), (
            f"{family} {architecture}: {machine_code.WAIT}"
        )


def test_nothing_spills_to_local_memory(
    functions: Functions, usage: dict[machine_code.Key, machine_code.Usage]
) -> None:
    """Of every kernel what its tables say; of those that are read the instructions, too."""
    assert functions
    assert {key: told.stack for key, told in usage.items() if told.stack} == {}
    spilled = {
        key: n for key, count in functions.items() if (n := sum(count[op] for op in count if op[:3] in ("LDL", "STL")))
    }
    assert not spilled


def test_no_kernel_divides_numbers_of_64_bits(functions: Functions) -> None:
    """A hundred instructions; the compiler writes one even to count the turns of a loop that it unrolls."""
    assert functions
    dividing = {key for key, count in functions.items() if any(re.match(r"I2F\.[US]64", op) for op in count)}
    assert not dividing


# Divisions that ask whether anything may overflow (FCHK): a branch, behind which no other element's work goes on. Those
# of a scale, once a tile, a row or a group, are left; none is an output's or an element's.
QUESTIONS = {r"GemmUniversal|gemm_\w+_kernel|GemmWithEpilogue|decode_kernel|float_epilogue": 2, r"GateInput.*4silu": 5}


def test_no_output_is_divided_with_a_question(functions: Functions) -> None:
    for pattern, most in QUESTIONS.items():
        asking = {key: count["FCHK"] for key, count in functions.items() if re.search(pattern, key[1])}
        assert asking
        assert {key: n for key, n in asking.items() if n > most} == {}


def test_no_kernel_holds_more_static_shared_memory_than_a_launch_allows_for(
    usage: dict[machine_code.Key, machine_code.Usage],
) -> None:
    """launch.h opts in where dynamic memory exceeds 32 KiB: with up to 16 KiB beside it no launch needs that sooner."""
    held = {key: told.shared for key, told in usage.items()}
    assert held
    assert max(held.values()) > 0, "the reader finds no static memory at all"
    assert {key: size for key, size in held.items() if size > 16 << 10} == {}


QUANTISERS = "quantize_((expert_)?rows|(short_)?groups|given)_kernel|range_parts_kernel|hadamard_rows_kernel"


def test_quantisers_wait_for_their_predecessor_and_release_their_successor(
    functions: Functions, usage: dict[machine_code.Key, machine_code.Usage]
) -> None:
    """On sm_90 each holds both halves of programmatic dependent launch; sm_80 has no such instructions."""
    for architecture, count_of_each in (("sm_90", 1), ("sm_80", 0)):
        if not built_for(architecture):
            continue
        kernels = [key for key in usage if key[0] == architecture and re.search(QUANTISERS, key[1])]
        # Element types x (rows to codes, chosen rows and rows of experts to codes, rows to values, gates by their six
        # activations, Hadamard transforms to codes and to values, groups with and without scales, given, parts, short
        # groups by their four kinds of scales and three ways of sharing them between lanes), Hadamard transforms of one
        # chunk to codes, of 16 bits an element; norms by how a block holds a row: five ways of 16 bits, three of 32.
        assert len(kernels) == 3 * (10 + 6 + 4 * 3) + 2 + 5 + 5 + 3, architecture
        counts = {key: functions[key] for key in kernels if key in functions}
        assert len(counts) >= (len(kernels) / 3 if count_of_each else 7), architecture  # one of three types, of 7 forms
        for key, count in counts.items():
            assert count["ACQBULK"] == count["PREEXIT"] == count_of_each, key


def test_nothing_is_read_before_the_wait_for_the_kernel_before(functions: Functions) -> None:
    """A load whose address the compiler knows may be moved up: past the wait it would see what stood there before.
    Kernels of warps with jobs of their own (wgmma) are left out: there each job waits, in any order of the text."""
    if not built_for("sm_90"):
        pytest.skip("griddepcontrol.wait begins with sm_90")
    waiting = {
        key: count
        for key, count in functions.items()
        if count[machine_code.WAIT] and not any(re.match("[IH]GMMA", name) for name in count)
    }
    assert len(waiting) >= 40
    assert {key: count[machine_code.EARLY] for key, count in waiting.items() if count[machine_code.EARLY]} == {}


def test_warps_ask_for_no_more_registers_than_a_launch_gives_their_block(
    wgmma_kernels: dict[str, list[machine_code.Line]], usage: dict[machine_code.Key, machine_code.Usage]
) -> None:
    """Else the last ones wait for ever (PTX ISA, setmaxnreg). One warpgroup fetches, with the fewest; two multiply,
    with the most; where there are more, they widen weights."""
    checked = 0
    for name, lines in wgmma_kernels.items():
        given = usage["sm_90a", name].registers
        warpgroups = 65536 // given // 128  # of as many registers as there are, ptxas gives every thread its share
        asked = sorted({line.target for line in lines if line.operation.startswith(machine_code.SET_REGISTERS)})
        if not asked:
            continue  # one that fetches, one that multiplies: nothing to move, nothing to wait for
        checked += 1
        assert len(asked) in (2, 3), (name, asked)
        between = asked[1] if len(asked) == 3 else given
        assert warpgroups in (3, 4, 5), (name, given)
        assert asked[0] + between * (warpgroups - 3) + 2 * asked[-1] <= given * warpgroups, (name, given, asked)
    assert checked >= len(wgmma_kernels) / 2


# Instructions of an output of the plain epilogue up to its conversion to 16 bits, and KiB of machine code of a wgmma
# kernel.
STRAIGHT, SWAPPED, CODE_BUDGET = 6.0, 6.5, 124
WIDE_CODE_BUDGET = 148  # where a thread has 80 outputs or more, or three loops stand for groups of so many codes
EXPERTS_CODE = 8  # KiB more: a search for the expert, scales of tokens one by one, zeros
MEETINGS = 35  # places of a wgmma kernel, behind its last product, where lanes meet after a branch
SEARCHES = 5  # more of them where each warp searches for its tile's expert


def test_the_code_of_wgmma_kernels_stays_small(wgmma_kernels: dict[str, list[machine_code.Line]]) -> None:
    """The general epilogue stands once in each (csrc/cuda/gemm/steps90.cuh), and so does each curve of the straight
    one: unrolled over a tile they were 600 KiB."""
    large = {}
    for name, lines in wgmma_kernels.items():
        is_wide = sum(line.operation.startswith("F2FP.BF16") for line in lines) >= (40 if "StreamK" in name else 64)
        kib = lines[-1].address / 1024
        has_groups = re.search("gemm_(groups|weight_only)90_kernel", name) is not None
        budget = WIDE_CODE_BUDGET if has_groups or is_wide else CODE_BUDGET
        if kib > budget + EXPERTS_CODE * ("Expert" in name):
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


def test_a_curve_has_no_branch_an_element(wgmma_kernels: dict[str, list[machine_code.Line]]) -> None:
    """Eight values of three curves in two epilogues: the compiler made a branch of the last choice of each, behind
    which no other value's operations went on (csrc/core/activation_math.h): 48 places where lanes meet again."""
    meetings = {}
    for name, lines in wgmma_kernels.items():
        operations = [line.operation for line in lines]
        last = max(at for at, operation in enumerate(operations) if operation.startswith(("IGMMA", "HGMMA")))
        count = operations[last:].count("BSSY")  # before it: scales that are read once a tile, each where there is one
        if count > MEETINGS + SEARCHES * ("Expert" in name):
            meetings[name] = count
    assert not meetings


@pytest.mark.parametrize("is_swapped", [False, True], ids=["straight", "swapped"])
def test_the_plain_epilogue_is_a_few_instructions_an_output(
    wgmma_kernels: dict[str, list[machine_code.Line]], is_swapped: bool
) -> None:
    """From the first sum as a real value to the last conversion, of two outputs, what a tile executes of it without an
    activation and a residual; of int8 products with at least 64 outputs a thread: in smaller tiles what is done once
    counts. Exchanges and stores: test_traffic.py."""
    seen = 0
    for name, lines in wgmma_kernels.items():
        if "gemm_groups90_kernel" in name:
            continue  # their main loop has such runs too
        operations = [line.operation for line in lines]
        runs: list[list[int]] = []
        for at in [at for at, operation in enumerate(operations) if operation.startswith("I2FP")]:
            if runs and at - runs[-1][-1] < 80:
                runs[-1].append(at)
            else:
                runs.append([at])
        for outputs, begin in [(len(run), run[0]) for run in runs if len(run) >= 64]:
            if ("Lb1E" in name.partition("Store90")[2][:12]) != is_swapped:
                continue
            converted, length = machine_code.busiest_way(lines[begin:], lambda name: int(name.startswith("F2FP")))
            assert converted == outputs / 2, name  # all of it on one way
            assert length <= (SWAPPED if is_swapped else STRAIGHT) * outputs, (
                f"{name}: {length} instructions for {outputs} outputs"
            )
            seen += 1
    if not seen:
        pytest.skip("no such tile of 64 outputs a thread is built")


# KiB of machine code of an mma.sync kernel: a straight-line form for each of three types, and the general one.
MMA_CODE_BUDGET = 144


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
