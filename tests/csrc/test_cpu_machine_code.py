"""Machine code of the CPU's products in the built library: what a step of each loop executes, whatever processor this
is.

g++ may keep accumulators on the stack, or add products to each other first and run out of registers. The results are
the same and the loop takes half as long again, so that no other test sees it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from csrc.cpu_engine import ISAS, LIBRARY, ROOT, Symbol, compile_one, compiler, isa_flags, symbols

pytestmark = [
    pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump"),
    pytest.mark.skipif(not LIBRARY.exists(), reason="pyquant was installed without its native module"),
]


@dataclass(frozen=True)
class Loop:
    """The instructions of one step."""

    lines: tuple[str, ...]

    def count(self, *names: str) -> int:
        return sum(line.split()[0] in names for line in self.lines)

    def on_the_stack(self) -> list[str]:
        return [line for line in self.lines if "mm" in line and re.search(r"\(%r[sb]p", line)]


def functions(binary: Path, *limits: str) -> dict[str, list[tuple[int, str]]]:
    """(address, instruction) of every function, by its name without namespaces and arguments."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", *limits, str(binary)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[tuple[int, str]]] = {}
    for block in text.replace("(anonymous namespace)::", "").split("\n\n"):
        head = re.match(r"\s*[0-9a-f]+ <(?:[^(<]*[ :])?(\w+(?:<.*?>)?)\(.*>:\n", block)
        if head:
            lines = re.findall(r"^\s*([0-9a-f]+):\t(.+?)\s*$", block, re.M)
            found[head[1]] = [(int(address, 16), line) for address, line in lines]
    return found


def hottest(code: list[tuple[int, str]], product: str) -> Loop:
    """The innermost loop that holds most of an instruction."""
    loops = []
    for address, line in code:
        jump = re.match(r"j\w+\s+([0-9a-f]+)", line)
        if jump and int(jump[1], 16) <= address:
            loops.append((int(jump[1], 16), address))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    bodies = [Loop(tuple(line for at, line in code if begin <= at <= end)) for begin, end in inner]
    return max(bodies, key=lambda loop: loop.count(product))


@pytest.fixture(scope="module")
def built() -> list[Symbol]:
    return symbols(LIBRARY)


def functions_of(isa: str, built: list[Symbol]) -> dict[str, list[tuple[int, str]]]:
    source = ROOT / f"csrc/cpu/isa_{isa}.cpp"
    if isa_flags(source) is None:
        pytest.skip("not for this processor")
    # what is never expected to run lies apart (.cold)
    own = [symbol for symbol in built if symbol.file == source.name and ".cold" not in symbol.name]
    assert own, f"{LIBRARY} is stripped"
    begin, end = own[0].address, own[-1].address + own[-1].size
    return functions(LIBRARY, f"--start-address={begin}", f"--stop-address={end}")


@pytest.fixture(scope="module")
def avx2(built: list[Symbol]) -> dict[str, list[tuple[int, str]]]:
    return functions_of("avx2", built)


@pytest.fixture(scope="module")
def pairs(built: list[Symbol]) -> dict[str, list[tuple[int, str]]]:
    return functions_of("avx512_bf16", built)


def test_nothing_of_it_can_take_the_place_of_other_code(built: list[Symbol]) -> None:
    """A weak function is merged with those of the same name elsewhere: processors without AVX2 would run this one."""
    for isa in ISAS:
        source = ROOT / f"csrc/cpu/isa_{isa}.cpp"
        if isa == "scalar" or isa_flags(source) is None:
            continue
        own = [symbol for symbol in built if symbol.file == source.name and ".cold" not in symbol.name]
        assert [symbol.name for symbol in own if "kernels_" in symbol.name] == [f"pyquant::cpu::kernels_{isa}()"]
        assert [symbol.name for symbol in own if symbol.is_weak] == []


# rows and vectors of 8 columns of each tile
TILES = pytest.mark.parametrize(("rows", "vectors"), [(1, 8), (2, 4), (3, 2), (4, 2), (5, 2), (6, 2)])


@TILES
def test_int8_products(avx2: dict, rows: int, vectors: int) -> None:
    """Per quad: four products and sums for 32 codes, three shifts a vector of weights, two loads a row."""
    loop = hottest(avx2[f"tile_s8<{rows}, {vectors}>"], "vpmaddwd")
    products = 2 * rows * vectors
    assert (loop.count("vpmaddwd"), loop.count("vpaddd")) == (products, products)
    assert loop.count("vpsraw", "vpsllw") == 3 * vectors
    assert not loop.on_the_stack()
    assert len(loop.lines) <= 2 * products + 3 * vectors + 2 * rows + 2 * vectors + vectors // 2 + 8


@TILES
def test_int4_products(avx2: dict, rows: int, vectors: int) -> None:
    """Per quad: one product and one sum for 32 codes; per eight quads, which g++ may unroll, the sums join others."""
    loop = hottest(avx2[f"tile_unpacked_s4<{rows}, {vectors}>"], "vpmaddubsw")
    products = rows * vectors
    quads = loop.count("vpmaddubsw") // products
    assert quads in (1, 8)
    assert loop.count("vpaddw") >= (quads - 1) * products
    assert not loop.on_the_stack()
    joined = 5 * products if quads == 8 else 0
    assert len(loop.lines) <= quads * (2 * products + rows + vectors + vectors // 2) + joined + 20


def test_int4_products_from_nibbles(avx2: dict) -> None:
    """Per oct and vector of nibbles: five instructions take them apart, two products and two sums."""
    loop = hottest(avx2["tile_s4<1, 8>"], "vpmaddubsw")
    assert (loop.count("vpmaddubsw"), loop.count("vpaddw")) == (16, 16)
    assert not loop.on_the_stack()
    assert len(loop.lines) <= 8 * (5 + 4) + 8 + 10  # a load a vector, and what a step costs


@pytest.mark.parametrize("spread", range(4))
def test_taps(avx2: dict, spread: int) -> None:
    """Four pixels by sixteen channels: two products and two sums a vector of eight, nothing on the stack."""
    loop = hottest(avx2[f"tap_tile<(pyquant::cpu::Spread){spread}, 4>"], "vpmaddwd")
    assert (loop.count("vpmaddwd"), loop.count("vpaddd")) == (16, 16)
    assert not loop.on_the_stack()


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6])
def test_products_of_pairs(pairs: dict, rows: int) -> None:
    """Per pair of 64 channels: a product a row and vector of 16, four loads of weights, one of each row."""
    loop = hottest(pairs[f"tile<{rows}>"], "vdpbf16ps")
    pairs_a_step = loop.count("vdpbf16ps") // (4 * rows)
    assert pairs_a_step >= 1
    assert not loop.on_the_stack()
    assert len(loop.lines) <= pairs_a_step * (4 * rows + 4 + rows) + rows + 10


# rows and channels of each tile of few rows; whether there are zero points
FEW = [(rows, channels, zeros) for rows, channels in ((1, 4), (2, 4), (3, 2), (4, 2)) for zeros in ("false", "true")]
S4, S8 = "(pyquant::DType)0", "(pyquant::DType)1"
HOLDS = {name: f"(pyquant::cpu::Holds){value}" for value, name in enumerate(("part", "one", "several"))}
PART = HOLDS["part"]


@pytest.mark.parametrize(("rows", "channels", "zeros"), FEW)
@pytest.mark.parametrize("holds", ["part", "one", "several"])
def test_few_rows_of_pairs_and_int4(pairs: dict, rows: int, channels: int, zeros: str, holds: str) -> None:
    """Per 128 codes of a channel: a look-up for each 32 and three shifts, whatever the zero points; in small groups
    with zero points the number of the group joins the index."""
    loop = hottest(pairs[f"few_pairs_tile<{S4}, {zeros}, {HOLDS[holds]}, {rows}, {channels}>"], "vdpbf16ps")
    assert loop.count("vdpbf16ps") == 4 * rows * channels
    assert loop.count("vpermw", "vpermi2w", "vpermt2w") == 4 * channels
    assert loop.count("vpsrlw") == 3 * channels
    assert loop.count("vpternlogd") == (4 * channels if (zeros, holds) == ("true", "several") else 0)


@pytest.mark.parametrize("zeros", ["false", "true"])
@pytest.mark.parametrize(("rows", "channels"), [(1, 4), (2, 4), (3, 2), (4, 2), (6, 2), (8, 2)])
def test_few_rows_of_pairs_and_long_groups(pairs: dict, rows: int, channels: int, zeros: str) -> None:
    """A step keeps its sums in registers (g++ puts a piece of codes by at times): what it has beside the above are
    loads, prefetches and its own end."""
    loop = hottest(pairs[f"few_pairs_tile<{S4}, {zeros}, {PART}, {rows}, {channels}>"], "vdpbf16ps")
    assert len(loop.on_the_stack()) <= channels
    assert len(loop.lines) <= 4 * rows * channels + 10 * channels + 4 * rows + 22


@pytest.mark.parametrize(("rows", "channels", "zeros"), [*FEW, (6, 2, "false"), (8, 2, "true")])
def test_few_rows_of_pairs_and_int8(pairs: dict, rows: int, channels: int, zeros: str) -> None:
    """Per 32 codes of a channel: two products that take codes out, two conversions, and three instructions that join
    the halves; zero points cost nothing."""
    loop = hottest(pairs[f"few_pairs_tile<{S8}, {zeros}, {PART}, {rows}, {channels}>"], "vdpbf16ps")
    assert loop.count("vdpbf16ps") == 2 * rows * channels
    assert (loop.count("vpdpbusd"), loop.count("vcvtdq2ps")) == (4 * channels, 4 * channels)
    assert (loop.count("vpsrld"), loop.count("vpord", "vporq")) == (2 * channels, 2 * channels)
    assert len(loop.on_the_stack()) <= 2 * channels
    assert len(loop.lines) <= 2 * rows * channels + 19 * channels + 2 * rows + 30


def test_a_sum_on_the_stack_is_seen(avx2: dict) -> None:
    code = avx2["tile_s8<6, 2>"]
    loop = hottest(code, "vpmaddwd")
    place = next(at for at, (_, line) in enumerate(code) if line == loop.lines[0] and code[at + 1][1] == loop.lines[1])
    spilled = [*code[: place + 1], (code[place][0], "vmovdqa %ymm0,0x20(%rsp)"), *code[place + 1 :]]
    with pytest.raises(AssertionError):
        test_int8_products({"tile_s8<6, 2>": spilled}, 6, 2)


@pytest.mark.nightly  # compiles all of it: half a minute
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_sums_left_to_the_compiler_are_seen(tmp_path: Path) -> None:
    """The sum as an intrinsic, which g++ orders as it likes."""
    (tmp_path / "cpu").mkdir()
    header = (ROOT / "csrc/cpu/vector_avx2.h").read_text()
    planted = re.sub(r'asm\("vpaddd .*?\);', "sum = _mm256_add_epi32(sum, products);", header)
    assert planted != header
    (tmp_path / "cpu/vector_avx2.h").write_text(planted)
    source = ROOT / "csrc/cpu/isa_avx2.cpp"
    if isa_flags(source) is None:
        pytest.skip("not for this processor")
    code = functions(compile_one(source, tmp_path, (f"-I{tmp_path}",)))
    with pytest.raises(AssertionError):
        test_int8_products(code, 6, 2)
