"""The machine code of a built library, read without a GPU: which instructions each kernel holds, and how often."""

from __future__ import annotations

import collections
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

FUNCTION = re.compile(r"Function : (\S+)")
ARCHITECTURE = re.compile(r"code for (sm_\w+)")
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)")
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


def read(tool: str, library: Path) -> dict[tuple[str, str], collections.Counter[str]]:
    """(architecture, mangled name) -> how often each instruction stands in the kernel, and how many loads of global
    memory into registers stand before the first wait for the kernel before (EARLY; all of them, if it never waits)."""
    environment = {**os.environ, "PATH": f"{Path(tool).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    process = subprocess.Popen([tool, "-sass", str(library)], stdout=subprocess.PIPE, text=True, env=environment)
    counts: dict[tuple[str, str], collections.Counter[str]] = {}
    architecture, current = "", collections.Counter[str]()
    assert process.stdout is not None
    for line in process.stdout:
        if instruction := INSTRUCTION.match(line):
            current[instruction[1]] += 1
            if instruction[1].startswith(("LDG.", "LD.E", "ATOM")) and WAIT not in current:
                current[EARLY] += 1
        elif function := FUNCTION.search(line):
            current = counts.setdefault((architecture, function[1]), collections.Counter())
        elif found := ARCHITECTURE.search(line):
            architecture = found[1]
    assert process.wait() == 0
    return counts


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
