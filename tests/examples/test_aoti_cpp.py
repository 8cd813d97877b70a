"""examples/aoti_cpp: a quantised model runs in a C++ program, without Python, with the bits of QLinear."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyquant import ops
from pyquant.ops.load import LIBRARY

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "aoti_cpp"

pytestmark = [
    pytest.mark.nightly,  # inductor and two C++ builds: a minute and a half
    pytest.mark.skipif(not ops.native_available(), reason=f"compiled library not in use: {ops.why_not_native()}"),
    pytest.mark.skipif(not all(map(shutil.which, ("cmake", "g++"))), reason="cmake and g++ are not installed"),
]


def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(w) for w in words], env=environment or None, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The program, and the folder of the package."""
    build, folder = tmp_path_factory.mktemp("build"), tmp_path_factory.mktemp("package")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    run("cmake", "-S", EXAMPLE, "-B", build, "-DCMAKE_BUILD_TYPE=Release", prefix)
    run("cmake", "--build", build)
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    run(sys.executable, "-W", "ignore", EXAMPLE / "export_model.py", folder, **path)
    return build / "pyquant_aoti", folder


def test_every_scheme_has_the_bits_of_the_layer_for_any_number_of_rows(made: tuple[Path, Path]) -> None:
    program, folder = made
    linked = run("ldd", program).stdout
    assert "libtorch_cpu" in linked
    assert "python" not in linked.replace(str(Path(torch.__file__).parent), "")
    inputs = sorted(folder.glob("x*.f32"))
    assert len(inputs) == 4
    for x in inputs:
        expected = sorted(folder.glob(f"expected{x.stem[1:]}_*.f32"))
        assert len(expected) == 4
        results = [folder / f"result{i}" for i in range(4)]
        run(program, LIBRARY, folder / "model.pt2", 64, x, *results, PATH="/usr/bin")
        for got, want in zip(results, expected, strict=True):
            assert want.stat().st_size > 0
            assert got.read_bytes() == want.read_bytes(), want.name


@pytest.mark.parametrize(
    ("library", "columns", "said"),
    [(LIBRARY.with_name("absent.so"), 64, "absent.so"), (LIBRARY, 61, "does not hold whole rows of 61")],
)
def test_it_says_what_is_wrong(made: tuple[Path, Path], library: Path, columns: int, said: str) -> None:
    program, folder = made
    words = [program, library, folder / "model.pt2", columns, folder / "x2.f32", *(folder / f"r{i}" for i in range(4))]
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("pyquant_aoti: ")
    assert said in done.stderr
