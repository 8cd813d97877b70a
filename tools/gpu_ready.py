"""Says whether this machine can run `make gpu`: a GPU that torch sees, our libraries with every kernel that it can run,
a native module for this Python, and one kernel of each family launched and compared with the CPU.

    python tools/gpu_ready.py [--prebuilt | --simulator]

--prebuilt: the libraries were carried from another machine; only the native module may have to be made for this Python,
which is one C++ file against pyquant/lib/libpyquant_core.so. Exit code 1 with one line for each thing that is missing.
--simulator: a dry run: the kernels that the libraries hold, on the simulator that PYQUANT_CUDART_SIM names.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pyquant"


def missing_libraries(package: Path = PACKAGE) -> list[str]:
    """What a prebuilt package lacks."""
    names = ("libpyquant_core.so", "libpyquant_torch.so")
    return [f"pyquant/lib/{name} is not there: carry it" for name in names if not (package / "lib" / name).exists()]


def native_command(package: Path, includes: list[str], suffix: str) -> list[str]:
    """The compiler's command for the native module of this Python."""
    sources = sorted((ROOT / "csrc/native").glob("*.cpp"))
    return [
        "c++",
        "-std=c++17",
        "-O2",
        "-ffp-contract=off",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        *includes,
        f"-I{ROOT / 'csrc'}",
        *map(str, sources),
        "-o",
        str(package / f"_native{suffix}"),
        f"-L{package / 'lib'}",
        "-lpyquant_core",
        "-Wl,-rpath,$ORIGIN/lib",
    ]


def _has_native() -> bool:
    probe = [sys.executable, "-c", "import pyquant._native"]
    return subprocess.run(probe, cwd=ROOT, capture_output=True, check=False).returncode == 0


def make_native(run: Callable[..., object] = subprocess.run) -> str | None:
    """Compiles the native module for this Python. -> None, or why it could not be."""
    try:
        import pybind11
    except ImportError:
        return "pyquant/_native is for another Python, and pybind11, which makes one for this, is not installed"
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
    try:
        run(native_command(PACKAGE, includes, str(sysconfig.get_config_var("EXT_SUFFIX"))), check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"pyquant/_native is for another Python and could not be made for this one: {error}"
    return None


def _digest(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted((package / "lib").glob("*.so")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _native_module() -> Any:
    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
    return importlib.import_module("pyquant._native")


def without_driver(native: Any) -> str | None:
    """Why pyquant's CUDA runtime sees no GPU where torch sees one; None when it sees one."""
    if native.device_count():
        return None
    return f"torch sees a GPU, but pyquant's libraries see none: {native.why_no_device()} (docs/install.md)"


def full_build(archs: str) -> str:
    """What to do about libraries without the kernels that a GPU needs, in words."""
    return (
        f"on a machine with nvcc run PYQUANT_KERNELS=full PYQUANT_CUDA_ARCHS={archs} pip install --no-build-isolation "
        "--no-deps -e . and carry its pyquant/lib"
    )


def has_machine_code(architectures: str, sm: int) -> bool:
    """Whether code was made for a chip: that of one with the same first digit and a second one that is not larger."""
    made = [int(word.rstrip("af")) for word in architectures.split(";") if word]
    return any(arch // 10 == sm // 10 and arch <= sm for arch in made)


def incomplete(native: Any, has_gpu: bool) -> list[str]:
    """What the libraries lack that this machine's first GPU could run: a wrong copy costs a whole run of `make gpu`."""
    info = native.build_info()
    sm = native.device_info(0)["sm"] if has_gpu and native.device_count() else None
    build = full_build("all" if sm is None else str(sm))
    if not info["cuda"]:
        return [f"the libraries in pyquant/lib were built without CUDA kernels: {build}"]
    if not has_gpu:
        return []
    if unserved := without_driver(native):
        return [unserved]
    if not has_machine_code(info["architectures"], sm):
        chips, mine = info["architectures"].replace(";", ", "), f"compute capability {sm / 10}"
        return [f"the libraries in pyquant/lib hold machine code for {chips}, none for this GPU of {mine}: {build}"]
    rows = [row for row in native.kernel_table() if row["sm_min"] <= sm < row["sm_end"]]
    missing = [str(row["name"]) for row in rows if not row["compiled"]]
    if not missing:
        return []
    counted = f"{len(missing)} of the {len(rows)} kernels for compute capability {sm / 10}"
    return [f"{counted} have no machine code in these libraries, such as {missing[0]}: {build}"]


def launched(native: Any, device: str = "cuda") -> Iterator[str]:
    """Prints the seconds of a launch of each family; yields what was not as on the CPU."""
    import torch

    probe = importlib.import_module("gpu_probe")
    families = 0
    for one in probe.probe(native, torch.device(device)):
        families += 1
        print(f"make gpu: {one.row}: {one.wrong or 'as on the CPU'}, {one.seconds:.2f} s", flush=True)
        if one.wrong:
            yield f"{one.row} does not run as on the CPU: {one.wrong}"
    if families == 0:
        yield "no kernel could be launched"


def problems(prebuilt: bool) -> list[str]:
    """One line for each thing that keeps `make gpu` from running."""
    import torch

    found = []
    if not torch.cuda.is_available():
        found.append(
            "torch sees no CUDA device; activate an environment with a CUDA build of torch, or name one: "
            "make gpu TORCH=torch"
        )
    lacking = missing_libraries()
    if not lacking and not _has_native():
        reason = make_native() if prebuilt else "pyquant._native cannot be imported; it is part of the build"
        lacking += [reason] if reason else []
    if not lacking:
        native = _native_module()
        lacking += incomplete(native, has_gpu=not found)
        if not lacking and not found:
            lacking += launched(native)
    return found + lacking


def problems_on_simulator() -> list[str]:
    """One line for each thing that keeps a dry run from running."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    simulator = importlib.import_module("simulator")  # before anything loads another CUDA runtime
    if simulator.runtime is None:
        return [f"a dry run needs the simulator: {simulator.why_not} (make simulator)"]
    native = _native_module()
    return incomplete(native, has_gpu=False) or list(launched(native, "cpu"))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--prebuilt", action="store_true", help="libraries were carried from another machine")
    which.add_argument("--simulator", action="store_true", help="a dry run on the simulator")
    args = parser.parse_args(argv)
    started = time.monotonic()
    found = problems_on_simulator() if args.simulator else problems(args.prebuilt)
    for line in found:
        print(f"make gpu: {line}", file=sys.stderr)
    if not found:
        seconds = time.monotonic() - started
        print(f"make gpu: ready in {seconds:.0f} s; libraries {_digest(PACKAGE)}, Python {sys.version.split()[0]}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
