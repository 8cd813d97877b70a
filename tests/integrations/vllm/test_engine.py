"""vllm.LLM with a small Llama on a CPU: the tokens of the quantised model in transformers, the bits of its layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from docs.fences import fences

pytestmark = pytest.mark.nightly
pytest.importorskip("vllm", reason="vLLM is in an environment of its own: make nightly-vllm")

ENGINE = Path(__file__).with_name("engine.py")


def started(case: str, folder: Path, **variables: str) -> tuple[dict[str, Any], str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("VLLM_PLUGINS", "PYQUANT_VLLM")} | variables
    ran = subprocess.run(
        [sys.executable, str(ENGINE), case, str(folder)], env=environment, capture_output=True, text=True, timeout=600
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"tokens"')]
    assert ran.returncode == 0, f"{ran.stdout[-1000:]}\n{ran.stderr[-4000:]}"
    return json.loads(lines[0]), ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("case", "layers"),
    [
        ("own reader", 14),
        ("compiled", 14),
        ("static", 14),
        ("4 bits", 14),
        ("affine weights, head, biases", 15),
        ("embeddings", 15),
    ],
)
def test_an_engine_gives_the_tokens_of_transformers(case: str, layers: int, tmp_path: Path) -> None:
    found, log = started(case, tmp_path, **({"PYQUANT_VLLM": "prefer"} if case == "own reader" else {}))
    assert found["tokens"]
    assert found["difference"] < 1e-4  # of float32 log-probabilities; other kernels of attention and norms
    assert found["equal"] == found["layers"] == layers, "a layer that pyquant does not run, or with other bits"
    assert log.count("pyquant: ") >= 1


def test_in_bfloat16_the_layers_have_the_same_bits(tmp_path: Path) -> None:
    """The tokens need not be the same: vLLM's norms and attention round otherwise."""
    found, _ = started("bfloat16", tmp_path)
    assert found["equal"] == found["layers"] == 14


def test_without_the_variable_vllms_own_kernel_stays(tmp_path: Path) -> None:
    found, log = started("own reader", tmp_path)
    assert found["equal"] == 0
    assert "Selected CPUInt8ScaledMMLinearKernel" in log


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks want two cores")
def test_two_ranks_in_processes_of_their_own(tmp_path: Path) -> None:
    """Weight-only, as each rank finds the range of its own inputs otherwise."""
    found, log = started("two ranks", tmp_path)
    assert found["tokens"]
    assert found["difference"] < 1e-4
    assert {word for word in ("Worker_TP0", "Worker_TP1") if f"{word} " in log} == {"Worker_TP0", "Worker_TP1"}


def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "vllm.md"
    blocks = [block.text for block in fences(page) if block.language == "python"]
    assert len(blocks) == 2
    script = tmp_path / "page.py"
    script.write_text("".join(blocks))
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    ran = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert len(json.loads(ran.stdout.splitlines()[-1])) == 8
