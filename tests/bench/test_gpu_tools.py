"""tools/sanitize.py and tools/gpu_ready.py, as far as a machine without a GPU can tell: what they pick and say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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


sanitize, gpu_ready = load("sanitize"), load("gpu_ready")


def row(name: str, family: str, tile: tuple[int, int, int], compiled: bool = True) -> dict:
    return {"name": name, "family": family, "tile": tile, "compiled": compiled}


TABLE = [
    row("big", "sm90_s8s8", (128, 256, 128)), row("small", "sm90_s8s8", (64, 64, 64)),
    row("absent", "sm90_s8s8", (8, 8, 8), compiled=False), row("any", "simt", (64, 64, 32)),
]  # fmt: skip


def test_one_row_of_each_family_or_what_is_asked_for() -> None:
    assert sanitize.pick(TABLE, None, False) == ["small", "any"]
    assert sanitize.pick(TABLE, None, True) == ["big", "small", "any"]
    assert sanitize.pick(TABLE, "^b", False) == ["big"]
    assert sanitize.pick(TABLE, "absent", False) == []


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


def test_without_the_tool_it_says_so_and_claims_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitize, "find_tool", lambda: None)
    assert sanitize.main([]) == 0
    assert "not installed here; nothing was checked" in capsys.readouterr().out


@pytest.mark.parametrize(("said", "code"), [("clean", 0), ("errors", 1), ("tests failed", 1), ("refused", 0)])
def test_findings_are_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: str, code: int
) -> None:
    pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")
    monkeypatch.setattr(sanitize, "find_tool", lambda: "compute-sanitizer")
    monkeypatch.setattr(sanitize, "pick", lambda *words: ["small"])
    monkeypatch.setattr(sanitize, "run", lambda s, tool, name, t: sanitize.Outcome(tool, name, said, ("a line",)))
    assert sanitize.main(["--tool", "memcheck", "initcheck"]) == code
    printed = capsys.readouterr().out
    assert ("a line" in printed) == (said != "clean")
    assert f"{2 if said == 'clean' else 0} of 2 runs clean" in printed


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
