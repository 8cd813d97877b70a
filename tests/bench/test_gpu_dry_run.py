"""The whole path of a run on a GPU machine without a GPU: every step in small, killed on the way; and its faked times,
which no reader takes for measurements."""

from __future__ import annotations

import functools
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import simulator
import torch
from children import fork, wait

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.gpu import __main__ as gpu  # noqa: E402
from bench.gpu.steps import Step, steps  # noqa: E402
from pyquant.bench.partial import merge  # noqa: E402
from pyquant.cli.main import main as pyquant  # noqa: E402
from pyquant.errors import CheckpointError  # noqa: E402
from pyquant.measure.environment import describe_environment  # noqa: E402
from pyquant.measure.timing import FakedClock  # noqa: E402
from pyquant.report.records.bench import GemmReport  # noqa: E402
from pyquant.report.records.record import load_record, save_record  # noqa: E402

NAMES = [step.name for step in steps(Path())]
ON_SIMULATOR = NAMES[:2]  # ready, tests
OF_TRANSFORMERS = ("decoder.json",) if importlib.util.find_spec("transformers") else ()
WRITTEN = (
    "gemm.json",
    "rows.json",
    *OF_TRANSFORMERS,
    "epilogue.json",
    "gpu_conv.json",
    "gpu_experts.json",
    "qat_step.json",
    "mlp.json",
    "mlp_end_to_end.json",
)


# In processes of their own, by the command of a run; the others in forks of this one, which has loaded torch already.
APART = ("ready", "tests", "reliability", "rows")


def chosen(*names: str) -> list[str]:
    """Options of a dry run of these steps, as far as they run here."""
    return ["--dry-run", "--only", *(n for n in names if simulator.runtime is not None or n not in ON_SIMULATOR)]


def in_a_fork(step: Step, out: Path, seconds: float | None) -> int:
    """run_step without an interpreter that starts."""

    def work() -> None:
        words = [word for word in step.command if word != "-m"]
        os.chdir(ROOT / step.folder)
        os.environ.update(step.environment)
        with (out / f"gpu-{step.name}.txt").open("a") as kept:
            os.dup2(kept.fileno(), 1)
            os.dup2(kept.fileno(), 2)
            sys.stdout, sys.stderr, sys.argv = kept, kept, words
            start = runpy.run_module if "-m" in step.command else runpy.run_path
            try:
                start(words[0], run_name="__main__")
            except SystemExit as ended:
                kept.flush()
                os._exit(ended.code if isinstance(ended.code, int) else ended.code is not None)
            except BaseException:
                traceback.print_exc(file=kept)
                raise

    return wait(fork(work))


def test_every_step_runs_and_goes_on_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels on the simulator where the libraries hold them; the rest everywhere."""
    state, environment = tmp_path / "gpu.jsonl", {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "bench.gpu", "--out", str(tmp_path), *chosen(*APART)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as first:
        limit = time.monotonic() + 300
        while time.monotonic() < limit and first.poll() is None:
            if state.exists() and state.read_bytes().count(b"\n") >= 2:  # a step ended: the next one has begun
                first.send_signal(signal.SIGKILL)
                break
            time.sleep(0.05)
    assert first.returncode == -signal.SIGKILL
    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert "done" in again.stdout.splitlines()[0] or "ended" in again.stdout.splitlines()[0]
    monkeypatch.setattr(gpu, "run", functools.partial(gpu.run, runner=in_a_fork))
    code = gpu.main(["--out", str(tmp_path), *chosen(*NAMES)])
    told = "\n".join((tmp_path / f"gpu-{name}.txt").read_text()[-1000:] for name in NAMES if name not in APART)
    assert code == 0, told
    for name in WRITTEN:
        with pytest.raises(CheckpointError, match="faked"):
            load_record(tmp_path / name)
        load_record(tmp_path / name, faked=True)
    if simulator.runtime is not None:
        assert "as on the CPU" in (tmp_path / "gpu-ready.txt").read_text()
        assert " passed" in (tmp_path / "gpu-tests.txt").read_text()
    left = [path.name for path in tmp_path.iterdir() if ".tmp" in path.name or path.name.endswith(".new")]
    assert left == []


def test_faked_times_are_refused_by_every_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = describe_environment("cpu", clock=FakedClock.name)
    path = save_record(tmp_path / "gemm.json", GemmReport(environment, "torch.mm bf16", []))
    with pytest.raises(CheckpointError, match="faked"):
        load_record(path, GemmReport)
    with pytest.raises(CheckpointError, match="faked"):
        merge([path])
    assert pyquant(["report", str(path), "--out", str(tmp_path)]) != 0
    assert "faked" in capsys.readouterr().err
    assert "clock: faked" in environment.line()


def test_no_time_is_taken() -> None:
    ran: list[int] = []
    assert FakedClock().seconds(lambda: ran.append(1), 1000) == pytest.approx(1e-3)
    assert len(ran) == 1
    assert not torch.cuda.is_initialized()
