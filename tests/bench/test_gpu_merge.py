"""python -m bench.gpu --merge: results of several runs as those of one GPU; faked or foreign ones are refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import gemm  # noqa: E402
from bench.gpu import __main__ as gpu  # noqa: E402
from pyquant.measure.environment import describe_environment  # noqa: E402
from pyquant.report.records.bench import GemmReport, GemmRow  # noqa: E402
from pyquant.report.records.figures import Figures  # noqa: E402
from pyquant.report.records.record import load_record, save_record  # noqa: E402

H200 = replace(describe_environment("cpu", clock="cuda-graph"), gpu="NVIDIA H200, sm_90", device="cuda")


def written(folder: Path, m: int, **facts: str) -> Path:
    row = GemmRow(m, 64, 32, "torch.mm bf16", False, 1.0, 1.0, 0.0, 5)
    environment = replace(H200, **facts)
    save_record(folder / "gemm.json", GemmReport(environment, "torch.mm bf16", [row]))
    save_record(folder / "qat_step.json", Figures(f"steps at {m}", environment, []))
    return folder


def shapes(folder: Path) -> list[int]:
    return [row.m for row in load_record(folder / "gemm.json", GemmReport).rows]


def test_slices_meet_in_the_folder_of_their_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "RESULTS", tmp_path / "results")
    assert gpu.main(["--merge", str(written(tmp_path / "a", 1)), str(written(tmp_path / "b", 16))]) == 0
    where = tmp_path / "results" / "nvidia-h200"
    assert shapes(where) == [1, 16]
    assert load_record(where / "qat_step.json", Figures).title == "steps at 16"
    assert gpu.main(["--merge", str(written(tmp_path / "c", 256))]) == 0
    assert shapes(where) == [1, 16, 256]


@pytest.mark.parametrize(("facts", "said"), [({"clock": "faked"}, "faked"), ({"driver": "other"}, "driver")])
def test_what_does_not_belong_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], facts: dict[str, str], said: str
) -> None:
    target = written(tmp_path / "target", 1)
    words = ["--merge", str(written(tmp_path / "a", 16, **facts)), "--out", str(target)]
    assert gpu.main(words) == 2
    assert said in capsys.readouterr().err
    assert shapes(target) == [1]
    assert load_record(target / "qat_step.json", Figures).title == "steps at 1"
    assert (gpu.main([*words, "--replace"]) == 0) == (said == "driver")
