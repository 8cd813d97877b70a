"""The machine code of a built library, read without a GPU: which instructions each kernel holds, and how often."""

from __future__ import annotations

import atexit
import collections
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

SECTION = re.compile(r"^\.text\.(?=\S+:$)", re.MULTILINE)
LABEL = re.compile(r"([.$]\S+):$")
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)([^;]*)")
TARGET = re.compile(r"0x([0-9a-f]+)")
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
USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
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
SET_REGISTERS = "USETMAXREG"  # setmaxnreg


Key = tuple[str, str]  # architecture, mangled name


class Line(NamedTuple):
    address: int
    operation: str
    target: int | None  # of a branch; registers of a thread from here on, of USETMAXREG
    is_guarded: bool  # by a predicate


class Usage(NamedTuple):
    stack: int  # bytes a thread, of what is spilled too
    shared: int  # bytes a block, static
    registers: int  # of a thread, at launch


@functools.cache
def usage(tool: str, library: Path) -> dict[Key, Usage]:
    """Every kernel of the library, and what memory it holds: read from its tables, without the code."""
    told = subprocess.run([tool, "-res-usage", str(library)], capture_output=True, text=True, check=True).stdout
    found: dict[Key, Usage] = {}
    for part in re.split(r"^arch = ", told, flags=re.MULTILINE)[1:]:
        architecture = part.split(maxsplit=1)[0]
        for name, registers, stack, shared, local in USAGE.findall(part):
            found[architecture, name] = Usage(int(stack) + int(local), int(shared), int(registers))
    return found


@dataclass(frozen=True)
class Place:
    """Where a kernel's lines stand in a listing, and how often it holds each instruction."""

    begin: int
    end: int
    count: collections.Counter[str]


def _folder() -> Path:
    """Of several processes of one run of pytest the same. The last one takes it away."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = Path(tempfile.gettempdir(), f"pyquant-machine-code-{run}") if run else Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    readers = (folder / "readers").open("w")
    fcntl.flock(readers, fcntl.LOCK_SH)

    def leave() -> None:
        with contextlib.suppress(OSError):
            fcntl.flock(readers, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(leave)
    return folder


_shared_folder = functools.cache(_folder)


@functools.cache
def _disassembly(tool: str, library: Path, keys: frozenset[Key]) -> tuple[Path, dict[Key, Place]]:
    """The machine code of those kernels as text, without the encodings, and where each stands in it: made once (a
    minute or two), read often; of several processes of one run the first one makes it for all."""
    name = hashlib.sha256(repr((library, sorted(keys))).encode()).hexdigest()[:16]
    text, index = _shared_folder() / f"{name}.text", _shared_folder() / f"{name}.index"
    with (_shared_folder() / f"{name}.maker").open("w") as maker:
        fcntl.flock(maker, fcntl.LOCK_EX)
        if not index.exists():
            with text.open("wb") as out:
                made = list(_make(tool, library, keys, out))
            unfinished = index.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(made))
            unfinished.rename(index)
    rows = json.loads(index.read_text())
    places = {(arch, name): Place(begin, end, collections.Counter(c)) for arch, name, begin, end, c in rows}
    assert set(places) == keys, "not every kernel was found"
    return text, places


@functools.cache
def _cubins(tool: str, library: Path) -> list[tuple[str, Path, dict[str, int]]]:
    """The library's files of machine code: the architecture, the file, the index of each kernel in its table."""
    folder = Path(tempfile.mkdtemp(dir=_shared_folder()))
    subprocess.run([tool, "-xelf", "all", str(library)], cwd=folder, capture_output=True, check=True)
    return [(path.name.split(".")[-2], path, _functions(path.read_bytes())) for path in sorted(folder.iterdir())]


def _functions(elf: bytes) -> dict[str, int]:
    """Name -> index in the symbol table, of the functions of an ELF file of 64 bits."""
    (at,) = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQII", elf, at + size * place) for place in range(count)]
    found = {}
    for _, kind, _, _, offset, length, link, _ in sections:
        for index in range(length // 24 if kind == 2 else 0):
            name, info = struct.unpack_from("<IB", elf, offset + 24 * index)
            begin = sections[link][4] + name
            if info & 15 == 2:
                found[elf[begin : elf.index(b"\0", begin)].decode()] = index
    return found


def _make(tool: str, library: Path, keys: frozenset[Key], out: BinaryIO) -> Iterator[tuple[Any, ...]]:
    """(architecture, name, begin, end, counts) of the kernels, whose lines go out. By nvdisasm: cuobjdump takes longer
    for some functions of a library than for all."""
    for arch, path, functions in _cubins(tool, library):
        wanted = [index for name, index in functions.items() if (arch, name) in keys]
        if not wanted:
            continue
        command = [str(Path(tool).parent / "nvdisasm"), "-c", "-fun", ",".join(map(str, wanted)), str(path)]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for part in SECTION.split(told)[1:]:
            name, _, text = part.partition(":\n")
            begin, count = out.tell(), collections.Counter[str]()
            for instruction in _instructions(text):
                operation = instruction[3]
                count[operation] += 1
                if operation.startswith(("LDG.", "LD.E", "ATOM")) and WAIT not in count:
                    count[EARLY] += 1
                out.write(instruction[0].encode() + b"\n")
            yield arch, name, begin, out.tell(), count


def _instructions(text: str) -> list[re.Match[str]]:
    """With addresses in the place of labels."""
    places: dict[str, str] = {}
    labels: list[str] = []
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels.append(label[1])
        elif labels and (instruction := INSTRUCTION.match(line)):
            places |= dict.fromkeys(labels, f"0x{instruction[1]}")
            labels = []
    text = re.sub(r"`\((\S+?)\)", lambda label: places.get(label[1], label[0]), text)
    return [instruction for line in text.splitlines() if (instruction := INSTRUCTION.match(line))]


def read(tool: str, library: Path, keys: frozenset[Key]) -> dict[Key, collections.Counter[str]]:
    """How often each instruction stands in each of the kernels, and how many loads of global memory into registers
    stand before the first wait for the kernel before (EARLY; all of them, if it never waits)."""
    return {key: place.count for key, place in _disassembly(tool, library, keys)[1].items()}


def listings(tool: str, library: Path, keys: frozenset[Key], architecture: str, pattern: str) -> dict[str, list[Line]]:
    """Mangled name -> the instructions of each kernel of the architecture whose name holds the pattern."""
    text, places = _disassembly(tool, library, keys)
    found: dict[str, list[Line]] = {}
    with text.open("rb") as listing:
        for (arch, name), place in places.items():
            if arch == architecture and re.search(pattern, name):
                listing.seek(place.begin)
                found[name] = [_line(line) for line in listing.read(place.end - place.begin).decode().splitlines()]
    return found


def _line(text: str) -> Line:
    instruction = INSTRUCTION.match(text)
    assert instruction, text
    address, guard, operation, rest = instruction.groups()
    target = TARGET.search(rest) if operation == "BRA" or operation.startswith(SET_REGISTERS) else None
    return Line(int(address, 16), operation, int(target[1], 16) if target else None, guard is not None)


def _loops(listing: list[Line]) -> list[list[Line]]:
    return [
        [line for line in listing if end.target <= line.address <= end.address]
        for end in listing
        if end.operation == "BRA" and end.target is not None and end.target < end.address
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
    the instructions of the shortest such way, branches counted, taken or not. A jump to a place that is computed leads
    nowhere."""
    at = {line.address: index for index, line in enumerate(listing)}
    reached: dict[int, tuple[int, int]] = {0: (0, 0)}  # weight, instructions so far, negative
    best = (0, 0)
    for index, line in enumerate(listing):
        if index not in reached:
            continue
        gathered, steps = reached[index]
        here = (gathered + weight(line.operation), steps - 1)
        best = max(best, here)
        next_ones = [] if line.operation in ("BRA", "BRX", "EXIT") and not line.is_guarded else [index + 1]
        if line.operation == "BRA" and line.target is not None:
            next_ones.append(at.get(line.target, 0))
        for after in next_ones:
            if after > index:
                reached[after] = max(reached.get(after, here), here)
    return best[0], -best[1]


def warp_shapes(table: Path) -> dict[tuple[str, str], tuple[int, ...]]:
    """(family, tile MxNxK) -> shape of a warp, of the mma.sync rows of cmake/kernels.cmake."""
    return {
        (family, tile): tuple(map(int, shape.split("x")))
        for family, tile, shape, schedule in ROW.findall(table.read_text())
        if schedule in ("multistage", "splitk")
    }
