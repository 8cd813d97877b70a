"""The machine code of the kernels, read without a GPU: the tensor-core instruction that each family is built for, no
local memory (spills), no emulated product."""

from __future__ import annotations

import collections
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
LIBRARY = Path(NATIVE.__file__).parent / "lib" / "libpyquant_core.so"
# family: part of the kernel's name, architectures of its machine code, instruction
FAMILIES = {
    "sm80_s8s8": ("GemmWithEpilogueVisitor", {"sm_80", "sm_90"}, r"IMMA\.16832\.S8\.S8"),
    "sm90_s8s8": ("GemmUniversal", {"sm_90a"}, r"IGMMA\.64"),
    "simt": ("gemm_simt_kernel", {"sm_80", "sm_90"}, r"IDP\.4A"),
}
FUNCTION = re.compile(r"Function : (\S+)")
ARCHITECTURE = re.compile(r"code for (sm_\w+)")
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


def _cuobjdump() -> str | None:
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


@pytest.fixture(scope="module")
def functions() -> dict[tuple[str, str], collections.Counter[str]]:
    """(architecture, mangled name) -> how often each instruction stands in the kernel."""
    if not NATIVE.build_info()["cuda"]:
        pytest.skip("pyquant was built without CUDA kernels")
    tool = _cuobjdump()
    if tool is None:
        if os.environ.get("CI") == "true":
            pytest.fail("continuous integration must install nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm")
        pytest.skip("cuobjdump and nvdisasm are not there (pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm)")
    environment = {**os.environ, "PATH": f"{Path(tool).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    process = subprocess.Popen([tool, "-sass", str(LIBRARY)], stdout=subprocess.PIPE, text=True, env=environment)
    counts: dict[tuple[str, str], collections.Counter[str]] = {}
    architecture, current = "", collections.Counter()
    assert process.stdout is not None
    for line in process.stdout:
        if instruction := INSTRUCTION.match(line):
            current[instruction[1]] += 1
        elif function := FUNCTION.search(line):
            current = counts.setdefault((architecture, function[1]), collections.Counter())
        elif found := ARCHITECTURE.search(line):
            architecture = found[1]
    assert process.wait() == 0
    return counts


def _rows(family: str) -> list[dict]:
    return [row for row in NATIVE.kernel_table() if row["compiled"] and row["family"] == family]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_has_machine_code_with_its_instruction(functions, family: str) -> None:
    part, architectures, instruction = FAMILIES[family]
    for architecture in architectures:
        kernels = {name: count for (arch, name), count in functions.items() if arch == architecture and part in name}
        assert len(kernels) == len(_rows(family)), f"{family} {architecture}: {len(kernels)} kernels"
        for name, count in kernels.items():
            assert any(re.match(instruction, op) for op in count), f"{architecture} {name}: no {instruction}"


def test_mma_count_is_that_of_the_tile_so_nothing_is_emulated(functions) -> None:
    """An emulated product is a call to a routine that holds a few MMAs; a native one stands inline, once per step."""
    # tile -> instructions of one warp for one step of K: warp tile m * n * k / (16 * 8 * 32)
    steps = {(16, 64, 128): 16, (32, 64, 128): 16, (64, 64, 64): 16, (128, 128, 64): 64}
    want = sorted(steps[tuple(row["tile"])] for row in _rows("sm80_s8s8"))
    for architecture in ("sm_80", "sm_90"):
        got = sorted(
            sum(n for op, n in count.items() if op.startswith("IMMA"))
            for (arch, name), count in functions.items()
            if arch == architecture and "GemmWithEpilogueVisitor" in name
        )
        assert got == want, architecture


def test_nothing_spills_to_local_memory(functions) -> None:
    assert functions
    spilled = {
        key: n for key, count in functions.items() if (n := sum(count[op] for op in count if op[:3] in ("LDL", "STL")))
    }
    assert not spilled
