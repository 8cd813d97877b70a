"""Source distribution -> wheel -> clean environment -> a layer runs, doctor is content; wheels that are built twice.

One pair of Python and torch, those at hand; tools/install_matrix.py tries them all. For every change the wheel is
packed round the libraries at hand, and the sources of the distribution are configured; they are compiled by night.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from csrc.cpu_engine import isa_flags

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("cmake", "ninja")

pytestmark = pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="cmake and ninja are not installed")


sys.path.insert(0, str(ROOT / "tools"))  # as for what is started from there; left again: it holds a fuzz.py
distributions, matrix = map(importlib.import_module, ("distributions", "install_matrix"))
sys.path.remove(str(ROOT / "tools"))


# Stands for cmake: what is installed is what the package at hand was built into; everything else succeeds at once.
STAND_IN = """#!{python}
import pathlib, shutil, sys
if sys.argv[1] == "--install":
    for file in {files!r}:
        to = pathlib.Path(sys.argv[2], "install", pathlib.Path(file).relative_to({package!r}))
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, to)
"""


def libraries() -> list[Path]:
    """Of the package at hand, in the order in which they need each other."""
    spec = importlib.util.find_spec("pyquant")
    assert spec is not None
    package = Path(next(iter(spec.submodule_search_locations or ())))
    names = ("lib/libpyquant_core.so", "lib/libpyquant_torch.so", f"_native{sysconfig.get_config_var('EXT_SUFFIX')}")
    return [package / name for name in names]


def stand_in(folder: Path) -> str:
    """A PATH in which cmake takes no time."""
    found = libraries()
    if not all(file.exists() for file in found):
        pytest.skip("pyquant was installed without its libraries")
    folder.mkdir()
    script = folder / "cmake"
    package = str(found[-1].parent)
    script.write_text(STAND_IN.format(python=sys.executable, files=[str(file) for file in found], package=package))
    script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def make_wheel(source: Path, out: Path, **environment: str) -> Path:
    """With the tools of this environment: nothing is downloaded."""
    pytest.importorskip("pybind11", reason="pybind11 is not installed")
    words = [
        sys.executable,
        "-m",
        "pip",
        "-q",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(out),
        str(source),
    ]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYQUANT_")}
    done = subprocess.run(words, env={**kept, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("not a git repository")
    return Path(distributions.make_sdist(tmp_path_factory.mktemp("sdist")))


@pytest.fixture(scope="module", params=["packed", pytest.param("compiled", marks=pytest.mark.nightly)])
def wheel(request: pytest.FixtureRequest, sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    if request.param == "compiled":
        return make_wheel(sdist, out, PYQUANT_CUDA="OFF")
    return make_wheel(sdist, out, PATH=stand_in(out / "tools"))


def test_the_sources_of_the_distribution_are_complete_for_cmake_and_the_compiler(sdist: Path, tmp_path: Path) -> None:
    """Configured for real, where cmake refuses a source that is not there; the compiler then looks for every header."""
    source = distributions.unpack(sdist, tmp_path)
    pybind11 = pytest.importorskip("pybind11", reason="pybind11 is not installed")
    build = tmp_path / "build"
    matrix.run(
        "cmake",
        "-G",
        "Ninja",
        "-S",
        str(source),
        "-B",
        str(build),
        "-DPYQUANT_CUDA=OFF",
        "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        f"-DPYQUANT_TORCH_INCLUDE={distributions.torch_headers()}",
        f"-DPython_EXECUTABLE={sys.executable}",
    )
    planned = json.loads((build / "compile_commands.json").read_text())
    ours = [call for call in planned if call["file"].startswith(f"{source}/csrc/") or "/Unity/" in call["file"]]
    calls = [(call["command"].partition(" -o ")[0], call["file"]) for call in ours]
    names = {path.name for path in (ROOT / "csrc").glob("[cb][pi][un]*/*.cpp")}  # cpu, bind
    assert len(names) > 20
    # Sources that are one for the compiler stand in a file of cmake's.
    given = "\n".join(Path(file).read_text() if "/Unity/" in file else f'{file}"' for _, file in calls)
    of_other_processors = {path.name for path in (ROOT / "csrc/cpu").glob("isa_*.cpp") if isa_flags(path) is None}
    assert of_other_processors <= {path.name for path in source.rglob("isa_*.cpp")}
    assert {name for name in names if f'/{name}"' not in given} <= {"device_cuda.cpp", *of_other_processors}
    for command, file in calls:
        matrix.run("sh", "-c", f"cd {build} && {command} -M {file} > headers")
        assert f"{ROOT}/csrc" not in (build / "headers").read_text(), file


def test_a_wheel_holds_the_libraries_their_licences_and_no_more(wheel: Path) -> None:
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert re.fullmatch(rf"pyquant_gemm-[\d.]+-{tag}-{tag}-linux_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert {n for n in names if n.endswith(".so")} == {
        "pyquant/lib/libpyquant_core.so",
        "pyquant/lib/libpyquant_torch.so",
        f"pyquant/_native{sysconfig.get_config_var('EXT_SUFFIX')}",
    }
    licences = {n.partition(".dist-info/licenses/")[2] for n in names} - {""}
    assert licences == {"LICENSE", *(f"licenses/{path.name}" for path in (ROOT / "licenses").iterdir())}
    assert {n.split("/")[0] for n in names} == {"pyquant", next(n for n in names if ".dist-info" in n).split("/")[0]}
    assert "pyquant/py.typed" in names


def test_what_is_installed_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    matrix.run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))  # pip would be most of the time
    python = str(tmp_path / "venv/bin/python")
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    (site / "torch-of-the-parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    matrix.pip(sys.executable, "--python", python, "install", "--no-deps", "--no-index", str(wheel))
    matrix.use(python, tmp_path / "elsewhere")


def test_the_matrix_finds_pythons_and_tells_failures() -> None:
    (found,) = matrix.pythons([sys.executable])
    assert found.version == f"{sys.version_info[0]}.{sys.version_info[1]}"
    with pytest.raises(matrix.Failed, match="it broke"):
        matrix.run(sys.executable, "-c", "raise SystemExit('it broke')")


def test_the_matrix_knows_what_pip_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0+cpu, 2.13.0\n  INSTALLED: 2.13.0+cpu\n"
    monkeypatch.setattr(matrix, "run", lambda *words, **more: listing)
    assert matrix.offered("python") == {"2.15.0", "2.13.0+cpu", "2.13.0"}


def test_one_torch_of_the_matrix_that_fails_hides_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each has an environment of its own, which is gone afterwards."""
    made: list[str] = []

    def environment(_: object, folder: Path) -> str:
        (folder / "bin").mkdir(parents=True)
        made.append(folder.name)
        return str(folder / "bin/python")

    def pip(python: str, *words: str, **_: str) -> str:
        if "torch===2.11.0" in words:
            raise matrix.Failed("no space left")
        return python

    monkeypatch.setattr(matrix, "environment", environment)
    monkeypatch.setattr(matrix, "pip", pip)
    monkeypatch.setattr(matrix, "use", lambda python, folder: None)
    monkeypatch.setattr(matrix, "run", lambda python, *words, **more: Path(python).parents[1].name)
    monkeypatch.setattr(matrix, "offered", lambda python: {"2.11.0", "2.12.0", "2.13.0+cpu"})
    wanted = ["2.10.0", "2.11.0", "2.12.0", "2.13.0"]
    archives = {"wheel": tmp_path / "wheel", "sdist, isolated": tmp_path / "sdist"}
    told = list(matrix.cells(matrix.Python("python", "3.11"), wanted, archives, tmp_path))
    assert told == [
        ("torch 2.10.0", "no such build is offered"),
        ("torch 2.11.0", "FAILED: no space left"),
        ("torch use-2.12.0, wheel", "ok"),
        ("torch use-2.12.0, sdist, isolated", "ok"),
        ("torch 2.13.0", "no such build is offered"),
    ]
    assert made == ["clean", "use-2.11.0", "use-2.12.0"]
    assert not list(tmp_path.glob("use-*"))


def digests(wheel: Path) -> dict[str, str]:
    archive = zipfile.ZipFile(wheel)
    return {n: hashlib.sha256(archive.read(n)).hexdigest() for n in archive.namelist()}


@pytest.mark.nightly
@pytest.mark.parametrize("cuda", ["OFF", "AUTO"])
def test_two_builds_in_different_folders_give_the_same_bytes(sdist: Path, tmp_path: Path, cuda: str) -> None:
    """With CUDA: everything outside the table, whose kernels have names of their file, and one row."""
    if cuda == "AUTO" and shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    wheels = []
    for name in ("one", "a/longer/way/to/two"):
        (tmp_path / name).mkdir(parents=True)
        source = distributions.unpack(sdist, tmp_path / name)
        wheels.append(
            make_wheel(
                source,
                tmp_path / name / "out",
                PYQUANT_CUDA=cuda,
                PYQUANT_KERNELS="^gemm_decode_s8s8_16x32x64",
                PYQUANT_CUDA_ARCHS="86",
                SOURCE_DATE_EPOCH="1767225600",
                CCACHE_DISABLE="1",
            )
        )
    assert digests(wheels[0]) == digests(wheels[1])
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
