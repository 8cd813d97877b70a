"""What a step of K costs the warps of each family in machine code: instructions, and waits for the tensor cores
(docs/kernels.md has today's figures)."""

from __future__ import annotations

import collections
import re

import machine_code
import pytest
from kernel_families import FAMILIES, decode, in_registers, rows_of, warp_steps

# Instructions of a warp's step of 128 codes beside its products, of the units that do all but multiply (ALU): what is
# left of 400 that CUTLASS takes for weights in plain rows. A tile of 128 x 128 has 128 products meanwhile.
BLOCKED_STEP_BUDGET = 100


@pytest.mark.parametrize("family", ["sm80_s8s4_blocked", "sm80_s8s4_blocked_experts"])
def test_a_step_of_blocked_weights_on_mma_keeps_its_budget(
    mma_kernels: dict[str, list[machine_code.Line]], family: str
) -> None:
    rows = rows_of(family)
    if not rows:
        pytest.skip("no row of blocked weights is built")
    for row in rows:
        (listing,) = (lines for name, lines in mma_kernels.items() if re.search(FAMILIES[family].pattern(row), name))
        loop = machine_code.loop_with_most(listing, "IMMA")
        assert sum("IMMA" in line.operation for line in loop) == warp_steps(32)(row), row["name"]
        alu = sum(line.operation.split(".")[0] in machine_code.ALU for line in loop)
        assert alu <= BLOCKED_STEP_BUDGET, f"{row['name']}: {alu} a step"
        assert not any(line.operation.startswith("SHFL") for line in loop), row["name"]


# Instructions of a warp beside its products for 64 codes (32 floats) of K; of a tile of 128 x 128 those are 64. Of all
# rows (a build of PYQUANT_KERNELS=full) 48 x 128 of codes has the most, 112; then 48 x 128 of floats, 109.
MMA_STEP_BUDGET = 112


@pytest.mark.parametrize(
    "family", ["sm80_s8s8", "sm80_u8s8", "sm80_f16", "sm80_bf16", "sm80_s8s8_experts", "sm80_s8s8_conv"]
)
def test_a_step_of_mma_keeps_its_budget(mma_kernels: dict[str, list[machine_code.Line]], family: str) -> None:
    """Where a warp has 32 products and more: of smaller tiles what is done once a step counts."""
    rows, width, seen = rows_of(family), 32 if family.endswith("16") else 64, 0
    for name, lines in mma_kernels.items():
        if not rows or not re.search(FAMILIES[family].pattern(rows[0]), name):
            continue
        loop = machine_code.loop_with_most(lines, "MMA")
        products = sum("MMA" in line.operation for line in loop)
        shape = re.search(r"GemmShapeILi\d+ELi\d+ELi(\d+)E", name)
        assert shape, name
        steps = int(shape[1]) / width
        if products < 32 * steps:
            continue
        others = (len(loop) - products) / steps
        assert others <= MMA_STEP_BUDGET, f"{name}: {others} a step"
        seen += 1
    if not seen:
        pytest.skip(f"no such row of {family} is built")


# Instructions of a warp beside its products for 32 codes of K of integer weights under floats by mma.sync, the end of a
# group included, by the number of products, of one matrix or experts; int8 under bf16 is widened by way of float32.
WEIGHT_ONLY_STEP_BUDGET = {8: 215, 16: 265, 24: 300, 32: 362}
BY_WAY_OF_FLOAT32 = 50


@pytest.mark.parametrize("family", ["sm80_w4a16", "sm80_w8a16", "sm80_w4a16_experts", "sm80_w8a16_experts"])
def test_a_step_of_integer_weights_under_floats_on_mma_keeps_its_budget(
    mma_kernels: dict[str, list[machine_code.Line]], family: str
) -> None:
    rows = rows_of(family)
    if not rows:
        pytest.skip(f"no row of {family} is built")
    for row in rows:
        pattern = FAMILIES[family].pattern(row).replace("6__half", r"\d+\w*?")
        found = {name: lines for name, lines in mma_kernels.items() if re.search(pattern, name)}
        assert len(found) == 2, f"{row['name']}: f16 and bf16, not {list(found)}"
        for name, lines in found.items():
            loop = machine_code.loop_with_most(lines, "HMMA")
            products = sum("HMMA" in line.operation for line in loop)
            assert products == warp_steps(16)(row), name
            more = BY_WAY_OF_FLOAT32 if "w8" in family and "bfloat16" in name else 0
            others = len(loop) - products
            assert others <= WEIGHT_ONLY_STEP_BUDGET[products] + more, f"{name}: {others} a step"


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
# Of tiles of 48 tokens for sm_80: 12 products for each two that tiles of 8 tokens have.
WIDE_DECODE_BUDGET = {
    ("decode_w8a16", 0): 110,
    ("decode_w8a16", 1): 200,
    ("decode_w4a16", 0): 255,
    ("decode_w4a16", 1): 325,
}
MATHS = {
    "sm90_decode_s8s8": ["10DecodeS8S8"],
    "sm90_decode_s8s4_blocked": ["17DecodeS8S4Blocked"],
    "sm90_decode_s8s4_steps": ["22DecodeS8S4BlockedSteps"],
    "sm90_decode_w8a16": ["11DecodeW8A16I6__halfE", "11DecodeW8A16I13__nv_bfloat16E"],
    "sm90_decode_w4a16": ["11DecodeW4A16I6__halfE", "11DecodeW4A16I13__nv_bfloat16E"],
}


# Instructions of a warp for a step of K of wgmma with both operands in shared memory, by its products of 32 codes (16
# floats): descriptors, waits and the release of the buffer.
WGMMA_STEP_BUDGET = {4: 60, 8: 91}


@pytest.mark.parametrize("family", ["sm90_s8s8", "sm90_f16", "sm90_bf16"])
def test_a_step_of_wgmma_keeps_its_budget_and_waits_once(
    wgmma_kernels: dict[str, list[machine_code.Line]], family: str
) -> None:
    facts = FAMILIES[family]
    seen = 0
    for row in rows_of(family):
        assert facts.count is not None
        products = facts.count(row) // 2
        for name, lines in wgmma_kernels.items():
            if not re.search(facts.pattern(row), name):
                continue
            if sum("GMMA" in line.operation for line in lines) != 2 * products:
                continue  # of another row, with as many columns
            loop = machine_code.loop_with(lines, "GMMA", products)
            count = _count(loop)
            assert count["WARPGROUP.ARRIVE"] == count["WARPGROUP.DEPBAR"] == 1, name
            _, length = machine_code.busiest_way(loop, _is_product)
            assert length <= WGMMA_STEP_BUDGET[products], f"{row['name']}: {length} a step"
            seen += 1
    if not seen:
        pytest.skip(f"no row of {family} is built")


# Instructions that no loop over K has, and every loop over tiles.
LONGEST_LOOP_OVER_K = 1000


def test_operands_of_wgmma_are_described_in_registers_of_the_warp(
    wgmma_kernels: dict[str, list[machine_code.Line]],
) -> None:
    """Where ptxas cannot see that a warp stays together, every lane holds them, and each instruction of the tensor
    cores waits until four words are moved (R2UR)."""
    for name, listing in wgmma_kernels.items():
        loops = machine_code.short_loops(listing, "GMMA", LONGEST_LOOP_OVER_K)
        assert loops, name
        for loop in loops:
            moved = sum(line.operation == "R2UR" for line in loop)
            assert not moved, f"{name}: {moved} in a loop of {len(loop)} instructions"


# Instructions of a warp for 128 codes of K of blocked weights: 3 for 8 codes, with steps 7; of a tile of 160 tokens,
# whose products are two of 80.
BLOCKED_BUDGET = {"sm90_s8s4_blocked": (76, 98), "sm90_s8s4_steps": (121, 141)}


@pytest.mark.parametrize("family", BLOCKED_BUDGET)
def test_a_step_of_blocked_weights_keeps_its_budget_and_products_overlap(
    wgmma_kernels: dict[str, list[machine_code.Line]], family: str
) -> None:
    """The loop takes two steps of K at a time, one for each set of registers; each waits once."""
    seen = 0
    for row in rows_of(family):
        is_wide = row["tile"][0] == 160
        for name, lines in wgmma_kernels.items():
            if not re.search(FAMILIES[family].pattern(row), name):
                continue
            loop = machine_code.loop_with(lines, "GMMA", 16 if is_wide else 8)
            count = _count(loop)
            assert count["WARPGROUP.ARRIVE"] == count["WARPGROUP.DEPBAR"] == 2, name
            _, length = machine_code.busiest_way(loop, _is_product)
            assert length <= 2 * BLOCKED_BUDGET[family][is_wide], f"{row['name']}: {length / 2} a step"
            seen += 1
    if not seen:
        pytest.skip(f"no row of {family} is built")


def _count(loop: list[machine_code.Line]) -> collections.Counter[str]:
    return collections.Counter(line.operation.removesuffix(".LE") for line in loop)


def _products(loop: list[machine_code.Line]) -> int:
    return sum("GMMA" in line.operation for line in loop)


def _is_product(operation: str) -> int:
    return int("GMMA" in operation)


# Instructions of a warp for a group of 128 codes beside the three (convert, multiply, add) of each of its sums.
GROUPS_BUDGET = 103


def test_a_group_keeps_its_budget_and_products_overlap(wgmma_kernels: dict[str, list[machine_code.Line]]) -> None:
    """Two groups at a time, one for each set of registers, and a wait for each product that is started: where ptxas
    cannot prove that nobody touches a product under way, it waits after every instruction of the tensor cores."""
    seen = 0
    for row in rows_of("sm90_s8s4_groups"):
        tokens = row["tile"][0]
        parts = 2 if tokens > 80 else 1
        for name, lines in wgmma_kernels.items():
            if not re.search(FAMILIES["sm90_s8s4_groups"].pattern(row), name):
                continue
            for steps in (2, 4):  # of 32 codes
                loop = machine_code.loop_with(lines, "GMMA", 2 * parts * steps)
                count = _count(loop)
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
THROUGH_BUDGET = 90
WIDEN_BUDGET = {("sm90_w4a16", "__half"): 285, ("sm90_w4a16", "bfloat16"): 285}
WIDEN_BUDGET |= {("sm90_w8a16", "__half"): 245, ("sm90_w8a16", "bfloat16"): 440}


@pytest.mark.parametrize("family", ["sm90_w8a16", "sm90_w4a16"])
def test_steps_of_weights_under_floats_keep_their_budgets(
    wgmma_kernels: dict[str, list[machine_code.Line]], family: str
) -> None:
    """A wait for each product that is started; a step is widened by 16-byte loads and stores alone. Under a scale a
    channel a step is its products and what moves the buffers on."""
    rows = [row for row in rows_of(family) if not in_registers(row)]
    if not rows:
        pytest.skip(f"no such row of {family} is built")
    for row in rows:
        tokens = row["tile"][0]
        steps = 2 if tokens <= 64 else 1  # of the loop
        for name, lines in wgmma_kernels.items():
            if not re.search(FAMILIES[family].pattern(row).replace("I6__half", r"I\w*?"), name):
                continue
            loops = machine_code.short_loops(lines, "GMMA", LONGEST_LOOP_OVER_K)
            adds = [loop for loop in loops if any(line.operation.startswith("FFMA") for line in loop)]
            loop = min((loop for loop in adds if _products(loop) == 8 * steps), key=len)
            count = _count(loop)
            assert count["WARPGROUP.ARRIVE"] == count["WARPGROUP.DEPBAR"] == steps, name
            assert len(loop) <= steps * (MULTIPLY_BUDGET + tokens // 2), f"{name}: {len(loop) / steps} a step"
            (through,) = (loop for loop in loops if loop not in adds)
            count = _count(through)
            assert count["WARPGROUP.ARRIVE"] == count["WARPGROUP.DEPBAR"] == 1, name
            assert _products(through) == 8, name
            assert len(through) <= THROUGH_BUDGET, f"{name}: {len(through)} a step"
            widens = machine_code.loop_with(lines, "STS.128", 16)
            _, length = machine_code.busiest_way(widens, lambda operation: int(operation == "STS.128"))
            loads = collections.Counter(line.operation for line in widens if line.operation.startswith("LDS"))
            assert loads == {"LDS.128": 4 if row["w"] == ["s4"] else 8}, name
            kind = next(kind for kind in ("__half", "bfloat16") if kind in name)
            assert length <= WIDEN_BUDGET[family, kind], f"{name}: {length} for 128 codes"


# Of a warp that widens int4 weights in its registers and multiplies, for 256 codes of 16 channels: on the way on which
# no group's factors are loaded, beside the additions of two products (half a sum a token and product).
REGISTER_BUDGET = 405


def test_steps_of_weights_widened_in_registers_keep_their_budget(
    wgmma_kernels: dict[str, list[machine_code.Line]],
) -> None:
    """Nothing is stored to shared memory, and of it 512 bytes are loaded at a time; each word of 8 codes costs half a
    shuffle, and each group two or four for its factors."""
    rows = [row for row in rows_of("sm90_w4a16") if in_registers(row)]
    if not rows:
        pytest.skip("no such row is built")
    for row in rows:
        tokens = row["tile"][0]
        pattern = FAMILIES["sm90_w4a16"].pattern(row).replace("I6__half", r"I\w*?")
        found = {name: lines for name, lines in wgmma_kernels.items() if re.search(pattern, name)}
        assert len(found) == 2, f"{row['name']}: f16 and bf16, not {list(found)}"
        for name, lines in found.items():
            loop = machine_code.loop_with(lines, "GMMA", 16)
            count = _count(loop)
            assert not any(operation.startswith(("STS", "LDS.", "R2UR", "LDL", "STL")) for operation in count), name
            assert count["LDSM.16.M88.4"] == 4, name
            assert sum(n for operation, n in count.items() if operation.startswith("SHFL")) <= 16 + 2 * 4, name
            _, length = machine_code.busiest_way(loop, _work_of_registers)
            assert length <= REGISTER_BUDGET + tokens, f"{name}: {length} for 256 codes"


def _work_of_registers(operation: str) -> int:
    return int("GMMA" in operation or operation.startswith(("HADD2", "FFMA")))


# The same of rounded weights, for 64 codes: under a scale a channel, and in groups, on the way where no group begins.
ROUNDED_BUDGET, ROUNDED_GROUPS_BUDGET = 170, 230


@pytest.mark.parametrize("experts", ["", "_experts"])
@pytest.mark.parametrize("family", ["sm90_w8a16_rounded", "sm90_w4a16_rounded"])
def test_steps_of_rounded_weights_keep_their_budget(
    wgmma_kernels: dict[str, list[machine_code.Line]], family: str, experts: str
) -> None:
    """Two codes are a load, and each is one operation, an exact subtraction and, in groups, a multiplication; a pair of
    weights is rounded at once. Nothing waits but for the products before the last ones."""
    family += experts
    rows = rows_of(family)
    if not rows:
        pytest.skip(f"no row of {family} is built")
    for row in rows:
        pattern = FAMILIES[family].pattern(row).replace("I6__half", r"I\w*?")
        found = {name: lines for name, lines in wgmma_kernels.items() if re.search(pattern, name)}
        assert len(found) == 2, f"{row['name']}: f16 and bf16, not {list(found)}"
        for name, lines in found.items():
            grouped, plain = sorted(machine_code.short_loops(lines, "GMMA", LONGEST_LOOP_OVER_K), key=len, reverse=True)
            for loop, scales in ((grouped, 32), (plain, 0)):
                count = _count(loop)
                assert _products(loop) == 4, name
                assert count["WARPGROUP.ARRIVE"] == count["WARPGROUP.DEPBAR"] == 2, name
                assert not any(operation.startswith(("STS", "LDSM", "R2UR", "LDL", "STL")) for operation in count), name
                assert sum(n for operation, n in count.items() if operation.startswith("LDS.U")) == 16, name
                assert sum(n for operation, n in count.items() if operation.startswith("F2FP")) == 16, name
                assert sum(n for operation, n in count.items() if operation.startswith("FMUL")) == scales, name
            assert len(plain) <= ROUNDED_BUDGET, f"{name}: {len(plain)} for 64 codes"
            _, length = machine_code.busiest_way(grouped, _work_of_rounding)
            assert length <= ROUNDED_GROUPS_BUDGET, f"{name}: {length} for 64 codes"


def _work_of_rounding(operation: str) -> int:
    return int("GMMA" in operation or operation.startswith(("F2FP", "FMUL")))


@pytest.mark.parametrize(("family", "groups"), DECODE_BUDGET)
def test_a_step_of_a_decode_kernel_keeps_its_budget(
    decode_kernels: dict[str, list[machine_code.Line]], family: str, groups: int
) -> None:
    rows = [row for row in rows_of(family) if row["tile"][0] == 16]
    if not rows:
        pytest.skip(f"no row of {family} is built")
    for row in rows:
        for math in MATHS[family]:
            for tokens, budget in DECODE_BUDGET[family, groups].items():
                pattern = decode(math, clusters=True, groups=groups, tokens=tokens)(row)
                (listing,) = (lines for name, lines in decode_kernels.items() if re.search(pattern, name))
                loop = machine_code.loop_with_most(listing, "MMA")
                steps = sum(bool(re.match(r"LDG\..*128", line.operation)) for line in loop) / 4
                assert steps in (2, 3), pattern
                alu = sum(line.operation.split(".")[0] in machine_code.ALU for line in loop)
                assert alu / steps <= budget, f"{pattern}: {alu / steps:.1f} a step"


@pytest.mark.parametrize(("family", "groups"), WIDE_DECODE_BUDGET)
def test_a_step_of_a_wide_tile_widens_each_weight_once(
    decode_kernels_of_sm80: dict[str, list[machine_code.Line]], family: str, groups: int
) -> None:
    """Tiles of 48 tokens: what tiles of few tokens have, and the order of more activations."""
    rows = [row for row in rows_of(family) if row["tile"][0] == 48]
    if not rows:
        pytest.skip(f"no such row of {family} is built")
    for row in rows:
        for math in MATHS[f"sm90_{family}"]:
            pattern = decode(math, clusters=False, groups=groups, tokens=48)(row)
            (listing,) = (lines for name, lines in decode_kernels_of_sm80.items() if re.search(pattern, name))
            loop = machine_code.loop_with_most(listing, "MMA")
            steps = sum(bool(re.match(r"LDG\..*128", line.operation)) for line in loop) / 4
            assert steps == 2, pattern
            products = sum("HMMA" in line.operation for line in loop) / steps
            assert products == 2 * 6 * 2 * (4 if "w4" in family else 2), pattern
            alu = sum(line.operation.split(".")[0] in machine_code.ALU for line in loop)
            assert alu / steps <= WIDE_DECODE_BUDGET[family, groups], f"{pattern}: {alu / steps:.1f} a step"


def test_decode_kernels_ask_for_weights_before_their_predecessor_ends(
    decode_kernels: dict[str, list[machine_code.Line]],
) -> None:
    """L2 is coherent; registers and shared memory may hold what was there before."""
    waiting = [[line.operation for line in listing] for listing in decode_kernels.values()]
    if not waiting:
        pytest.skip("no decode kernel of sm_90a is built")
    for operations in waiting:
        before = operations[: operations.index(machine_code.WAIT)]
        assert any(operation.startswith("CCTL.E.PF2") for operation in before)
        assert not any(operation.startswith("LDGSTS") for operation in before)
