"""bench.rows and bench.decoder without a GPU: what they time, say and refuse."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import decoder, epilogue, gpu_conv, gpu_experts, rows, rows_again  # noqa: E402
from bench.cards import CARDS  # noqa: E402
from pyquant import _native  # noqa: E402
from pyquant.io.journal import Journal  # noqa: E402
from pyquant.measure.environment import describe_environment  # noqa: E402
from pyquant.measure.timing import WallClock  # noqa: E402
from pyquant.measure.tune import TORCH, problems_for  # noqa: E402
from pyquant.report.records.figures import Figures  # noqa: E402
from pyquant.report.records.record import load_record  # noqa: E402

DEVICE = next(card.device for card in CARDS if card.name == "NVIDIA H200")


class _Rig:
    """Kernels take what the model says, but for those that a test names."""

    device = DEVICE
    name = "fake"

    def __init__(self, us: dict[str, float] | None = None, wrong: set[str] | None = None) -> None:
        self.us, self.wrong, self.clock = us or {}, wrong or set(), self

    def prepare(self, problem: dict[str, Any]) -> Callable[[str], tuple[Callable[[], str], bool]]:
        def build(name: str) -> tuple[Callable[[], str], bool]:
            run = lambda: name  # noqa: E731
            run.us = self.us.get(name) or (1e3 if name == TORCH else _native.cost_us(name, problem, DEVICE))  # type: ignore[attr-defined]
            return run, name not in self.wrong

        return build

    def seconds(self, candidate: Any, calls: int) -> float:
        return float(candidate.us * 1e-6 * calls)


def _timed(rig: _Rig, scheme: str = "W8A8", within: float = 2.0) -> rows.Shape:
    problem = problems_for([(4096, 4096, scheme)], [64], torch.bfloat16, DEVICE)[0]
    return rows.timed(rig, scheme, problem, within, only_compiled=False)


@pytest.mark.parametrize("scheme", ["W8A8", "W4A8", "W4A16(group_size=128)"])
def test_rows_that_nothing_selects_are_timed_beside_the_others(scheme: str) -> None:
    problem = problems_for([(14336, 4096, scheme)], [4], torch.bfloat16, DEVICE)[0]
    idle = {row["name"] for row in _native.kernel_table() if not row["selectable"]}
    every, some = (
        rows.timed(_Rig(), scheme, problem, 2.0, only_compiled=False, only_selectable=only) for only in (False, True)
    )
    assert any("decode256" in row.row for row in every.rows)
    assert {row.row for row in every.rows} - idle == {row.row for row in some.rows}


def test_the_model_chooses_the_best_where_the_clock_agrees_with_it() -> None:
    shape = _timed(_Rig())
    assert len(shape.rows) > 3
    assert shape.chosen is shape.best
    assert shape.loss == 1
    assert all(row.us == pytest.approx(row.modelled_us) for row in shape.rows)
    assert all(row.modelled_us <= 2 * shape.chosen.modelled_us for row in shape.rows)
    assert len(_timed(_Rig(), within=1.05).rows) < len(shape.rows)


def test_a_quicker_kernel_is_a_loss_and_a_wrong_one_is_named() -> None:
    first, second = _timed(_Rig()).rows[:2]
    shape = _timed(_Rig({second.row: first.us / 2}))
    assert shape.best.row == second.row
    assert shape.loss == pytest.approx(2)
    wrong = _timed(_Rig(wrong={first.row}))
    assert wrong.wrong == {first.row: "its result differs from the specification"}
    assert first.row not in {row.row for row in wrong.rows}


def test_the_report_names_choices_losses_and_what_is_wrong() -> None:
    first, second = _timed(_Rig()).rows[:2]
    shapes = [
        _timed(_Rig({second.row: first.us / 2})),
        _timed(_Rig(), "FP16(dtype=bfloat16)"),
        _timed(_Rig(wrong={first.row})),
    ]
    assert shapes[1].torch_us == pytest.approx(1e3)
    text = rows.markdown(rows.RowsReport(describe_environment("cpu"), shapes))
    assert "| 2.00 |" in text
    assert f"{first.row}: its result differs" in text


LAYERS = [(4096, 4096, "W8A8"), (4096, 4096, "BF16"), (1024, 4096, "W8A8")]


def _journal(folder: Path) -> Journal:
    return Journal(folder / "rows.partial.jsonl", "problems of bench.rows", "one")


def test_no_shape_is_begun_after_the_deadline(tmp_path: Path) -> None:
    with _journal(tmp_path) as done:
        assert [*rows.measure(rows.DryRig(), LAYERS, [1], 2.0, done, deadline=0.0)] == [((4096, 4096), [])]


def test_shapes_of_a_killed_run_are_not_measured_again(tmp_path: Path) -> None:
    class Killed(rows.DryRig):
        prepared = 0

        def prepare(self, problem: dict[str, Any]) -> Callable[[str], tuple[Callable[[], None], bool]]:
            self.prepared += 1
            if self.prepared == 4:
                raise KeyboardInterrupt
            return super().prepare(problem)

    with _journal(tmp_path) as done, pytest.raises(KeyboardInterrupt):
        [*rows.measure(Killed(), LAYERS, [1, 16], 2.0, done)]
    again = Killed()
    with _journal(tmp_path) as done:
        assert len(done.entries) == 3
        found = dict(rows.measure(again, LAYERS, [1, 16], 2.0, done))
    assert again.prepared == 3
    assert {kn: len(shapes) for kn, shapes in found.items()} == {(4096, 4096): 4, (1024, 4096): 2}
    with _journal(tmp_path) as done:
        assert dict(rows.measure(again, LAYERS, [1, 16], 2.0, done)) == found
    assert again.prepared == 3


def test_the_json_holds_every_kernel_of_every_shape(tmp_path: Path) -> None:
    first = _timed(_Rig()).rows[0]
    shapes = [_timed(_Rig()), _timed(_Rig(), "FP16(dtype=bfloat16)"), _timed(_Rig(wrong={first.row}))]
    rows.write(rows.RowsReport(describe_environment("cpu"), shapes), tmp_path)
    read = load_record(tmp_path / "rows.json", Figures)
    lines = iter(read.rows("kernels"))
    for shape in shapes:
        for row in shape.rows:
            line = next(lines)
            assert [line[name] for name in ("scheme", "m", "k", "n", "row")] == [shape.scheme, 64, 4096, 4096, row.row]
            assert (line["us"], line["modelled_us"]) == (row.us, row.modelled_us)
            terms = {name.removeprefix("terms "): us for name, us in line.items() if name.startswith("terms ")}
            assert {name: us for name, us in terms.items() if us is not None} == row.terms
            assert line["chosen"] is (row is shape.chosen)
    assert not [*lines]
    assert [line["us"] for line in read.rows("torch")] == [pytest.approx(1e3)]
    assert [line["row"] for line in read.rows("wrong")] == [first.row]


def test_rows_run_to_their_end_on_a_faked_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--clock", "faked", "--kn", "256x128", "512x256", "--m", "1", "16", "--out", str(tmp_path)]
    assert rows.main([*words, "--time-budget", "0"]) == rows.UNFINISHED
    assert "0 of 24 shapes are done" in capsys.readouterr().err
    assert rows.main(words) == 0
    said = capsys.readouterr().out
    assert "bench.rows: 256 x 128: 12 shapes" in said
    read = load_record(tmp_path / "rows.json", Figures, faked=True)
    kernels = read.rows("kernels")
    assert {(line["scheme"], line["k"], line["m"]) for line in kernels if line["chosen"]} == {
        (scheme, k, m) for scheme in rows.SCHEMES for k in (256, 512) for m in (1, 16)
    }
    assert "| scheme" in (tmp_path / "rows.md").read_text()


@pytest.mark.parametrize("driver", [rows, decoder, epilogue, gpu_conv, gpu_experts])
def test_without_a_gpu_the_drivers_say_so(driver: Any, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert driver.main([]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_the_decoder_runs_as_every_variant() -> None:
    pytest.importorskip("transformers")
    report = decoder.DecoderReport(describe_environment("cpu"), 1)
    said = [*decoder.measure(decoder.decoder(1, decoder.DRY_SIZES), (1, 3), ("wall",), 1, report)]
    assert report.failed == {}
    assert {row.tokens for row in report.rows} == {1, 3}
    assert len(said) == len(report.mib) + 2
    assert all(value > 10 for value in report.db.values())
    assert "| tokens | bf16" in decoder.markdown(report)


def test_the_decoder_names_a_variant_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")

    def broken(model: nn.Module) -> dict[str, Callable[[], nn.Module]]:
        def fail() -> nn.Module:
            raise ValueError("a reason")

        return {decoder.FLOAT: lambda: model, "broken": fail}

    monkeypatch.setattr(decoder, "variants", broken)
    report = decoder.DecoderReport(describe_environment("cpu"), 1)
    [*decoder.measure(decoder.decoder(1, decoder.DRY_SIZES), (1,), ("wall",), 1, report)]
    assert report.failed == {"broken": "a reason"}
    assert "- broken failed: a reason" in decoder.markdown(report)
    assert [*report.rows[0].ms] == [decoder.FLOAT]


def test_a_variant_that_a_clock_cannot_run_is_named_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")

    class Refusing(WallClock):
        def seconds(self, candidate: Any, calls: int) -> float:
            if getattr(candidate.args[0], "is_refused", False):
                raise RuntimeError("cannot be captured")
            return super().seconds(candidate, calls)

    def two(model: nn.Module) -> dict[str, Callable[[], nn.Module]]:
        other = copy.deepcopy(model)
        other.is_refused = True
        return {decoder.FLOAT: lambda: model, "other": lambda: other}

    monkeypatch.setattr(decoder, "variants", two)
    monkeypatch.setattr(decoder, "make_clock", lambda name: Refusing())
    report = decoder.DecoderReport(describe_environment("cpu"), 1)
    [*decoder.measure(decoder.decoder(1, decoder.DRY_SIZES), (1,), ("wall",), 1, report)]
    assert report.failed == {"other, 1 tokens, wall": "cannot be captured"}
    assert [*report.rows[0].ms] == [decoder.FLOAT]


def test_the_decoder_writes_after_every_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    words = ["--clock", "faked", "--rounds", "1", "--layers", "1", "--tokens", "1", "3", "--out", str(tmp_path)]
    monkeypatch.setattr(decoder, "time_interleaved", _killed)
    with pytest.raises(KeyboardInterrupt):
        decoder.main(words)
    kept = load_record(tmp_path / "decoder.json", Figures, faked=True)
    assert [line["name"] for line in kept.rows("db")] == [
        *decoder.SCHEMES,
        f"{decoder.SCHEMES[0]}, fused",
        f"{decoder.SCHEMES[0]}, fused, merged",
    ]
    assert "built in" in capsys.readouterr().out
    monkeypatch.undo()
    assert decoder.main(words) == 0
    read = load_record(tmp_path / "decoder.json", Figures, faked=True)
    assert [line["tokens"] for line in read.rows("rows")] == [1, 3]
    assert "3 tokens faked: timed in" in capsys.readouterr().out


def test_every_epilogue_is_timed_beside_its_base(tmp_path: Path) -> None:
    words = ["--clock", "faked", "--rounds", "1", "--m", "2", "5", "--kn", "256x128", "--out", str(tmp_path)]
    assert epilogue.main(words) == 0
    (first, second) = load_record(tmp_path / "epilogue.json", Figures, faked=True).rows("rows")
    assert (first["m"], second["m"], first["k"], first["n"]) == (2, 5, 256, 128)
    text = (tmp_path / "epilogue.md").read_text()
    made = epilogue.candidates(2, 256, 128, "cpu")
    for name in made:
        assert f"| {name} " in text
    assert torch.equal(made["plain, then torch's silu"](), torch.nn.functional.silu(made["plain"]()))
    near = dict(zip(made["the same as one kernel"](), made[epilogue.GATE](), strict=True))
    for got, want in near.items():
        torch.testing.assert_close(got.float(), want.float(), rtol=0.01, atol=1)
    assert len({made[name]().float().sum().item() for name in ("plain", "relu", "silu", "gelu", "residual f32")}) == 5


def test_a_shape_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a reason")

    monkeypatch.setattr(epilogue, "candidates", broken)
    assert epilogue.main(["--clock", "faked", "--m", "2", "--kn", "256x128", "--out", str(tmp_path)]) == 1
    assert "- 2 x 256 x 128 failed: a reason" in (tmp_path / "epilogue.md").read_text()


def _killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_without_transformers_the_decoder_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decoder.importlib.util, "find_spec", lambda name: None)
    assert decoder.main(["--clock", "faked"]) == 2
    assert decoder.main(["--clock", "faked", "--allow-missing"]) == 0
    assert capsys.readouterr().err.count("transformers is not installed") == 2


@pytest.mark.parametrize(
    ("driver", "words", "told"),
    [
        (rows, ["--m", "0"], "--m"),
        (rows, ["--within", "0.5"], "--within"),
        (rows, ["--kn", "12"], "--kn"),
        (rows, ["--schemes", "nonsense"], "nonsense"),
        (decoder, ["--tokens", "0"], "--tokens"),
        (epilogue, ["--m", "0"], "--m"),
        (epilogue, ["--kn", "12"], "--kn"),
        (decoder, ["--layers", "0"], "--layers"),
        (gpu_conv, ["--batch", "8", "0"], "--batch"),
        (gpu_conv, ["--rounds", "0"], "--rounds"),
        (gpu_conv, ["--layer", "none such"], "none such"),
        (gpu_experts, ["--tokens", "0"], "--tokens"),
        (gpu_experts, ["--rounds", "0"], "--rounds"),
        (rows_again, ["no-such-file.json"], "no-such-file.json"),
    ],
    ids=str,
)
def test_wrong_words_are_a_line_that_names_them(
    driver: Any, words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = [] if driver is rows_again else ["--clock", "faked", "--out", str(tmp_path)]
    assert driver.main([*dry, *words]) == 2
    assert told in capsys.readouterr().err
