"""save_to: a run that ended goes on after the last finished block, to the same bits; what does not fit is refused."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from block_nets import Decoder, forwards, sequences
from torch import nn

from pyquant import W4A4, CheckpointError, bias_correction_, gptq_
from pyquant.simulate.calibrate import calibrate_
from pyquant.simulate.insert import insert_fake_quantize_

DATA = sequences(4)
ROOT = Path(__file__).resolve().parents[3]
Improver = Callable[..., dict[str, Any]]


def model_of(symmetric: bool = False, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    scheme = W4A4(symmetric_inputs=symmetric)
    return calibrate_(insert_fake_quantize_(Decoder(5).eval(), scheme), DATA, 4)


def equal(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def ends_after(steps: int) -> Callable[[int, int, str], None]:
    def progress(done: int, total: int, what: str) -> None:
        if done == steps:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("improve", [gptq_, bias_correction_])
@pytest.mark.parametrize("steps", [1, 4, 7])
def test_it_goes_on_after_the_last_finished_block(improve: Improver, steps: int, tmp_path: Path) -> None:
    want = model_of()
    expected = improve(want, DATA, 4)
    ended = model_of()
    with pytest.raises(KeyboardInterrupt):
        improve(ended, DATA, 4, save_to=tmp_path, progress=ends_after(steps))
    resumed = model_of()
    assert improve(resumed, DATA, 4, save_to=tmp_path) == expected
    assert equal(resumed, want)
    assert forwards(resumed) < forwards(want) or steps < 4
    again = model_of()
    assert improve(again, DATA, 4, save_to=tmp_path) == expected  # nothing is left to do
    assert equal(again, want)
    assert forwards(again) < 0.5 * forwards(want)


def test_after_a_kill_in_another_process(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
sys.path[:0] = [{str(ROOT / "tests" / "support")!r}, {str(Path(__file__).parent)!r}]
from test_saved import DATA, model_of
from pyquant import bias_correction_
def progress(done, total, what):
    if done == 3:
        os.kill(os.getpid(), signal.SIGKILL)
bias_correction_(model_of(), DATA, 4, save_to={str(tmp_path)!r}, progress=progress)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    want, resumed = model_of(), model_of()
    assert bias_correction_(resumed, DATA, 4, save_to=tmp_path) == bias_correction_(want, DATA, 4)
    assert equal(resumed, want)


CHANGES: dict[str, Callable[[Path], None]] = {
    "model": lambda folder: _run(folder, seed=1),
    "data": lambda folder: _run(folder, data=[2 * batch for batch in DATA]),
    "settings": lambda folder: _run(folder, damp=0.02),
    "blocks": lambda folder: _run(folder, blocks=["layers.0", "layers.1"]),
}


def _run(folder: Path, seed: int = 0, data: Any = DATA, **options: Any) -> None:
    gptq_(model_of(seed=seed), data, 4, act_order=False, correct_targets=False, save_to=folder, **options)


@pytest.mark.parametrize("fact", CHANGES)
def test_a_folder_of_something_else_is_refused(fact: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path, progress=ends_after(2))
    with pytest.raises(CheckpointError, match=f"a journal with ({fact}|data)"):
        CHANGES[fact](tmp_path)
    _run(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path, progress=ends_after(2))
    files = sorted(tmp_path.glob("block-*.safetensors"))
    assert files  # of the blocks in which anything was accepted
    for path in files:
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    model = model_of()
    before = copy.deepcopy(model)
    with pytest.raises(CheckpointError, match="damaged"):
        gptq_(model, DATA, 4, act_order=False, correct_targets=False, save_to=tmp_path)
    assert equal(model, before)
    for path in files:
        path.unlink()
    with pytest.raises(CheckpointError, match="finished block"):
        _run(tmp_path)


def test_a_failed_run_keeps_its_finished_blocks(tmp_path: Path) -> None:
    model, want, fresh = model_of(), model_of(), model_of()
    bias_correction_(want, DATA, 4)
    with pytest.raises(KeyboardInterrupt):
        bias_correction_(model, DATA, 4, save_to=tmp_path, progress=ends_after(3))
    assert torch.equal(model.layers[1].mix.bias, want.layers[1].mix.bias)
    assert torch.equal(model.layers[2].mix.bias, fresh.layers[2].mix.bias)
    lines = (tmp_path / "blocks.journal").read_text().splitlines()
    assert [json.loads(line).get("key") for line in lines] == [None, "layers 0", "layers.0", "layers.1"]
