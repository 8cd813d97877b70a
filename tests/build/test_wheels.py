"""tools/wheels.py: the wheels of several Pythons become one. By night both are built and installed."""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))  # as for what is started from there; left again: it holds a fuzz.py
wheels = importlib.import_module("wheels")
sys.path.remove(str(ROOT / "tools"))

HEADERS = {"torch": ["2.13.0"], "pybind11": ["3.0.1"]}
METADATA = """Metadata-Version: 2.4
Name: pyquant-gemm
Version: 0.1.0
Requires-Python: >=3.10
Requires-Dist: torch>=2.10

Name: of the text
"""


def make(folder: Path, version: str, core: bytes = b"core") -> Path:
    """A wheel as setuptools makes it, of one Python."""
    tag, info = "cp" + version.replace(".", ""), "pyquant_gemm-0.1.0.dist-info"
    files = {
        "pyquant/__init__.py": b"",
        "pyquant/lib/libpyquant_core.so": core,
        f"pyquant/_native.cpython-{tag[2:]}-x86_64-linux-gnu.so": version.encode(),
        f"{info}/METADATA": METADATA.encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}-{tag}-linux_x86_64\n\n".encode(),
    }
    record = "".join(f"{name},{digest(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = folder / f"pyquant_gemm-0.1.0-{tag}-{tag}-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel


def digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


@pytest.fixture(autouse=True)
def _needs_wheel() -> None:
    pytest.importorskip("wheel", reason="wheel is not installed")


def test_one_wheel_holds_the_native_module_of_every_python(tmp_path: Path) -> None:
    made = {version: make(tmp_path, version) for version in ("3.10", "3.11", "3.12")}
    found = wheels.joined(made, wheels.CPU, tmp_path / "work", sys.executable, HEADERS)
    assert found.name == "pyquant_gemm_cpu-0.1.0-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(found) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    info = "pyquant_gemm_cpu-0.1.0.dist-info"
    for version in made:
        tag = version.replace(".", "")
        assert files[f"pyquant/_native.cpython-{tag}-x86_64-linux-gnu.so"] == version.encode()
    told = files[f"{info}/METADATA"].decode()
    assert told == METADATA.replace("Name: pyquant-gemm\n", "Name: pyquant-gemm-cpu\n").replace(
        ">=3.10\n", ">=3.10,<3.13\n"
    )
    assert re.findall(r"(?m)^Tag: (.*)$", files[f"{info}/WHEEL"].decode()) == ["py3-none-linux_x86_64"]
    record = dict(line.split(",", 1) for line in files[f"{info}/RECORD"].decode().splitlines())
    assert set(record) == set(files)
    for name, data in files.items():
        assert name.endswith("/RECORD") or record[name] == f"{digest(data)},{len(data)}"
    assert json.loads(files[f"{info}/sboms/pyquant-gemm-cpu.cdx.json"])["bomFormat"] == "CycloneDX"


def test_wheels_that_differ_are_not_joined(tmp_path: Path) -> None:
    made = {"3.10": make(tmp_path, "3.10"), "3.11": make(tmp_path, "3.11", core=b"another")}
    with pytest.raises(wheels.Failed, match=r"libpyquant_core\.so is not the same in the wheels of 3\.10 and 3\.11"):
        wheels.joined(made, wheels.CPU, tmp_path / "work", sys.executable, HEADERS)


def test_a_wheel_without_one_of_its_pythons_is_refused() -> None:
    assert wheels.requires_python(["3.11", "3.10"]) == ">=3.10,<3.12"
    with pytest.raises(wheels.Failed, match=r"3\.10, 3\.12: one between them"):
        wheels.requires_python(["3.12", "3.10"])


@pytest.mark.parametrize("name", [wheels.CUDA, wheels.CPU])
def test_the_list_of_contents_names_what_the_notice_names(name: str) -> None:
    told = wheels.contents(name, "0.1.0", HEADERS, "13.0.88")
    assert all(part["version"] and part["purl"].endswith(part["version"]) for part in told["components"])
    parts = {part["name"] for part in told["components"]}
    notice = (ROOT / "licenses/NOTICE.md").read_text().lower()
    rows = [row for row in notice.splitlines() if row.startswith("|")][2:]
    assert all(any(part.split("-")[0] in row for row in rows) for part in parts)
    expected = [row for row in rows if name == wheels.CUDA or "when built with cuda" not in row]
    assert len(parts) == len(expected)
    assert told["dependencies"][0]["dependsOn"] == [part["bom-ref"] for part in told["components"]]


def test_the_list_of_contents_has_the_versions_that_the_builds_used() -> None:
    """Pythons may be built for with several releases of pybind11: each is named."""
    told = wheels.contents(wheels.CPU, "0.1.0", {"torch": ["2.13.0"], "pybind11": ["2.13.6", "3.0.1"]})
    assert [(part["name"], part["version"], part["purl"]) for part in told["components"]] == [
        ("pytorch", "2.13.0", "pkg:pypi/torch@2.13.0"),
        ("pybind11", "2.13.6", "pkg:pypi/pybind11@2.13.6"),
        ("pybind11", "3.0.1", "pkg:pypi/pybind11@3.0.1"),
    ]
    pytest.importorskip("pybind11", reason="pybind11 is not installed")
    version = importlib.metadata.version
    assert wheels.used([sys.executable] * 2) == {
        "torch": [version("torch").split("+")[0]],
        "pybind11": [version("pybind11")],
    }


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_the_runtime_has_the_release_of_the_compiler() -> None:
    assert re.fullmatch(r"1[23]\.\d+\.\d+", wheels.toolkit())


def test_without_a_compiler_there_is_no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(wheels.Failed, match="no nvcc"):
        wheels.toolkit()


def test_the_release_publishes_what_was_installed_and_only_when_switched_on() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert jobs["publish"]["needs"] == "install"
    assert jobs["install"]["needs"] == "wheels"
    assert "vars.PYQUANT_PUBLISH == 'true'" in jobs["publish"]["if"]
    assert {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})} == {"publish"}
    commands = [
        step["run"].split()[1] for job in jobs.values() for step in job["steps"] if "tools/" in step.get("run", "")
    ]
    assert all((ROOT / command).is_file() for command in commands)
    assert {Path(command).name for command in commands} == {"wheels.py", "install_matrix.py"}


def test_a_cuda_wheel_is_built_with_the_cutlass_of_the_python_that_runs_this(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environments of the build hold its tools alone."""
    monkeypatch.delenv("PYQUANT_CUTLASS_ROOT", raising=False)
    if importlib.util.find_spec("cutlass_library") is not None:
        assert (Path(wheels.cutlass_root()) / "include/cutlass/version.h").is_file()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(wheels.Failed, match=r"nvidia-cutlass==4\.2\.0\.0"):
        wheels.cutlass_root()
    monkeypatch.setenv("PYQUANT_CUTLASS_ROOT", "/somewhere")
    assert wheels.cutlass_root() == "/somewhere"
    given: dict[str, str] = {}

    def made(python: object, source: Path, folder: Path, **options: str) -> Path:
        given.update(options)
        raise wheels.Failed("built")

    monkeypatch.setattr(wheels, "make_wheel", made)
    for name, root in ((wheels.CUDA, "/somewhere"), (wheels.CPU, None)):
        given.clear()
        one, work = SimpleNamespace(version="3.11"), tmp_path / name
        with pytest.raises(wheels.Failed, match="built"):
            wheels.build(name, [one], tmp_path, work, sys.executable)
        assert given.get("PYQUANT_CUTLASS_ROOT") == root
        assert given["PYQUANT_CUDA"] == ("ON" if name == wheels.CUDA else "OFF")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_wheel_is_built_once_and_installed_in_every_python(tmp_path: Path, kind: str) -> None:
    """With CUDA: without the kernels of products, which take an hour; on this machine it runs as the other does."""
    if kind == "cuda" and shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc")
    command = [sys.executable, str(ROOT / "tools/wheels.py"), "--out", str(tmp_path / "dist")]
    command += ["--cpu-only"] if kind == "cpu" else []
    environment = {**os.environ, "PYQUANT_KERNELS": "none"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-3000:]
    name = "pyquant_gemm_cpu" if kind == "cpu" else "pyquant_gemm"
    (wheel,) = (tmp_path / "dist").glob(f"{name}-*-py3-none-manylinux_*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (sbom,) = (name for name in archive.namelist() if name.endswith(".cdx.json"))
        assert all(part["version"] for part in json.loads(archive.read(sbom))["components"])
    matrix = [sys.executable, str(ROOT / "tools/install_matrix.py"), "--wheel", str(wheel)]
    done = subprocess.run(matrix, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "FAILED" not in done.stdout
