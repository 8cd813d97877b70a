"""What is passed on: a source distribution that is the repository, its name, the licences of what is compiled in."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ADDED_BY_SETUPTOOLS = re.compile(r"PKG-INFO|setup\.cfg|pyquant_gemm\.egg-info/.*")
# Installing the name of another project, or its extras.
WRONG_NAME = re.compile(r"""pip3? install[^\n|#]*?[ '"`]pyquant(?![\w-])(?!\.)|(?<![\w.-])pyquant\[[a-z]+\]""")


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git repository")
    return done.stdout.split("\n")[:-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from a copy: setuptools writes beside the sources."""
    folder = tmp_path_factory.mktemp("sdist")
    copy = folder / "repository"
    for name in tracked():
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (copy / "pyquant/lib").mkdir()
    (copy / "pyquant/lib/libpyquant_core.so").write_bytes(b"stale")
    code = "import setuptools.build_meta as b; print(b.build_sdist('..'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


def test_a_source_distribution_is_the_repository(sdist: Path) -> None:
    assert re.fullmatch(r"pyquant_gemm-[\d.]+\.tar\.gz", sdist.name)
    with tarfile.open(sdist) as archive:
        inside = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    ours = {name for name in inside if not ADDED_BY_SETUPTOOLS.fullmatch(name)}
    here = {name for name in tracked() if (ROOT / name).exists()}
    assert here - ours == set(), "not in MANIFEST.in"
    assert ours - here == set(), "not of the repository"


def test_nobody_is_told_to_install_another_project() -> None:
    found = []
    for name in tracked():
        if name == "tests/house/test_distribution.py" or not (ROOT / name).exists():
            continue
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name}: {match[0]}" for match in WRONG_NAME.finditer(text)]
    assert not found


@pytest.mark.parametrize(
    "text", ["pip install pyquant", "`pip install -U pyquant`", "pip install 'pyquant[cli]'", "(or pyquant[cli])"]
)
def test_the_wrong_name_is_seen(text: str) -> None:
    assert WRONG_NAME.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install pyquant-gemm",
        "pip install 'pyquant-gemm[cli]'",
        "pip install dist/pyquant_gemm-1.whl",
        "x.pyquant[0]",
    ],
)
def test_the_right_name_is_not_held_for_the_wrong_one(text: str) -> None:
    assert not WRONG_NAME.search(text)


@pytest.mark.parametrize(("distribution", "ours"), [("nvidia-cutlass", "CUTLASS.txt"), ("pybind11", "pybind11.txt")])
def test_licences_are_those_of_what_is_compiled_in(distribution: str, ours: str) -> None:
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed")
    theirs = [f for f in files if re.search(r"dist-info/(licenses/)?LICENSE(\.txt)?$", str(f))]
    texts = [Path(str(f.locate())).read_text() for f in theirs]
    assert (ROOT / "licenses" / ours).read_text() in texts, f"licenses/{ours} is not {distribution}'s any more"
