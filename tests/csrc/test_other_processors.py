"""Arm's processors give the bits of this one: the CPU engine, compiled for them and run by an emulator."""

from __future__ import annotations

import os
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
