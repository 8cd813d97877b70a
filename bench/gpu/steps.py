"""The parts of a run on a GPU machine, the most valuable ones first, and the same parts in small for a dry run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from bench.gpu.resume import UNFINISHED_TESTS

UNFINISHED: Final = 3  # exit code of a step, and of this command, that goes on when it is started again
_ALONE: Final = "gpu/test_reliability.py"  # reads the device's free memory: beside nothing else
_SMALL: Final = ("--clock", "faked", "--rounds", "1")
_LAYERS: Final = (*_SMALL, "--m", "1", "16", "--candidates", "QLinear", "chain", "--kn")


@dataclass(frozen=True)
class Step:
    """One part of the run.

    command     words behind the interpreter; `folder`: where it runs, below the repository.
    budgeted    takes --time-budget and answers `unfinished` when it ends.
    unfinished  its exit code for that: of pytest another one, whose 3 is an error of its own.
    least       seconds without which it is not begun.
    """

    name: str
    command: tuple[str, ...]
    folder: str = "."
    budgeted: bool = True
    unfinished: int = UNFINISHED
    least: float = 60.0
    environment: dict[str, str] = field(default_factory=dict)


def steps(out: Path, *, prebuilt: bool = False, cases: int = 10, workers: int = 0) -> list[Step]:
    """What a run does. cases: launches of a kernel, output type and mode; workers: processes of tests, 0 for one.

    Example:
        >>> [step.name for step in steps(Path("x"))][:3]
        ['ready', 'tests', 'reliability']
    """
    spread = ("-n", str(workers)) if workers else ()
    gemm = ("-m", "bench.gemm", "--out", str(out))
    return [
        Step("ready", ("tools/gpu_ready.py", *(["--prebuilt"] if prebuilt else [])), budgeted=False, least=30.0),
        _tests("tests", out, ("gpu", f"--ignore={_ALONE}", *spread), {"PYQUANT_CASES": str(cases)}),
        _tests("reliability", out, (_ALONE,)),
        Step("first", (*gemm, "--models", "llama-3-8b", "--m", "1", "16", "256", "4096")),
        Step("rows", ("-m", "bench.rows", "--out", str(out))),
        Step("decoder", ("-m", "bench.decoder", "--out", str(out), "--allow-missing"), budgeted=False, least=120.0),
        Step("epilogue", ("-m", "bench.epilogue", "--out", str(out)), budgeted=False),
        Step("conv", ("-m", "bench.gpu_conv", "--out", str(out)), budgeted=False),
        Step("experts", ("-m", "bench.gpu_experts", "--out", str(out)), budgeted=False),
        Step("sanitize", ("tools/sanitize.py", "--out", str(out / "sanitize.json"), "--allow-missing"), least=30.0),
        Step("grid", gemm),
        Step("qat", ("-m", "bench.qat_gpu", "--out", str(out))),
        Step("mlp", ("-m", "bench.mlp", "--out", str(out)), budgeted=False),
    ]


def _tests(name: str, out: Path, words: tuple[str, ...], environment: dict[str, str] | None = None) -> Step:
    """Tests, one by one done or not done: --done keeps their outcomes."""
    done = ("-p", "bench.gpu.resume", "--done", str(out / f"gpu-{name}.jsonl"))
    pytest = ("-m", "pytest", "-c", "../pyproject.toml", "--rootdir", "..", "-q", "-p", "no:cacheprovider", "-m", "gpu")
    return Step(
        name,
        (*pytest, *done, "--maxfail=40", *words),
        "tests",
        unfinished=UNFINISHED_TESTS,
        least=120.0,
        # processes share the cores: each with threads for all of them takes several times as long
        environment={"OMP_NUM_THREADS": "1", **(environment or {})},
    )


def dry_steps(out: Path) -> list[Step]:
    """The same commands without a GPU, in seconds: kernels on the simulator, times that are faked and say so.

    What reads only a GPU's own state is collected or listed, not run.
    """
    small: dict[str, tuple[str, ...]] = {
        "ready": ("--simulator",),
        "tests": ("-k", "test_row_equals_the_specification and gemm_simt_ and plain"),
        "reliability": ("--collect-only",),
        "first": (*_LAYERS, "256x128"),
        "rows": ("--clock", "faked", "--kn", "256x128", "--m", "1", "16"),
        "decoder": (*_SMALL, "--layers", "1", "--tokens", "1", "3"),
        "epilogue": (*_SMALL, "--m", "3", "--kn", "256x128"),
        "conv": (*_SMALL, "--model", "ResNet-50", "--layer", "@7", "--batch", "1", "2"),
        "experts": (*_SMALL, "--model", "small", "--tokens", "1", "5"),
        "sanitize": ("--list",),
        "grid": (*_LAYERS, "256x128", "128x256"),
        "qat": _SMALL,
        "mlp": ("--clock", "faked", "--scale", "1", "--nn-size", "64,32,64", "--batch-size", "4", "--runs", "2"),
    }
    whole = steps(out, cases=1)
    return [replace(step, command=(*step.command, *small[step.name]), least=min(step.least, 5.0)) for step in whole]
