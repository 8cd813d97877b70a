"""Arm's processors give the bits of this one: the CPU engine, compiled for them and run by an emulator; and what a step
of its products executes there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from csrc.cpu_engine import LIBRARY, ROOT, compiler

CROSS = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
PROGRAM = Path(__file__).with_name("other_processor.cpp")

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(not LIBRARY.exists(), reason="pyquant was installed without its native module"),
    pytest.mark.skipif(CROSS is None or EMULATOR is None, reason="no g++ or emulator for aarch64"),
]
# as CMakeLists.txt has them for a processor that is not x86-64
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror"]


def flags_of(source: Path) -> list[str] | None:
    """Of its first line; None: not for Arm."""
    with source.open() as text:
        head = text.readline().strip()
    if not source.stem.startswith("isa_"):
        return []
    processors, _, flags = head.removeprefix("// processors: ").partition(", flags: ")
    return flags.split() if processors in ("any", "aarch64") else None


@pytest.fixture(scope="module")
def for_arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program and all of csrc/cpu in one file that needs no library."""
    folder = tmp_path_factory.mktemp("aarch64")
    sources = [PROGRAM, *(s for s in sorted((ROOT / "csrc/cpu").glob("*.cpp")) if flags_of(s) is not None)]

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        command = [CROSS, *FLAGS, *(flags_of(source) or []), f"-I{ROOT / 'csrc'}", "-c", source, "-o", target]
        subprocess.run(list(map(str, command)), check=True)
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    subprocess.run([str(CROSS), "-static", "-o", str(folder / "program"), *objects, "-lpthread"], check=True)
    return folder / "program"


def innermost(code: list[tuple[int, str]]) -> list[list[str]]:
    """The instructions of every loop that holds no other."""
    jump = re.compile(r"(?:b\.\w+|cbn?z|tbn?z)\s.*?\b([0-9a-f]+) <")
    ends = [(int(to[1], 16), at) for at, line in code if (to := jump.match(line))]
    loops = [(to, at) for to, at in ends if to <= at]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [[line for at, line in code if begin <= at <= end] for begin, end in inner]


# name of a function, dot products of the loop that has most, its instructions at most
LOOPS = {
    "tile_s8<1, 8, true>": (64, 105),  # of four quads; true: with the sums of the weights
    "tile_s8<1, 8, false>": (32, 75),
    "tile_s8<2, 8, false>": (64, 110),
    "tile_s8<3, 4, false>": (48, 80),
    "tile_s8<4, 4, true>": (80, 115),
    "tile_s8<4, 4, false>": (64, 90),
    "tile_s4<1, 8>": (17, 60),  # of an oct
    "tile_s4<2, 8>": (34, 80),
    "tile_s4<4, 4>": (36, 70),
    "tap_tile<side_by_side, 4>": (20, 70),  # of a tap
    "tap_tile<one, 4>": (20, 90),
}
SPREADS = ("side_by_side", "one", "near", "far")


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-objdump") is None, reason="no objdump for aarch64")
def test_products_keep_their_sums_in_registers(for_arm: Path) -> None:
    """g++ likes to load the weights of many steps at once, and then has no registers for the sums. What a step
    executes, as nobody has timed it."""
    command = [
        "aarch64-linux-gnu-objdump",
        "-d",
        "-C",
        "--no-show-raw-insn",
        str(for_arm.parent / "isa_neon_dotprod.o"),
    ]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {}
    for block in re.sub(r"pyquant::cpu::|\(anonymous namespace\)::", "", text).split("\n\n"):
        if head := re.match(r"\s*[0-9a-f]+ <void (\w+<.*>)\(.*>:\n", block):
            name = re.sub(r"\(Spread\)(\d)", lambda number: SPREADS[int(number[1])], head[1])
            lines = re.findall(r"^\s*([0-9a-f]+):\t(.+?)\s*$", block, re.M)
            found[name] = innermost([(int(address, 16), line) for address, line in lines])
    for name, (products, most) in LOOPS.items():
        loops = {sum("dot" in line.split()[0] for line in loop): loop for loop in found[name]}
        loop = loops[max(loops)]
        assert max(loops) == products, name
        assert [line for line in loop if re.search(r"\bq\d+,.*\[sp", line)] == [], name
        assert len(loop) <= most, name


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the program says here, by the library that is installed."""
    program = tmp_path_factory.mktemp("here") / "program"
    command = [compiler(), "-std=c++17", "-O1", f"-I{ROOT / 'csrc'}", PROGRAM, "-o", program]
    command += [f"-L{LIBRARY.parent}", "-lpyquant_core", f"-Wl,-rpath,{LIBRARY.parent}"]
    subprocess.run(list(map(str, command)), check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert len(said.splitlines()) == 5
    return said


# A processor with products of bytes, one without, and the first of them told to do without.
@pytest.mark.parametrize(
    ("processor", "cap", "used"),
    [("max", None, "neon_dotprod"), ("cortex-a57", None, "scalar"), ("max", "scalar", "scalar")],
)
def test_arm_gives_the_bits_of_this_processor(
    for_arm: Path, wanted: str, processor: str, cap: str | None, used: str
) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYQUANT_CPU_ISA"}
    env |= {} if cap is None else {"PYQUANT_CPU_ISA": cap}
    command = [str(EMULATOR), "-cpu", processor, str(for_arm)]
    said = subprocess.run(command, capture_output=True, text=True, env=env)
    assert said.returncode == 0, said.stderr
    assert f"in use: {used}" in said.stderr
    assert said.stdout == wanted
