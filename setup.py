"""Hands the native build to CMake; everything about it lives in CMakeLists.txt."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PASSED_ON = (
    "PYQUANT_CUDA",
    "PYQUANT_CUDA_ARCHS",
    "PYQUANT_CUTLASS_ROOT",
    "PYQUANT_KERNELS",
    "PYQUANT_SAMPLE",
    "PYQUANT_SIMULATOR",
)


def package_folder(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def torch_include() -> Path:
    """Only torch's headers are needed. pip's isolated environment cannot import torch, but sysconfig still points at
    the environment that asked for the build, so torch need not be a build requirement (gigabytes)."""
    torch = package_folder("torch")
    candidates = [Path(p) for p in [os.environ.get("PYQUANT_TORCH_INCLUDE")] if p]
    candidates += [torch / "include"] if torch else []
    candidates += [Path(sysconfig.get_path(k)) / "torch" / "include" for k in ("purelib", "platlib")]
    for folder in candidates:
        if (folder / "torch/csrc/stable/library.h").exists():
            return folder
    raise SystemExit(
        "pyquant: PyTorch headers not found. Install torch>=2.10 first (its CPU build is enough), or name the folder "
        "with PYQUANT_TORCH_INCLUDE, or build with pip's --no-build-isolation."
    )


def publish(installed: Path, target: Path) -> None:
    """Move fresh files into place by renaming: a process that has a library mapped keeps the old one, whole."""
    for source in installed.rglob("*.so"):
        place = target / source.relative_to(installed)
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = place.with_name(place.name + ".new")
        shutil.copy2(source, fresh)
        fresh.replace(place)


def run_step(what: str, *command: str) -> None:
    """cmake tells the reason itself; a traceback below it would only hide it."""
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"pyquant: {what} failed; the reason stands above (docs/install.md has the usual ones)")


class CMakeBuild(build_ext):
    def run(self) -> None:
        in_place = self.inplace or getattr(self, "editable_mode", False)
        target = (ROOT if in_place else Path(self.build_lib).resolve()) / "pyquant"
        build = Path(os.environ.get("PYQUANT_BUILD_DIR", ROOT / "build" / f"cmake-{sysconfig.get_config_var('SOABI')}"))
        build.mkdir(parents=True, exist_ok=True)
        cmake, ninja = shutil.which("cmake"), shutil.which("ninja")
        if cmake is None or ninja is None:
            raise SystemExit("pyquant: cmake and ninja are needed to build (pip install cmake ninja).")
        options = {
            "CMAKE_BUILD_TYPE": os.environ.get("PYQUANT_BUILD_TYPE", "Release"),
            "CMAKE_INSTALL_PREFIX": build / "install",
            "CMAKE_MAKE_PROGRAM": ninja,
            "Python_EXECUTABLE": sys.executable,
            "PYQUANT_TORCH_INCLUDE": torch_include(),
        }
        cutlass, pybind = package_folder("cutlass_library"), package_folder("pybind11")
        options.update({"PYQUANT_CUTLASS_ROOT": cutlass / "source"} if cutlass else {})
        options.update({"pybind11_DIR": pybind / "share/cmake/pybind11"} if pybind else {})
        options.update({name: os.environ[name] for name in PASSED_ON if os.environ.get(name)})
        defines = [f"-D{name}={value}" for name, value in options.items()] + os.environ.get("CMAKE_ARGS", "").split()
        # What is not named now gets its default, not what an earlier build in the same folder was told, and another
        # Python's findings are forgotten: a folder that is kept serves several.
        forgotten = [f"-U{name}" for name in (*PASSED_ON, "Python_*", "_Python*", "PYTHON_*") if name not in options]
        jobs = os.environ.get("MAX_JOBS")
        run_step("the configuration", cmake, "-G", "Ninja", "-S", str(ROOT), "-B", str(build), *forgotten, *defines)
        run_step("the build", cmake, "--build", str(build), *(["-j", jobs] if jobs else []))
        shutil.rmtree(build / "install", ignore_errors=True)  # of another Python
        run_step("the installation", cmake, "--install", str(build))
        publish(build / "install", target)

    def get_outputs(self) -> list[str]:
        return []  # CMake installs; setuptools must not look for an extension file of its own

    def copy_extensions_to_source(self) -> None:
        pass


setup(ext_modules=[Extension("pyquant._native", [])], cmdclass={"build_ext": CMakeBuild})
