"""tools/sanitize.py and tools/gpu_ready.py, as far as a machine without a GPU can tell: what they pick and say."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


sanitize, gpu_ready, gpu_probe = load("sanitize"), load("gpu_ready"), load("gpu_probe")


def row(name: str, family: str, tile: tuple[int, int, int], compiled: bool = True) -> dict:
    return {"name": name, "family": family, "tile": tile, "compiled": compiled, "sm_min": 80, "sm_end": 91}


TABLE = [
    row("big", "sm90_s8s8", (128, 256, 128)),
    row("small", "sm90_s8s8", (64, 64, 64)),
    row("absent", "sm90_s8s8", (8, 8, 8), compiled=False),
    row("any", "simt", (64, 64, 32)),
]


def asked(rows: str | None = None, everything: bool = False, each_family: bool = False) -> argparse.Namespace:
    return argparse.Namespace(rows=rows, all=everything, each_family=each_family)


def test_a_row_of_each_kind_or_what_is_asked_for() -> None:
    assert sanitize.pick(TABLE, asked(), 90) == ["small"]
    assert sanitize.pick(TABLE, asked(each_family=True), 90) == ["small", "any"]
    assert sanitize.pick(TABLE, asked(everything=True), 90) == ["big", "small", "any"]
    assert sanitize.pick(TABLE, asked("^b"), 90) == ["big"]
    assert sanitize.pick(TABLE, asked("absent"), 90) == []
    assert sanitize.pick(TABLE, asked(everything=True), 75) == []


def test_every_kind_is_there_for_the_chips_that_are_served() -> None:
    native = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
    table = [{**row, "compiled": True} for row in native.kernel_table()]
    assert len(sanitize.pick(table, asked(), 90)) == len(sanitize.KINDS)
    assert len(sanitize.pick(table, asked(), 80)) >= 3


def test_each_tool_is_asked_for_its_row() -> None:
    words = sanitize.command("/x/compute-sanitizer", "racecheck", "small")
    assert words[:3] == ["/x/compute-sanitizer", "--tool", "racecheck"]
    assert str(sanitize.ERROR) in words
    assert "test_row_equals_the_specification and small-" in words[-1]
    assert (ROOT / "tests" / words[-3]).exists()


@pytest.mark.parametrize(
    ("code", "output", "said"),
    [
        (0, "1 passed\n========= ERROR SUMMARY: 0 errors", "clean"),
        (86, "========= Invalid __global__ write of size 4\n========= ERROR SUMMARY: 1 error", "errors"),
        (0, "========= ERROR SUMMARY: 12 errors", "errors"),
        (1, "1 failed", "tests failed"),
        (1, "========= Device not supported. Please refer to the documentation", "refused"),
    ],
)
def test_what_an_exit_code_means(code: int, output: str, said: str) -> None:
    outcome = sanitize.judge("memcheck", "small", code, output)
    assert outcome.said == said
    if said == "errors":
        assert any("========= " in line for line in outcome.lines)


def test_without_the_tool_it_fails_unless_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitize, "find_tool", lambda: None)
    assert sanitize.main([]) == 1
    assert "not installed here; nothing was checked" in capsys.readouterr().err
    assert sanitize.main(["--allow-missing"]) == 0


@pytest.fixture
def rows_of_two(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Two rows, and a tool that finds them clean; -> the runs that were made."""
    pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
    ran: list[tuple[str, str]] = []

    def run(sanitizer: str, tool: str, name: str, seconds: float) -> object:
        ran.append((tool, name))
        return sanitize.Outcome(tool, name, "clean")

    monkeypatch.setattr(sanitize, "find_tool", lambda: "compute-sanitizer")
    monkeypatch.setattr(sanitize, "pick", lambda *words: ["small", "big"])
    monkeypatch.setattr(sanitize, "run", run)
    return ran


@pytest.mark.parametrize(
    ("said", "code", "forgiven"),
    [("clean", 0, 0), ("errors", 1, 1), ("tests failed", 1, 1), ("too slow", 1, 1), ("refused", 1, 0)],
)
def test_findings_are_the_exit_code(
    rows_of_two: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    said: str,
    code: int,
    forgiven: int,
) -> None:
    monkeypatch.setattr(sanitize, "run", lambda s, tool, name, t: sanitize.Outcome(tool, name, said, ("a line",)))
    assert sanitize.main(["--tool", "memcheck", "initcheck"]) == code
    printed = capsys.readouterr().out
    assert ("a line" in printed) == (said != "clean")
    runs = 2 if said == "refused" else 4  # a tool that refuses the device is not asked again
    assert f"{4 if said == 'clean' else 0} of {runs} runs clean" in printed
    assert sanitize.main(["--tool", "memcheck", "initcheck", "--allow-missing"]) == forgiven


def test_a_run_that_ends_early_goes_on(rows_of_two: list[tuple[str, str]], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "deep" / "sanitize.json")]
    assert sanitize.main([*out, "--time-budget", "0"]) == sanitize.UNFINISHED
    assert rows_of_two == []
    assert sanitize.main([*out, "--tool", "memcheck"]) == 0
    assert sanitize.main(out) == 0
    assert rows_of_two == [("memcheck", "small"), ("memcheck", "big"), ("racecheck", "small"), ("racecheck", "big")]
    text = (tmp_path / "deep" / "sanitize.json").read_text()
    (tmp_path / "deep" / "sanitize.json").write_text(text.replace('"key": "', '"key": "other '))
    with pytest.raises(SystemExit, match="other libraries"):
        sanitize.main(out)


def test_a_run_that_is_too_slow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*words: object, **more: object) -> object:
        raise subprocess.TimeoutExpired("x", 1.0)

    monkeypatch.setattr(sanitize.subprocess, "run", slow)
    assert sanitize.run("x", "memcheck", "small", 1.0).said == "too slow"


def test_what_a_prebuilt_tree_lacks_is_named(tmp_path: Path) -> None:
    lines = gpu_ready.missing_libraries(tmp_path)
    assert len(lines) == 2
    assert "libpyquant_core.so" in lines[0]
    (tmp_path / "lib").mkdir()
    for name in ("libpyquant_core.so", "libpyquant_torch.so"):
        (tmp_path / "lib" / name).write_bytes(b"x")
    assert gpu_ready.missing_libraries(tmp_path) == []


def test_the_native_module_of_another_python_is_made_anew_or_the_reason_told(tmp_path: Path) -> None:
    words = gpu_ready.native_command(tmp_path, ["-Ione"], ".abi.so")
    assert str(tmp_path / "_native.abi.so") in words
    assert all(Path(word).exists() for word in words if word.endswith(".cpp"))

    def broken(*words: object, **more: object) -> object:
        raise OSError(2, "No such file or directory: 'c++'")

    pytest.importorskip("pybind11", reason="pybind11 is not installed")
    assert "c++" in str(gpu_ready.make_native(broken))


def test_without_a_gpu_make_gpu_stops_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(gpu_ready, "missing_libraries", lambda: ["pyquant/lib/a.so is not there: carry it"])
    assert gpu_ready.main(["--prebuilt"]) == 1
    printed = capsys.readouterr().err
    assert "torch sees no CUDA device" in printed
    assert "a.so" in printed


class Libraries:
    """A native module of which only this is known."""

    def __init__(self, cuda: bool = True, devices: int = 1, missing: int = 0, architectures: str = "80;90a") -> None:
        self.architectures = architectures
        self.cuda, self.devices, self.missing = cuda, devices, missing

    def build_info(self) -> dict[str, Any]:
        return {
            "cuda": self.cuda,
            "cuda_runtime": 13000,
            "architectures": self.architectures,
            "kernels": 3,
            "kernels_compiled": 3 - self.missing,
        }

    def device_count(self) -> int:
        return self.devices

    def why_no_device(self) -> str:
        return "" if self.devices else "the NVIDIA driver serves CUDA 12.8"

    def device_info(self, index: int) -> dict[str, Any]:
        return {"sm": 90}

    def kernel_table(self) -> list[dict[str, Any]]:
        other = {**row("ampere", "sm80_s4s4", (1, 1, 1), compiled=False), "sm_end": 90}
        return [other, *(row(str(i), "sm90_s8s8", (1, 1, 1), compiled=i >= self.missing) for i in range(3))]


@pytest.mark.parametrize(
    ("libraries", "reason"),
    [
        (Libraries(cuda=False), "built without CUDA kernels"),
        (Libraries(devices=0), "pyquant's libraries see none: the NVIDIA driver serves CUDA 12.8"),
        (Libraries(architectures="80"), "hold machine code for 80, none for this GPU of compute capability 9.0"),
        (Libraries(missing=2), "2 of the 3 kernels for compute capability 9.0 have no machine code"),
    ],
)
def test_wrong_libraries_are_not_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], libraries: Libraries, reason: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gpu_ready, "missing_libraries", list)
    monkeypatch.setattr(gpu_ready, "_has_native", lambda: True)
    monkeypatch.setattr(gpu_ready, "_native_module", lambda: libraries)
    assert gpu_ready.main(["--prebuilt"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert "PYQUANT_CUDA_ARCHS" in line or libraries.devices == 0, "what to build"


CHIPS = [("80", 80, True), ("80", 89, True), ("89", 80, False), ("80;90a", 90, True), ("80;90a", 120, False)]


@pytest.mark.parametrize(("architectures", "sm", "holds"), CHIPS)
def test_machine_code_runs_on_its_chip_and_on_later_ones_of_its_kind(architectures: str, sm: int, holds: bool) -> None:
    assert gpu_ready.has_machine_code(architectures, sm) is holds


def test_a_torch_that_only_pretends_does_not_make_it_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the real libraries of this machine, whatever they are: there is no GPU to launch anything on."""
    native = pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
    if native.device_count():
        pytest.skip("there is a device")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert gpu_ready.main([]) == 1
    assert "ready" not in capsys.readouterr().out


@pytest.mark.parametrize(("wrong", "code"), [(None, 0), ("3 of 320 numbers differ", 1)])
def test_a_launch_that_differs_from_the_cpu_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: str | None, code: int
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gpu_ready, "missing_libraries", list)
    monkeypatch.setattr(gpu_ready, "_has_native", lambda: True)
    monkeypatch.setattr(gpu_ready, "_native_module", Libraries)
    told = gpu_probe.Launched("sm90_s8s8", "row 1", 0.25, wrong)
    monkeypatch.setattr(gpu_ready.importlib, "import_module", lambda name: argparse.Namespace(probe=lambda *a: [told]))
    assert gpu_ready.main(["--prebuilt"]) == code
    assert "row 1" in capsys.readouterr().out


def test_each_family_of_a_chip_is_launched_once() -> None:
    assert [one["name"] for one in gpu_probe.one_of_each_family(TABLE, 90)] == ["big", "any"]
    assert gpu_probe.one_of_each_family(TABLE, 75) == []
