"""`pyquant bench qat`: tables, files, the child process, refusals. No timed assertion."""

from __future__ import annotations

import json
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyquant.bench import fake_quantize, qat_steps
from pyquant.bench.peers import PeerUnavailable
from pyquant.cli import bench_qat
from pyquant.cli.main import main
from pyquant.qat.guards import QATWarning

SMALL = ["bench", "qat", "--elements", "4096", "--rounds", "1", "--allocator", "default"]
QUICK = ["--candidates", "pyquant", "torch.fake_quantize"]


def test_tables_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "a.json", tmp_path / "a.md"
    assert main([*SMALL, *QUICK, "--json", str(files[0]), "--markdown", str(files[1])]) == 0
    captured = capsys.readouterr()
    assert captured.out == files[1].read_text()
    assert "2/2 per_channel" in captured.err
    data = json.loads(files[0].read_text())
    assert data["allocator"] == "default"
    named = {(row["case"].split(",")[0], row["candidate"]) for row in data["rows"]}
    for granularity in ("per_tensor", "per_channel"):
        assert {(granularity, fake_quantize.FLOOR), (granularity, fake_quantize.OURS)} <= named
        floor = next(r for r in data["rows"] if r["case"].startswith(granularity) and r["candidate"] == "clone")
        assert floor["to_floor"] == 1.0
    assert all(row["time"] > 0 and row["unit"] == "ns/element" for row in data["rows"])


@pytest.mark.parametrize(
    ("candidate", "granularity"),
    [pytest.param(c, g, id=f"{g} {c.name}") for c in fake_quantize.CANDIDATES for g in c.granularities],
)
def test_every_candidate_quantises_forward_and_passes_a_gradient_back(
    candidate: fake_quantize.Candidate, granularity: str
) -> None:
    if "compile" in candidate.name:
        pytest.skip("the same function as the naive recipe, behind a compiler")
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    scale = x.abs().amax() / 127 if granularity == "per_tensor" else x.abs().amax(-1) / 127
    leaf = x.clone().requires_grad_()
    try:
        function = candidate.build(x, scale.reshape(-1), granularity)
    except PeerUnavailable as reason:
        pytest.skip(str(reason))
    y = function(leaf)
    y.backward(torch.ones_like(x))
    assert leaf.grad is not None
    assert bool((leaf.grad == 1).float().mean() > 0.9) or "naive" in candidate.name or "brevitas" in candidate.name
    if candidate.name != fake_quantize.FLOOR:
        assert bool((y != x).any())
    assert bool(((y - x).abs() <= 1.05 * scale.max()).all())


def test_a_candidate_that_does_something_else_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(x: Tensor, scale: Tensor, granularity: str) -> fake_quantize.Function:
        return lambda v: v * 1.5

    def missing(x: Tensor, scale: Tensor, granularity: str) -> fake_quantize.Function:
        raise PeerUnavailable("no such package")

    rivals = (
        fake_quantize.Candidate("wrong", wrong),
        fake_quantize.Candidate("away", missing),
    )
    monkeypatch.setattr(fake_quantize, "CANDIDATES", (*fake_quantize.CANDIDATES[:2], *rivals))
    assert main([*SMALL, "--granularity", "per_tensor"]) == 0
    out = capsys.readouterr().out
    assert "- wrong (per_tensor, 0.0041 M elements): its result is further than a step" in out
    assert "- away (per_tensor, 0.0041 M elements): no such package" in out
    assert "| wrong" not in out


def test_a_training_step_of_every_variant(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def tiny() -> tuple[torch.nn.Module, Tensor]:
        layers = (torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        return torch.nn.Sequential(*layers), torch.randn(4, 8)

    monkeypatch.setitem(qat_steps.MODELS, "mlp", tiny)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QATWarning)  # what is timed is calibrated
        assert main([*SMALL, "--step", "mlp"]) == 0
    out = capsys.readouterr().out
    for variant in qat_steps.VARIANTS:
        assert variant.name in out
    assert "| plain fp32 " in out
    assert "**pyquant ops, kept weight buffers**" in out
    plain = qat_steps.step_of("mlp", qat_steps.VARIANTS[0])
    losses = [float(plain()) for _ in range(3)]
    for variant in qat_steps.VARIANTS:
        if variant.name.startswith("pyquant"):
            ours = qat_steps.step_of("mlp", variant)
            assert abs(float(ours()) - losses[0]) < 0.05
            assert float(ours()) != losses[1]


def test_the_prepared_step_has_the_ranges_of_its_data() -> None:
    x = torch.linspace(-2.54, 1, 32).view(4, 8)
    variant = next(v for v in qat_steps.VARIANTS if v.name == "pyquant.prepare_qat_")
    model = variant.prepare(torch.nn.Sequential(torch.nn.Linear(8, 16)), x)
    (layer,) = (m for m in model.modules() if hasattr(m, "input_fake_quant"))
    assert layer.input_fake_quant.scale.item() == pytest.approx(0.02)  # 2.54 / 127


def test_the_allocator_is_set_in_a_child_with_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(command: list[str], env: dict[str, str], check: bool) -> subprocess.CompletedProcess[str]:
        seen.update(command=command, env=env)
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.delenv("PYQUANT_BENCH_CHILD", raising=False)
    assert main(["bench", "qat", "--elements", "10", "20", "--candidates", "torch.ao FakeQuantize"]) == 7
    words = seen["command"][3:]
    assert words[:5] == ["bench", "qat", "--elements", "10", "20"]
    assert "torch.ao FakeQuantize" in words
    assert words[words.index("--allocator") + 1] == "kept"
    assert {name: seen["env"][name] for name in bench_qat.KEPT} == bench_qat.KEPT


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--elements", "0"], "--elements"),
        (["--rounds", "0"], "--rounds"),
        (["--threads", "0"], "--threads"),
        (["--candidates", "cublas"], "cublas"),
    ],
)
def test_wrong_options_are_refused_by_name(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *words]) == 2
    assert told in capsys.readouterr().err
