"""Installs pyquant as its users do, in clean environments: source distribution -> wheel -> install -> a layer, doctor.

    python tools/install_matrix.py [--python PATH ...] [--torch VERSION ...] [--cuda-builds] [--wheel FILE]

Every Python from 3.10 on that is found here (PATH, pyenv) with every build of torch that pip offers for it: the small
`+cpu` ones, for which PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS may name a place, or with --cuda-builds those that
`pip install torch` brings: 3 GB to download, 7 GB of disk while one is in use. A wheel is built once for each Python,
against the torch beside the Python that runs this; the source distribution is built against every torch. Without any
torch a Python builds and installs its wheel and loads the native module, which needs none. CUDA kernels are left out.
With --wheel that file (tools/wheels.py makes such) is installed everywhere, and nothing is built.
Prints one line for each pair and exits with 1 when one fails.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from distributions import ROOT, Failed, Python, environment, make_sdist, make_wheel, pip, pythons, run, unpack

TORCHES = ("2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0")
FAILED = "FAILED"

# What an installed package must do, torch included. Run outside the checkout.
USE = """
import importlib.metadata, pathlib, torch, pyquant
from pyquant.ops import native_available, why_not_native
ours = [d for d in importlib.metadata.distributions() if d.name in ("pyquant-gemm", "pyquant-gemm-cpu")]
assert {d.version for d in ours} == {pyquant.__version__}, ours
assert native_available(), why_not_native()
(plugin,) = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "pyquant"]
assert plugin.load()() is None and "vllm" not in __import__("sys").modules
model = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 10))
pyquant.quantize_(model, pyquant.W8A8Dynamic())
x = torch.randn(7, 96)
assert torch.equal(model[0](x), model[0].reference(x))
build = lambda: torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 10))
pyquant.save_pretrained(model, "saved")
assert torch.equal(pyquant.load_pretrained("saved", build)(x), model(x))
print(pathlib.Path(pyquant.__file__).parent)
"""
# What it must do without torch: the native module and the library beside it.
LOAD = """
import importlib.machinery, importlib.util, sysconfig
suffix = sysconfig.get_config_var("EXT_SUFFIX")
path = sysconfig.get_path("purelib") + "/pyquant/_native" + suffix
loader = importlib.machinery.ExtensionFileLoader("_native", path)
native = importlib.util.module_from_spec(importlib.util.spec_from_file_location("_native", path, loader=loader))
loader.exec_module(native)
assert len(native.kernel_table()) > 100
print(path)
"""


def offered(python: str) -> set[str]:
    """The versions of torch that pip finds for an environment, `2.13.0+cpu` beside `2.13.0`."""
    try:
        lines = run(python, "-m", "pip", "index", "versions", "torch").splitlines()
    except Failed as failed:
        if "No matching distribution" in str(failed):
            return set()
        raise
    prefix = "Available versions: "
    (line,) = [line for line in lines if line.startswith(prefix)]
    return set(line.removeprefix(prefix).split(", "))


def first_example() -> str:
    """The first lines of Python that a reader of README.md meets."""
    return (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]


def use(python: str, folder: Path) -> None:
    """A layer runs, is saved and loaded, and README's first lines work; nothing warns; doctor finds nothing wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    place = run(python, "-W", "error", "-c", USE, cwd=folder).strip()
    run(python, "-W", "error", "-c", first_example(), cwd=folder)
    if not Path(place).resolve().is_relative_to(Path(python).parents[1].resolve()):
        raise Failed(f"pyquant was imported from {place}")
    run(str(Path(python).with_name("pyquant")), "doctor", cwd=folder)


def with_torch(here: str, version: str, archives: dict[str, Path], folder: Path) -> Iterator[tuple[str, str]]:
    """(what was tried, what came of it) of one torch in an environment without one. Raises Failed."""
    pip(here, "install", "--only-binary=:all:", f"torch==={version}", "numpy", "safetensors")
    name = run(here, "-c", "import torch; print(torch.__version__)").strip()
    for kind, archive in archives.items():
        pip(here, "install", "--force-reinstall", "--no-deps", str(archive), PYQUANT_CUDA="OFF")
        use(here, folder / f"run-{kind[:5]}")
        yield f"torch {name}, {kind}", "ok"


def cells(python: Python, torches: list[str], archives: dict[str, Path], folder: Path) -> Iterator[tuple[str, str]]:
    """(what was tried, what came of it) of one Python. Each torch has an environment, which goes: it may be large.

    archives  what is installed, by its kind: 'wheel', and 'sdist, isolated' where that is to be tried.
    """
    here = environment(python, folder / "clean")
    there = offered(here)
    for version in torches:
        if version not in there:
            yield f"torch {version}", "no such build is offered"
            continue
        place = folder / f"use-{version}"
        try:
            yield from with_torch(environment(python, place), version, archives, folder / version)
        except Failed as failed:
            yield f"torch {version}", f"{FAILED}: {failed}"
        shutil.rmtree(place)
    if there.isdisjoint(torches):
        pip(here, "install", "--no-deps", str(archives["wheel"]))
        run(here, "-c", LOAD, cwd=folder)
        yield "no torch, wheel", "ok: installed, the native module loads"


def main(argv: list[str] | None = None) -> int:
    """Runs the matrix and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", nargs="+", default=[], metavar="PATH", help="interpreters; default: all found here")
    parser.add_argument("--torch", nargs="+", default=list(TORCHES), metavar="VERSION", help="versions of torch")
    parser.add_argument("--cuda-builds", action="store_true", help="what `pip install torch` brings, gigabytes each")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="a wheel for every Python, instead of building")
    parser.add_argument("--folder", type=Path, help="where to work, kept; default: a temporary folder")
    args = parser.parse_args(argv)
    torches = args.torch if args.cuda_builds else [f"{version}+cpu" for version in args.torch]
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        archives = {"wheel": args.wheel.resolve()} if args.wheel else {"sdist, isolated": make_sdist(folder)}
        source = None if args.wheel else unpack(archives["sdist, isolated"], folder)
        for python in pythons(args.python):
            started = time.monotonic()
            try:
                if source is not None:
                    archives["wheel"] = make_wheel(python, source, folder)
                name, seconds = archives["wheel"].name, time.monotonic() - started
                print(f"Python {python.version}: {name}, {seconds:.0f} s", flush=True)
                for what, outcome in cells(python, torches, archives, folder / f"python-{python.version}"):
                    failures += outcome.startswith(FAILED)
                    print(f"Python {python.version}, {what}: {outcome}", flush=True)
            except Failed as failed:
                failures += 1
                print(f"Python {python.version}: {FAILED}: {failed}", flush=True)
    print(f"{failures} failed" if failures else "all that could be tried works")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
