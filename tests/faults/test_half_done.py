"""What fails or is interrupted half way leaves nothing behind: models, files and locks are as before."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant import Recipe, auto_, prepare_qat_, quantize_
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io import atomic
from pyquant.io.journal import Journal
from pyquant.nn.two_forms import TwoFormLinear
from pyquant.nn.undo import undone_on_error
from pyquant.ptq.blockwise.offload import Place


def encoder_layer() -> nn.Module:
    """In training mode, as it is built: link_ refuses it after fuse_ has changed it."""
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)


class Gated(nn.Module):
    """What fuse_ makes a GatedFeed of: its class changes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return y


def described(model: nn.Module) -> list[Any]:
    plain = (int, float, str, bool, type(None), nn.Module)
    return [
        (name, type(module), module.training, {k: v for k, v in vars(module).items() if isinstance(v, plain)})
        for name, module in model.named_modules()
    ]


def linked() -> Recipe:
    return Recipe.from_dict({"default": "W8A8", "chains": "auto"})


@pytest.fixture(params=["encoder layer", "gated"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    return encoder_layer() if request.param == "encoder layer" else Gated().train()


def test_a_recipe_whose_last_step_fails(model: nn.Module) -> None:
    x = torch.randn(4, 3, 16)
    before, wanted = described(model), model(x)
    with pytest.raises(ArgumentError, match="training mode"):
        quantize_(model, linked(), data=[torch.randn(4, 3, 16) for _ in range(16)])
    assert described(model) == before
    assert torch.equal(model(x), wanted)


def test_auto_interrupted_while_it_times(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoder_layer().eval()
    x = torch.randn(4, 3, 16)
    before, wanted = described(model), model(x)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(pyquant.ptq.auto, "judge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        auto_(model, x, linked(), data=[torch.randn(4, 3, 16) for _ in range(16)])
    assert described(model) == before
    assert torch.equal(model(x), wanted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device that is not there")
@pytest.mark.parametrize("config", [Recipe.from_dict({"default": "W8A8Dynamic"}), "W8A8Dynamic"])
def test_a_device_that_is_not_there(config: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    before = described(model)
    with pytest.raises((AssertionError, RuntimeError, pyquant.PyquantError)):
        quantize_(model, config, device="cuda:7")
    assert described(model) == before


def test_a_warning_that_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    before = described(model)
    warn = partial(warnings.warn, "a bad start", pyquant.QuantizationWarning, 2)
    monkeypatch.setattr(pyquant.qat.prepare, "warn_of_bad_starts", lambda _: warn())
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        with pytest.raises(pyquant.QuantizationWarning):
            prepare_qat_(model, "W8A8Dynamic")
    assert described(model) == before


def test_every_step_back_is_taken() -> None:
    done: list[str] = []

    def fails() -> None:
        done.append("fails")
        raise KeyboardInterrupt

    steps: list[Callable[[], Any]] = [partial(done.append, "first"), fails, partial(done.append, "last")]
    with pytest.raises(KeyboardInterrupt), undone_on_error(steps):
        raise ValueError("the body's own")
    assert done == ["last", "fails", "first"]


class _Full(nn.Linear):
    """Another device has no room for it."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Linear:
        if fn(torch.empty(0)).is_meta:
            raise torch.OutOfMemoryError("no room")
        return super()._apply(fn, recurse)


def test_a_block_that_does_not_fit_comes_home(monkeypatch: pytest.MonkeyPatch) -> None:
    homes: list[tuple[nn.Module, Any]] = []
    monkeypatch.setattr(Place, "_leave", lambda self, block, home: homes.append((block, home)))
    block = nn.Sequential(nn.Linear(4, 4), _Full(4, 4))
    place = Place(torch.device("meta"))
    with pytest.raises(torch.OutOfMemoryError), place.holds(block):
        pass
    with pytest.raises(torch.OutOfMemoryError), place.holds_each([block]):
        block(torch.ones(1, 4))
    assert homes == [(block, torch.device("cpu"))] * 2


def test_two_forms_after_a_move_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = pyquant.QLinear.from_float(nn.Linear(16, 8), pyquant.W8A8Dynamic())
    both, x = TwoFormLinear.of(layer, [(4, float("inf"))]), torch.randn(6, 16)
    wanted = both(x)

    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(pyquant.QLinear, "_apply", fails)
        with pytest.raises(torch.OutOfMemoryError):
            both.to(torch.float16)
    assert torch.equal(both(x), wanted)
    assert both.half()(x.half()).dtype == torch.float16


def test_a_journal_goes_on_after_a_line_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyquant.io import journal

    def half(fd: int, line: bytes) -> None:
        os.write(fd, line[: len(line) // 2])
        raise OSError(28, "No space left on device")

    with Journal(tmp_path / "journal", "test", "facts") as kept:
        kept.add("a", 1)
        with monkeypatch.context() as patch:
            patch.setattr(journal, "write_all", half)
            with pytest.raises(OSError, match="No space"):
                kept.add("b", 2)
        kept.add("c", 3)
    with Journal(tmp_path / "journal", "test", "facts") as again:
        assert again.entries == {"a": 1, "c": 3}


@pytest.fixture
def child() -> Iterator[Callable[[], None]]:
    """Forks a process that lives on, as workers of a DataLoader do."""
    pids: list[int] = []

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                signal.pause()
            os._exit(0)
        pids.append(pid)

    yield fork
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads, which here only waits
def test_a_worker_that_lives_on_keeps_no_lock(tmp_path: Path, child: Callable[[], None]) -> None:
    with Journal(tmp_path / "journal", "test", "facts"), atomic.SaveDirectory(tmp_path / "saved"):
        child()
        with pytest.raises(CheckpointError, match="another process"), Journal(tmp_path / "journal", "test", "facts"):
            pass
    with Journal(tmp_path / "journal", "test", "facts"), atomic.SaveDirectory(tmp_path / "saved"):
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_worker_that_ends_leaves_the_lock(tmp_path: Path) -> None:
    """A fork that is unwound through the parent's with statements closes what it has inherited."""
    with Journal(tmp_path / "journal", "test", "facts") as journal, atomic.SaveDirectory(tmp_path / "saved") as saved:
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                journal.close()
                saved.__exit__()
            os._exit(0)
        os.waitpid(pid, 0)
        with pytest.raises(CheckpointError, match="another process"), Journal(tmp_path / "journal", "test", "facts"):
            pass
        with pytest.raises(CheckpointError, match="another process"), atomic.SaveDirectory(tmp_path / "saved"):
            pass


def test_files_beside_a_model_leave_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str, data: bytes, folder: int) -> None:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT, dir_fd=folder))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "_write_new", fails)
    with pytest.raises(CheckpointError, match="No space"):
        atomic.put_beside(tmp_path, {"a.json": b"{}"})
    assert os.listdir(tmp_path) == []
