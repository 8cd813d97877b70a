"""Compiles and runs epilogue_exhaustive.cpp against csrc/core, or against a copy of it with one line changed."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("epilogue_exhaustive.cpp")
FLAGS = ("-std=c++17", "-Wall", "-Wextra", "-ffp-contract=off", "-pthread")


@cache
def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++")


def build(folder: Path, include: Path = ROOT / "csrc", flags: tuple[str, ...] = ("-O2", "-Werror")) -> Path:
    """The program, compiled as the library compiles the same headers."""
    cxx = compiler()
    if cxx is None:
        raise FileNotFoundError("no C++ compiler: neither g++ nor c++ is in PATH")
    program = folder / "epilogue_exhaustive"
    command = [cxx, *FLAGS, *flags, f"-I{include}"]
    subprocess.run([*command, "-o", program, SOURCE], check=True, capture_output=True, timeout=300)
    return program


def edited_core(folder: Path, header: str, old: str, new: str) -> Path:
    """An include root whose core/<header> has one occurrence of `old` replaced."""
    shutil.copytree(ROOT / "csrc" / "core", folder / "core")
    path = folder / "core" / header
    text = path.read_text()
    if text.count(old) != 1:
        raise LookupError(f"{header}: {text.count(old)} places hold {old!r}, there must be one")
    path.write_text(text.replace(old, new))
    return folder


def run(program: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *flags], capture_output=True, text=True, timeout=1_800)
