"""QATMonitor: figures against counts by hand, files that survive, nothing left behind."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
import torch
from qat_models import draw, linear, mlp, prepared, static_weights
from torch import nn

from pyquant import ArgumentError, QATMonitor
from pyquant.core.presets import W4A8, W8A8, W8A8Dynamic
from pyquant.qat.monitor import COLUMNS


def by_tensor(rows: list[dict]) -> dict[tuple[str, str], dict]:
    return {(row["layer"], row["tensor"]): row for row in rows}


@pytest.mark.parametrize("forward", ["simulated", "int8"])
@pytest.mark.parametrize("learn", [False, True])
def test_figures(forward: str, learn: bool) -> None:
    d = draw("monitor", forward, learn)
    x = d.normal(8, 32)
    model = prepared(mlp(), static_weights(W4A8(None)), x, learn_amax=learn, forward=forward)
    parts = [1.5 * x, 0.7 * x]
    with QATMonitor(model) as monitor:
        (sum(model(p).square().mean() for p in parts)).backward()
        monitor(7, 0.5)
        first = by_tensor(monitor.rows)
        with torch.no_grad():
            model[0].input_fake_quant.scale.mul_(4.0)
        model.zero_grad()
        model(parts[0]).square().mean().backward()
        monitor(8)
        second = by_tensor(monitor.rows)
    scale = model[0].input_fake_quant.qparams()[0] / 4
    clipped = sum(int((torch.round(p * (1 / scale)).abs() > 127).sum()) for p in parts)
    row = first["0", "input"]
    assert row["clip_share"] == clipped / (2 * x.numel()) > 0
    assert row["scale"] == pytest.approx(scale.item(), rel=1e-5)
    assert (row["step"], row["loss"], row["scale_drift"]) == (7, 0.5, 1.0)
    assert second["0", "input"]["scale_drift"] == pytest.approx(4.0, rel=1e-4)
    fake, w = model[0].weight_fake_quant, model[0].weight.detach()
    codes = torch.round(w * (1 / fake.qparams()[0])[:, None])
    assert second["0", "weight"]["clip_share"] == (codes.abs() > 7).sum().item() / w.numel() > 0
    assert second["0", "weight"]["grad_norm"] == pytest.approx(model[0].weight.grad.norm().item(), rel=1e-5)
    if learn:
        got = model[2].input_fake_quant.scale.grad.norm().item()
        assert second["2", "input"]["grad_norm"] == pytest.approx(got, rel=1e-5)
    else:
        assert second["2", "input"]["grad_norm"] is None


def test_following_ranges_clip_nothing_and_drift() -> None:
    model = prepared(nn.Sequential(linear(32, 16)), W8A8Dynamic())
    x = draw("follow").normal(4, 32)
    with QATMonitor(model) as monitor:
        model(x).sum().backward()
        monitor(0)
        with torch.no_grad():
            model[0].weight.mul_(2)
        model(3 * x).sum().backward()
        monitor(1)
    rows = by_tensor(monitor.rows)
    assert rows["0", "weight"]["clip_share"] == rows["0", "input"]["clip_share"] == 0
    assert rows["0", "weight"]["scale_drift"] == pytest.approx(2, rel=1e-5)
    assert rows["0", "input"]["scale_drift"] == pytest.approx(3, rel=1e-5)


def test_every_and_evaluation_between() -> None:
    x = draw("every").normal(4, 32)
    model = prepared(mlp(), W8A8(), x)
    looked = []
    with QATMonitor(model, every=3) as monitor:
        for step in range(7):
            model(x).sum().backward()
            with torch.no_grad():
                model(100 * x)  # evaluation is not training
            monitor(step)
            if monitor.rows and monitor.rows[0]["step"] == step:
                looked.append(step)
                assert by_tensor(monitor.rows)["0", "input"]["clip_share"] < 0.2
    assert looked == [0, 3, 6]
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_files_are_appended_and_mended(tmp_path: Path) -> None:
    path = tmp_path / "qat.csv"
    x = draw("csv").normal(4, 32)
    model = prepared(mlp(), W8A8(), x)

    def run(steps: range) -> None:
        with QATMonitor(model, path) as monitor:
            for step in steps:
                model(x).sum().backward()
                monitor(step, 1.25)

    run(range(2))
    whole = path.read_text()
    assert whole.splitlines()[0] == ",".join(COLUMNS)
    with path.open("a") as file:
        file.write("2,1.25,0,wei")  # a run that was killed
    run(range(2, 4))
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [int(r["step"]) for r in rows] == [s for s in range(4) for _ in range(4)]
    assert {(r["layer"], r["tensor"]) for r in rows} == {(n, t) for n in "02" for t in ("weight", "input")}
    assert path.read_text().startswith(whole)
    assert all(float(r["loss"]) == 1.25 for r in rows)
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ArgumentError, match="path"):
        QATMonitor(model, other)
    assert other.read_text() == "a,b\n1,2\n"


def test_one_write_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw("write").normal(4, 32)
    model = prepared(mlp(), W8A8(), x)
    writes = []
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: writes.append(bytes(data)) or real(fd, data))
    with QATMonitor(model, tmp_path / "a.csv") as monitor:
        model(x).sum().backward()
        monitor(0)
    assert len(writes) == 1
    assert writes[0].endswith(b"\n")
    assert writes[0].count(b"\n") == 5


def test_tensorboard_and_wrong_arguments(tmp_path: Path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.tags: dict[str, float] = {}

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            assert step == 5
            self.tags[tag] = value

    writer = Writer()
    x = draw("board").normal(4, 32)
    model = prepared(mlp(), W8A8(), x)
    with QATMonitor(model, tensorboard=writer) as monitor:
        model(x).sum().backward()
        monitor(5)
    assert writer.tags["0.input/clip_share"] >= 0
    assert "2.input/grad_norm" not in writer.tags  # it has none
    with pytest.raises(ArgumentError, match="model"):
        QATMonitor(mlp())
    for wrong in ({"every": 0}, {"tensorboard": 3}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            QATMonitor(model, **wrong)
