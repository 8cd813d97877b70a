"""`pyquant bench decode`: tables, files, refusals, and what is timed. No timed assertion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pyquant.bench import decode
from pyquant.bench.decode_net import CONFIGS, make_decoder
from pyquant.bench.model_shapes import MODELS
from pyquant.cli.main import main

TINY = ["bench", "decode", "--config", "tiny", "--layers", "1", "--batch", "1", "3", "--prompt", "4", "--rounds", "1"]


def test_tables_files_and_what_did_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "decode.json", tmp_path / "decode.md"
    assert main([*TINY, "--clock", "faked", "--json", str(file), "--markdown", str(page)]) == 0
    out = capsys.readouterr().out
    assert page.read_text() == out
    tables = {table["title"]: table for table in json.loads(file.read_text())["tables"]}
    rows = [dict(zip(tables["rows"]["header"], row, strict=True)) for row in tables["rows"]["rows"]]
    assert [(row["phase"], row["batch"]) for row in rows if row["candidate"] == decode.BF16] == [
        ("prompt", 1),
        ("decode", 1),
        ("prompt", 3),
        ("decode", 3),
    ]
    assert {f"pyquant {scheme}, merged" for scheme in decode.SCHEMES} <= {row["candidate"] for row in rows}
    assert all(row["sqnr_db"] > decode.LEAST_DB for row in rows if row["candidate"] != decode.BF16)
    sizes = {row["candidate"]: row["weights_mb"] for row in rows}
    assert sizes["pyquant W8A8Dynamic, merged"] < 0.55 * sizes[decode.BF16]
    assert all(name in {row["candidate"] for row in rows} or name in out for name in decode.candidates_of(()))


def test_wrong_calls_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        (["--batch", "0"], "--batch"),
        (["--prompt", "0"], "--prompt"),
        (["--layers", "0"], "--layers"),
        (["--threads", "0"], "--threads"),
        (["--device", "tpu"], "--device"),
        (["--device", "cuda:77"], "--device"),
        (["--clock", "cuda-events"], "cpu, wall"),
        (["--schemes", "W9"], "W9"),
        (["--candidates", "nobody"], "nobody"),
        (["--config", "gpt"], "gpt"),
    ):
        try:
            code = main(["bench", "decode", *words])
        except SystemExit as stopped:  # argparse's own
            code = stopped.code
        assert code == 2
        assert told in capsys.readouterr().err


def test_what_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(schemes: object) -> dict[str, decode.Make]:
        return {decode.BF16: lambda model: model, "wrong": lambda model: model.apply(_zero)}

    def _zero(module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.Linear):
            module.weight.zero_()

    monkeypatch.setattr(decode, "candidates_of", wrong)
    report = decode.run_decode_bench(decode.DecodeBench("tiny", 1, [1], 2, clock="faked", rounds=1))
    assert {row.candidate for row in report.rows} == {decode.BF16}
    assert [(one.candidate, "dB" in one.reason) for one in report.unavailable] == [("wrong", True)]


def test_a_decode_step_continues_the_prompt() -> None:
    model = make_decoder(CONFIGS["tiny"], 2, "cpu").float()
    x = torch.randn(2, 5, 256)
    model.make_room(2, 5)
    whole = model(x)
    model.make_room(2, 5)
    steps = [model(x[:, :3]), model(x[:, 3:4], 3), model(x[:, 4:], 4)]
    assert torch.allclose(torch.cat(steps, 1), whole, atol=1e-4)


def test_the_sizes_are_those_of_the_table_of_models() -> None:
    for name in ("llama-3-8b", "llama-3-70b"):
        s = CONFIGS[name]
        qkv, wide = 128 * (s.heads + 2 * s.kv_heads), 128 * s.heads
        assert MODELS[name] == ((s.hidden, qkv), (wide, s.hidden), (s.hidden, 2 * s.feed), (s.feed, s.hidden))
