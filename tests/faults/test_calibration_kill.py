"""A calibration whose process is killed at any moment goes on where it was saved, and ends with the same bits."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import accept
import problems
import pytest
import torch
from children import Interrupter, die, die_half_way, fork, wait
from torch import Tensor, nn

from pyquant import QuantizationCalibrator, SelectiveQuantizer
from pyquant.calibrate import Range
from pyquant.calibrate.progress import FILE

BATCHES = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Children are forked without starting Python again; a pool of threads would not survive that."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _data(before: Callable[[int], None] = lambda i: None) -> Iterator[Tensor]:
    """The batches; before(i) runs when batch i is asked for. Every batch widens the histogram of the one before."""
    g = torch.Generator().manual_seed(problems.BASE_SEED)
    for i in range(BATCHES):
        before(i)
        yield torch.randn(7, 4, generator=g) * 3**i


def _model() -> tuple[nn.Module, list[int]]:
    """A prepared model, and a list that grows with every batch it runs."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    SelectiveQuantizer().quantize_module(model)
    runs: list[int] = []
    model.register_forward_hook(lambda *_: runs.append(1))
    return model, runs


def _calibrate(folder: Path | None, data: Iterator[Tensor]) -> tuple[dict[str, Range], int]:
    """-> the ranges, and how many batches were run for them."""
    model, runs = _model()
    save = {} if folder is None else {"save_every": 1, "save_to": str(folder)}
    return QuantizationCalibrator().calibrate_model(model, data, "entropy", BATCHES, **save), len(runs)  # type: ignore


def _bits(ranges: dict[str, Range]) -> dict[str, list[float]]:
    ends = {name: torch.cat([found.low.view(-1), found.high.view(-1)]) for name, found in ranges.items()}
    return {name: end.double().tolist() for name, end in ends.items()}


def _check_goes_on(folder: Path, want: dict[str, list[float]]) -> int:
    """Finish a calibration here -> how many batches were left to run; nothing of the dead one is left over."""
    ranges, runs = _calibrate(folder, _data())
    accept.t0(_bits(ranges), want)
    if runs:  # it saved, and that tidies up
        accept.t0([p.name for p in folder.iterdir()], [FILE])
    return runs


@pytest.fixture
def want() -> dict[str, list[float]]:
    ranges, runs = _calibrate(None, _data())
    accept.t0((runs, len(ranges)), (BATCHES, 2))
    return _bits(ranges)


def test_killed_when_a_batch_is_asked_for(want: dict[str, list[float]], tmp_path: Path) -> None:
    left = []
    for k in range(BATCHES):

        def kill(i: int, k: int = k) -> None:
            if i == k:
                os.kill(os.getpid(), signal.SIGKILL)

        accept.t0(wait(fork(lambda kill=kill, k=k: _calibrate(tmp_path / str(k), _data(kill)))), -signal.SIGKILL)
        left.append(_check_goes_on(tmp_path / str(k), want))
    accept.t0(left, [BATCHES - k for k in range(BATCHES)])


@pytest.mark.parametrize("act", [die, die_half_way], ids=["before", "half way"])
def test_killed_at_each_change_of_the_disk(
    act: Callable[..., object], want: dict[str, list[float]], tmp_path: Path
) -> None:
    with Interrupter(None, lambda name, real, args, kwargs: real(*args, **kwargs)) as counter:
        _calibrate(tmp_path / "count", _data())
    assert counter.calls >= 4 * BATCHES
    left = []
    for k in range(counter.calls):
        folder = tmp_path / str(k)

        def work(folder: Path = folder, k: int = k) -> None:
            with Interrupter(k, act):
                _calibrate(folder, _data())

        accept.t0(wait(fork(work)), -signal.SIGKILL)
        left.append(_check_goes_on(folder, want))
    accept.t0(left, sorted(left, reverse=True))  # the later the kill, the less there is left
    accept.t0(set(left), set(range(BATCHES + 1)))


def test_killed_again_and_again_at_random_instants(want: dict[str, list[float]], tmp_path: Path) -> None:
    rng = random.Random(problems.BASE_SEED)
    start = time.monotonic()
    accept.t0(wait(fork(lambda: _calibrate(tmp_path / "whole", _data()))), 0)
    longest = time.monotonic() - start
    killed, left = 0, []
    for attempt in range(60):
        if attempt >= 12 and killed > 3:
            break
        folder = tmp_path / str(attempt)
        for _ in range(3):
            pid = fork(lambda folder=folder: _calibrate(folder, _data()))
            time.sleep(rng.uniform(0, longest))
            os.kill(pid, signal.SIGKILL)
            killed += wait(pid) == -signal.SIGKILL
        left.append(_check_goes_on(folder, want))
    assert killed > 3, (killed, left)  # resumed runs are short, and may end before they are killed
