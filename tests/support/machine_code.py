"""The machine code of a built library, read without a GPU: which instructions each kernel holds, and how often."""

from __future__ import annotations

import atexit
import collections
import contextlib
import fcntl
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FUNCTION = re.compile(r"Function : (\S+)")
ARCHITECTURE = re.compile(r"code for (sm_\w+)")
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)([^;]*)")
TARGET = re.compile(r"0x([0-9a-f]+)")
ENCODING = re.compile(r"\s*/\* 0x[0-9a-f]+ \*/")  # a line of its own
# Integer, logic, comparison, selection, permutation and move: one instruction of a warp in two clocks of a scheduler.
ALU = frozenset(
    {
        "BMSK",
        "CS2R",
        "FMNMX",
        "FSEL",
        "FSETP",
        "I2FP",
        "IABS",
        "IADD3",
        "IMNMX",
        "ISETP",
        "LEA",
        "LOP3",
        "MOV",
        "PLOP3",
        "PRMT",
        "SEL",
        "SGXT",
        "SHF",
        "VIADD",
        "VIMNMX",
    }
)
USAGE = re.compile(r"Function (\S+):\s+REG:\d+ STACK:\d+ SHARED:(\d+)")
ROW = re.compile(r"^\s*pyquant_kernel\((\w+)\s+(\S+)\s+(\S+)\s+(\w+)\s", re.MULTILINE)


def cuobjdump() -> str | None:
    """From the PATH, or from the PyPI packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm."""
    found = shutil.which("cuobjdump")
    if found and shutil.which("nvdisasm"):
        return found
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec and spec.submodule_search_locations else []:
        for path in Path(folder).glob("*/bin/cuobjdump"):
            if (path.parent / "nvdisasm").exists():
                return str(path)
    return None


WAIT = "ACQBULK"  # griddepcontrol.wait: what the kernel before has written is visible from here on
EARLY = "read before " + WAIT


@dataclass(frozen=True)
class Line:
    address: int
    operation: str
    target: int | None  # of a branch
    is_guarded: bool  # by a predicate


@functools.cache
def _disassembly(tool: str, library: Path) -> Path:
    """The library's machine code as text, without the encodings: made once (a minute or two), read often; of several
    processes of one run of pytest the first one makes it for all."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = Path(tempfile.gettempdir(), f"pyquant-machine-code-{run}") if run else Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    text, readers = folder / "listing", (folder / "readers").open("w")
    fcntl.flock(readers, fcntl.LOCK_SH)
    with (folder / "maker").open("w") as maker:
        fcntl.flock(maker, fcntl.LOCK_EX)
        if not text.exists():
            _disassemble(tool, library, folder / "unfinished").rename(text)

    def leave() -> None:
        """The last one takes it away."""
        with contextlib.suppress(OSError):
            fcntl.flock(readers, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(leave)
    return text


def _disassemble(tool: str, library: Path, text: Path) -> Path:
    environment = {**os.environ, "PATH": f"{Path(tool).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    process = subprocess.Popen([tool, "-sass", str(library)], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    with text.open("w") as out:
        out.writelines(line for line in process.stdout if not ENCODING.match(line))
    assert process.wait() == 0
    return text


def _lines(tool: str, library: Path) -> Iterator[tuple[str, str, Line | None]]:
    """(architecture, mangled name, instruction) in the library's order; of a kernel's head None."""
    architecture = name = ""
    with _disassembly(tool, library).open() as listing:
        for line in listing:
            if instruction := INSTRUCTION.match(line):
                address, guard, operation, rest = instruction.groups()
                target = TARGET.search(rest) if operation == "BRA" else None
                goes_to = int(target[1], 16) if target else None
                yield architecture, name, Line(int(address, 16), operation, goes_to, guard is not None)
            elif function := FUNCTION.search(line):
                name = function[1]
                yield architecture, name, None
            elif found := ARCHITECTURE.search(line):
                architecture = found[1]


def read(tool: str, library: Path) -> dict[tuple[str, str], collections.Counter[str]]:
    """(architecture, mangled name) -> how often each instruction stands in the kernel, and how many loads of global
    memory into registers stand before the first wait for the kernel before (EARLY; all of them, if it never waits)."""
    counts: dict[tuple[str, str], collections.Counter[str]] = {}
    for architecture, name, line in _lines(tool, library):
        count = counts.setdefault((architecture, name), collections.Counter())
        if line is not None:
            count[line.operation] += 1
            if line.operation.startswith(("LDG.", "LD.E", "ATOM")) and WAIT not in count:
                count[EARLY] += 1
    return counts


def listings(tool: str, library: Path, pattern: str) -> dict[tuple[str, str], list[Line]]:
    """(architecture, mangled name) -> the instructions of each kernel whose name holds the pattern."""
    found: dict[tuple[str, str], list[Line]] = {}
    for architecture, name, line in _lines(tool, library):
        if line is not None and re.search(pattern, name):
            found.setdefault((architecture, name), []).append(line)
    return found


def _loops(listing: list[Line]) -> list[list[Line]]:
    return [
        [line for line in listing if end.target <= line.address <= end.address]
        for end in listing
        if end.target is not None and end.target < end.address
    ]


def short_loops(listing: list[Line], part: str, most: int) -> list[list[Line]]:
    """The loops of at most so many instructions with one whose name holds `part`."""
    found = [loop for loop in _loops(listing) if len(loop) <= most]
    return [loop for loop in found if any(part in line.operation for line in loop)]


def loop_with_most(listing: list[Line], part: str) -> list[Line]:
    """The shortest loop that holds as many instructions whose name holds `part` as any."""
    return max(_loops(listing), key=lambda loop: (sum(part in line.operation for line in loop), -len(loop)))


def loop_with(listing: list[Line], part: str, count: int) -> list[Line]:
    """The shortest loop that holds so many instructions whose name holds `part`."""
    return min((loop for loop in _loops(listing) if sum(part in line.operation for line in loop) == count), key=len)


def busiest_way(listing: list[Line], weight: Callable[[str], int]) -> tuple[int, int]:
    """Of the ways forward from the first instruction to any other, one that gathers the most weight: its weight, and
    the instructions of the shortest such way, branches counted, taken or not."""
    at = {line.address: index for index, line in enumerate(listing)}
    reached: dict[int, tuple[int, int]] = {0: (0, 0)}  # weight, instructions so far, negative
    best = (0, 0)
    for index, line in enumerate(listing):
        if index not in reached:
            continue
        gathered, steps = reached[index]
        here = (gathered + weight(line.operation), steps - 1)
        best = max(best, here)
        next_ones = [] if line.operation in ("BRA", "EXIT") and not line.is_guarded else [index + 1]
        if line.target is not None:
            next_ones.append(at.get(line.target, 0))
        for after in next_ones:
            if after > index:
                reached[after] = max(reached.get(after, here), here)
    return best[0], -best[1]


def static_shared(tool: str, library: Path) -> dict[str, int]:
    """Mangled name -> bytes of shared memory that the kernel holds statically, on any architecture the most."""
    told = subprocess.run([tool, "-res-usage", str(library)], capture_output=True, text=True, check=True).stdout
    sizes: dict[str, int] = {}
    for name, shared in USAGE.findall(told):
        sizes[name] = max(sizes.get(name, 0), int(shared))
    return sizes


def warp_shapes(table: Path) -> dict[tuple[str, str], tuple[int, ...]]:
    """(family, tile MxNxK) -> shape of a warp, of the mma.sync rows of cmake/kernels.cmake."""
    return {
        (family, tile): tuple(map(int, shape.split("x")))
        for family, tile, shape, schedule in ROW.findall(table.read_text())
        if schedule in ("multistage", "splitk")
    }
