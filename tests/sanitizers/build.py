"""A copy of the package whose libraries (core, cpu and bind) carry AddressSanitizer and UBSan."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined"
)


def runtimes(*names: str) -> str | None:
    """The compiler's sanitizer libraries, as LD_PRELOAD wants them: before Python's own start. None without them."""
    cxx = shutil.which("g++")
    if cxx is None:
        return None
    ask = [[cxx, f"-print-file-name=lib{name}.so"] for name in names]
    found = [Path(subprocess.run(a, capture_output=True, text=True, check=True).stdout.strip()) for a in ask]
    return " ".join(map(str, found)) if all(path.is_absolute() and path.exists() for path in found) else None


def sanitized_package(folder: Path) -> Path:
    """Builds into folder and returns what to put first in PYTHONPATH."""
    build = folder / "cmake"
    configure = [
        *("cmake", "-G", "Ninja", "-S", ROOT, "-B", build, "-DCMAKE_BUILD_TYPE=None", f"-DCMAKE_CXX_FLAGS={FLAGS}"),
        *(
            "-DPYQUANT_CUDA=OFF",
            f"-DCMAKE_INSTALL_PREFIX={folder / 'install'}",
            f"-DPython_EXECUTABLE={sys.executable}",
        ),
        f"-DPYQUANT_TORCH_INCLUDE={Path(torch.__file__).parent / 'include'}",
    ]
    for command in (configure, ["cmake", "--build", build], ["cmake", "--install", build]):
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{command[1]}: exit {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    package = folder / "package" / "pyquant"
    shutil.copytree(ROOT / "pyquant", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copytree(folder / "install" / "lib", package / "lib", dirs_exist_ok=True)
    return package.parent
