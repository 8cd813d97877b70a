"""`pyquant bench mlp` from the command line, at a size of moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyquant.bench.mlp_net import SIZES, scaled
from pyquant.cli import bench_mlp
from pyquant.cli.main import build_parser, main
from pyquant.measure.gpu_timing import CudaGraphClock
from pyquant.report.records.record import load_record
from pyquant.report.records.trade_off import TradeOff

SMALL = ["bench", "mlp", "--nn-size", "64,32,48", "--scale", "1", "--batch-size", "4", "--runs", "2"]


def test_all_configurations_are_written_in_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert main([*SMALL, "--out", str(tmp_path)]) == 0
    names = {
        f"{stem}.{end}" for stem in ("mlp", "mlp_end_to_end") for end in ("json", "md", "csv", "png", "svg", "html")
    }
    assert {p.name for p in tmp_path.iterdir()} == names | {"mlp_rounds.jsonl"}
    kernel = load_record(tmp_path / "mlp.json", TradeOff)
    assert len(kernel.points) == 9
    assert [line.name for line in kernel.lines] == ["uniform bf16", "uniform int8", "uniform int4"]
    assert all(point.low is not None and point.low <= point.cost for point in kernel.points)
    assert all(set(point.figures) == {"mean_us", "std_us"} for point in kernel.points)
    out = capsys.readouterr().out
    assert "kernel" in out
    assert "end to end" in out
    assert "PASS" not in out
    assert "MISS" not in out  # goals are a GPU's
    assert out == "\n".join((tmp_path / f"{stem}.md").read_text() for stem in ("mlp", "mlp_end_to_end"))
    assert main([*SMALL, "--out", str(tmp_path)]) == 0  # nothing is measured again
    assert load_record(tmp_path / "mlp.json", TradeOff).points == kernel.points


def test_one_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--nn-config", "s8,int4", "--capacity", "input"]) == 0
    out = capsys.readouterr().out
    assert "int8 int4" in out
    assert "1 configurations" in out
    assert "input dimension x bits" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nn-config", ",".join(["float"] * 7)], "7 formats"),
        (["--nn-config", "float,float,float,float,float,fp4"], "fp4"),
        (["--scale", "3"], "--scale"),
        (["--nn-size", "64"], "--nn-size"),
        (["--batch-size", "0"], "--batch-size"),
        (["--runs", "0"], "--runs"),
        (["--threads", "2", "--clock", "cpu"], "--clock cpu"),
        (["--clock", "cuda-graph"], "cpu, wall"),
        (["--device", "tpu"], "--device"),
        (["--device", "cuda:77"], "--device"),
    ],
)
def test_wrong_calls_are_named(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "mlp", *words]) == 2
    assert told in capsys.readouterr().err


def test_the_clock_of_a_gpu_is_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = build_parser()
    for name in ("cpu", "wall"):
        with pytest.raises(Exception, match="cuda-graph, cuda-events"):
            bench_mlp.clock_from_args(parser.parse_args(["bench", "mlp", "--device", "cuda", "--clock", name]))
    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: (0, 1))
    assert isinstance(
        bench_mlp.clock_from_args(parser.parse_args(["bench", "mlp", "--device", "cuda"])), CudaGraphClock
    )
    monkeypatch.setattr(bench_mlp, "select_device", lambda name: name)
    bench = bench_mlp.bench_from_args(parser.parse_args(["bench", "mlp", "--device", "cuda"]))
    assert (bench.sizes, bench.batch, len(bench.configs), bench.runs) == (SIZES, 2048, 729, 30)
    small = bench_mlp.bench_from_args(parser.parse_args(["bench", "mlp"]))
    assert (small.sizes, small.batch) == (scaled(SIZES, 32), 128)
