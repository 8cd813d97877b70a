"""PYQUANT_CUDA_ARCHS as people write it: what it comes to, and what is refused by name (cmake in script mode)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAD = "cmake_minimum_required(VERSION 3.24)"  # older policies apply to a script without it

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")


def read(folder: Path, *texts: str, gpus: str | None = None) -> str:
    """What cmake prints. gpus: compute capabilities that nvidia-smi tells; None: there is no nvidia-smi."""
    script, smi = folder / "read.cmake", folder / "nvidia-smi"
    lines = [f'pyquant_read_architectures("{text}" archs)\nmessage("archs: ${{archs}}")' for text in texts]
    script.write_text("\n".join([HEAD, f'include("{ROOT}/cmake/architectures.cmake")', *lines]))
    if gpus is not None:
        smi.write_text("#!/bin/sh\n" + (f"printf '{gpus}'" if gpus else "echo 'no devices were found'; exit 6") + "\n")
        smi.chmod(0o755)
    words = ["cmake", f"-DPYQUANT_NVIDIA_SMI={smi if gpus is not None else ''}", "-P", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return " ".join((done.stdout + done.stderr).split())


SPELLINGS = {
    "": "80;90a",
    "all": "80;90a",
    "ALL": "80;90a",
    "80;90a": "80;90a",
    "86": "86",
    "8.6": "86",
    "sm_86": "86",
    "SM86": "86",
    "compute_86": "86",
    "86-real": "86",
    "8.6+PTX": "86",
    "90a": "90a",
    "sm_90a": "90a",
    "90": "90a",
    "9.0": "90a",
    "8.0 8.6": "80;86",
    "90a, 8.9;86": "86;89;90a",
    "12.0": "120",
    "120a": "120",
    "100 80": "80;100",
    "86 8.6 sm_86": "86",
}


def test_spellings(tmp_path: Path) -> None:
    assert re.findall(r"archs: (\S+)", read(tmp_path, *SPELLINGS)) == list(SPELLINGS.values())


def test_90_means_90a_and_says_so(tmp_path: Path) -> None:
    told = read(tmp_path, "90", "9.0", "sm_90")
    assert all(f"architecture {text} means 90a" in told for text in ("90", "9.0", "sm_90"))
    assert "means" not in read(tmp_path, "90a")


@pytest.mark.parametrize(
    "text", ["foo", "8", "85", "86a", "90b", "1e2", "80-virtual", "sm_", "80:90", "130", "8.6.0", "-80"]
)
def test_what_is_unknown_is_refused_with_what_is_allowed(tmp_path: Path, text: str) -> None:
    told = read(tmp_path, f"80 {text}")
    assert f"PYQUANT_CUDA_ARCHS: '{text}'" in told
    assert "native, all, or of 80 86 87 88 89 90a" in told
    assert "archs:" not in told


@pytest.mark.parametrize("text", ["75", "7.5", "sm_70", "61", "native"])
def test_chips_before_ampere_are_refused(tmp_path: Path, text: str) -> None:
    told = read(tmp_path, text, gpus="7.5\\n")
    assert "8.0" in told
    assert "PYQUANT_CUDA=OFF" in told
    assert "archs:" not in told


@pytest.mark.parametrize("text", ["", "native"])
@pytest.mark.parametrize(
    ("gpus", "archs"),
    [("8.6\\n", "86"), ("9.0\\n9.0\\n", "90a"), ("8.9\\n8.0\\n", "80;89"), ("7.5\\n8.6\\n", "86"), ("12.0\\n", "120")],
)
def test_by_default_the_gpus_that_are_here(tmp_path: Path, text: str, gpus: str, archs: str) -> None:
    told = read(tmp_path, text, gpus=gpus)
    assert told.endswith(f"archs: {archs}")
    assert ("7.5 is left out" in told) == ("7.5" in gpus)


def test_a_driver_without_gpus_is_as_none(tmp_path: Path) -> None:
    assert read(tmp_path, "", gpus="").endswith("archs: 80;90a")
    assert "names no GPU here" in read(tmp_path, "native", gpus="")
    assert "names no GPU here" in read(tmp_path, "native")
