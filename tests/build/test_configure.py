"""The configure step of the native build: what it decides, says and refuses. Nothing is compiled but cmake's probes."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = (ROOT / "cmake/kernels.cmake").read_text()
FAMILIES = dict(re.findall(r"pyquant_family\((\w+) \w+ (80only|80|90a)\b", ROWS))
BYTE_WISE = "gemm_simt_any"

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("ninja") is None, reason="cmake and ninja are not installed"
)


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


@dataclass
class Configured:
    code: int
    told: str
    folder: Path

    def rows(self) -> dict[str, bool]:
        """Row -> compiled."""
        text = (self.folder / "generated/kernels.inc").read_text()
        return {m[1]: m[2] == "1" for m in re.finditer(r"^PYQUANT_KERNEL\((\w+),.*, ([01])\)$", text, re.MULTILINE)}

    def families(self) -> set[str]:
        """Families of which a row is compiled."""
        text = (self.folder / "generated/kernels.inc").read_text()
        return set(re.findall(r"^PYQUANT_KERNEL\(\w+, (\w+),.*, 1\)$", text, re.MULTILINE)) - {"simt"}

    def instances(self) -> list[list[str]]:
        """The rows of every generated source."""
        sources = sorted((self.folder / "generated/cuda").glob("*.cu"))
        return [re.findall(r"^using (\w+)_type = ", source.read_text(), re.MULTILINE) for source in sources]

    def flags(self, source: str) -> str:
        """nvcc's words for a source."""
        text = (self.folder / "build.ninja").read_text()
        flags = re.search(rf"^build \S*{source}\.cu\.o:.*?^  FLAGS = ([^\n]*)", text, re.MULTILINE | re.DOTALL)
        assert flags is not None
        return flags[1]

    def gencodes(self, source: str) -> str:
        """What nvcc is told to make of a source."""
        return " ".join(re.findall(r"-gencode (\S+)", self.flags(source)))

    def source_path(self, source: str) -> str:
        """The path that nvcc is told a source has; '' when it is not."""
        found = re.search(r"(?<= )-Xcudafe=--orig_src_path_name,(\S+)", self.flags(source))
        return found[1] if found else ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all: the compilers are looked for once."""
    return tmp_path_factory.mktemp("configure")


def configure(folder: Path, *options: str, cutlass: Path | None = None, **environment: str) -> Configured:
    root = cutlass or package("cutlass_library") / "source"
    reset = [f"-U{name}" for name in ("PYQUANT_CUDA", "PYQUANT_CUDA_ARCHS", "PYQUANT_KERNELS", "PYQUANT_SIMULATOR")]
    words = [
        "cmake",
        "-G",
        "Ninja",
        "-S",
        str(ROOT),
        "-B",
        str(folder),
        f"-DPYQUANT_CUTLASS_ROOT={root}",
        f"-Dpybind11_DIR={package('pybind11') / 'share/cmake/pybind11'}",
        "-DPYQUANT_NVIDIA_SMI=",
        *reset,
        *options,
    ]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)
    return Configured(done.returncode, " ".join((done.stdout + done.stderr).split()), folder)


def gpu_ready_says(found: Configured, sm: int) -> list[str]:
    """What tools/gpu_ready.py misses in such a build, on a chip of that compute capability."""
    native = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
    spec = importlib.util.spec_from_file_location("gpu_ready", ROOT / "tools/gpu_ready.py")
    assert spec is not None
    assert spec.loader is not None
    gpu_ready = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu_ready)
    compiled = found.rows()
    table = [{**row, "compiled": compiled[row["name"]]} for row in native.kernel_table()]
    library = SimpleNamespace(
        build_info=lambda: {"cuda": True, "architectures": str(sm)},
        device_count=lambda: 1,
        device_info=lambda index: {"sm": sm},
        kernel_table=lambda: table,
    )
    return list(gpu_ready.incomplete(library, has_gpu=True))


@needs_nvcc
def test_every_row_for_every_machine_is_the_default_without_a_gpu(folder: Path) -> None:
    found = configure(folder)
    assert found.code == 0, found.told
    assert all(found.rows().values())
    assert "CUDA kernels for 80;90a" in found.told
    assert found.gencodes("sm80_0") == "arch=compute_80,code=[sm_80,sm_90,compute_80]"
    assert found.gencodes("sm80only_0") == "arch=compute_80,code=[sm_80,compute_80]"
    assert found.gencodes("sm90a_0") == "arch=compute_90a,code=sm_90a"
    files = found.instances()
    assert sorted(row for file in files for row in file) == sorted(set(found.rows()) - {BYTE_WISE})  # each once
    families = sorted(FAMILIES, key=len, reverse=True)
    for file in files:  # of rows that nvcc is told the same of
        assert len({FAMILIES[next(f for f in families if row.startswith(f"gemm_{f}_"))] for row in file}) == 1


@needs_nvcc
@pytest.mark.parametrize(
    ("archs", "kinds", "mma", "before", "since"),
    [
        ("86", {"80", "80only"}, "sm_86,", "sm_86,", ""),
        ("89", {"80", "80only"}, "sm_89,", "sm_89,", ""),
        ("90", {"80", "90a"}, "sm_90,", "", "sm_90,"),
        ("120", {"80"}, "sm_120,", "", "sm_120,"),
    ],
)
def test_a_chip_gets_every_row_that_it_can_run(
    folder: Path, archs: str, kinds: set[str], mma: str, before: str, since: str
) -> None:
    found = configure(folder, f"-DPYQUANT_CUDA_ARCHS={archs}")
    assert found.code == 0, found.told
    assert found.families() == {family for family, kind in FAMILIES.items() if kind in kinds}
    assert found.rows()[BYTE_WISE]
    assert gpu_ready_says(found, int(archs)) == []  # such a build is complete for its chip
    assert gpu_ready_says(found, 86 if "80only" not in kinds else 90)  # and not for every other
    assert found.gencodes("sm80_0") == f"arch=compute_80,code=[{mma}compute_80]"
    assert found.gencodes("quantize/per_token") == (
        f"arch=compute_80,code=[{before}compute_80] arch=compute_90,code=[{since}compute_90]"
    )


@needs_nvcc
def test_time_and_memory_are_told_before_the_build(folder: Path) -> None:
    told = configure(folder, "-DPYQUANT_KERNELS=smoke", MAX_JOBS="1").told
    rows, seconds, minutes = map(
        int, re.search(r"(\d+) CUDA kernels to compile, about (\d+) CPU .*?about (\d+) min", told).groups()
    )  # type: ignore[union-attr]
    assert rows == len(re.findall(r"^  pyquant_kernel\(.* smoke\)", ROWS, re.MULTILINE))
    assert 10 * rows < seconds < 35 * rows + 130
    assert minutes == -(-seconds // 60)
    assert "1 jobs of up to 6 GB each" in told


@needs_nvcc
@pytest.mark.parametrize("value", ["gemm_nothing", "Full"])
def test_a_set_of_kernels_without_any_is_refused(folder: Path, value: str) -> None:
    found = configure(folder, f"-DPYQUANT_KERNELS={value}")
    assert found.code != 0
    assert f"PYQUANT_KERNELS: '{value}' names no row" in found.told
    assert configure(folder, "-DPYQUANT_KERNELS=none").code == 0


@needs_nvcc
def test_nvcc_without_cutlass_is_an_error_that_says_what_to_install(folder: Path, tmp_path: Path) -> None:
    pin = re.search(r"nvidia-cutlass==[\d.]+", (ROOT / "pyproject.toml").read_text())
    assert pin is not None
    for mode in ("AUTO", "ON"):
        found = configure(folder, f"-DPYQUANT_CUDA={mode}", cutlass=tmp_path)
        assert found.code != 0
        for words in (f"pip install --no-deps {pin[0]}", "PYQUANT_CUDA=OFF", "PYQUANT_CUTLASS_ROOT"):
            assert words in found.told


@needs_nvcc
def test_an_old_cutlass_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "include/cutlass").mkdir(parents=True)
    (tmp_path / "include/cutlass/version.h").write_text("#define CUTLASS_MAJOR 3\n#define CUTLASS_MINOR 9\n")
    found = configure(folder, cutlass=tmp_path)
    assert found.code != 0
    assert "CUTLASS 3.9" in found.told
    assert "4.2 is needed" in found.told


@needs_nvcc
def test_an_architecture_that_nvcc_does_not_know_is_refused(tmp_path: Path) -> None:
    """An nvcc of another time, as far as it is asked for its chips."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\nprintf 'sm_80\\nsm_90\\n'\n")
    nvcc.chmod(0o755)
    script = tmp_path / "ask.cmake"
    script.write_text(
        "cmake_minimum_required(VERSION 3.24)\n"
        f'include("{ROOT}/cmake/architectures.cmake")\nset(CMAKE_CUDA_COMPILER "{nvcc}")\n'
        'pyquant_check_nvcc_knows("80;90a")\npyquant_check_nvcc_knows("120")\n'
    )
    done = subprocess.run(["cmake", "-P", str(script)], capture_output=True, text=True)
    told = " ".join(done.stderr.split())
    assert "'120', which nvcc" in told
    assert "it knows 80 90" in told


def test_without_nvcc_the_build_says_that_it_is_for_cpus_only(tmp_path: Path) -> None:
    found = configure(tmp_path, "-DPYQUANT_NVCC=")
    assert found.code == 0, found.told
    assert "built for CPUs ONLY: there was no nvcc" in found.told
    assert "there was no nvcc" in (tmp_path / "generated/build_facts.inc").read_text()
    assert not any(found.rows().values())
    assert "no nvcc" in configure(tmp_path, "-DPYQUANT_NVCC=", "-DPYQUANT_CUDA=ON").told
    asked = configure(tmp_path, "-DPYQUANT_CUDA=OFF")
    assert "built for CPUs ONLY: PYQUANT_CUDA=OFF was set" in asked.told
    wrong = configure(tmp_path, "-DPYQUANT_CUDA=off")
    assert wrong.code != 0
    assert "PYQUANT_CUDA: 'off'; allowed: AUTO, ON, OFF" in wrong.told


@needs_nvcc
def test_a_reproducible_build_forgets_the_folders_of_its_sources(folder: Path) -> None:
    names = {"sm80_0": "generated/cuda/sm80_0.cu"}
    plain = configure(folder)
    assert not any(plain.source_path(name) for name in names)
    asked = configure(folder, SOURCE_DATE_EPOCH="1767225600")
    assert asked.code == 0, asked.told
    assert {name: asked.source_path(name) for name in names} == {n: f"pyquant/{path}" for n, path in names.items()}
