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


# case -> layers of the checkpoint, and what a pass through the model runs: q, k, v in one product, gate and up in one
PASSES: dict[str, tuple[int, dict[str, int]]] = {
    "own reader": (14, {"integers": 8, "floating point": 1}),
    "compiled": (14, {"integers": 8, "floating point": 1}),
    "static": (14, {"integers": 8, "floating point": 1}),
    "4 bits": (14, {"integers": 8, "floating point": 1}),
    "affine weights, head, biases": (15, {"weight-only": 9}),
    "embeddings": (15, {"integers": 8, "rows of codes": 1, "floating point": 1}),
    "experts": (24, {"integers": 8, "floating point": 3}),  # two routers, the head; two products a bank
    "4-bit experts": (24, {"weight-only": 8, "floating point": 3}),
    "float experts": (8, {"integers": 4, "floating point": 5}),  # two routers, two banks of experts, the head
}
PLANTED = "model.layers.1.mlp.gate_up_proj"


def products_of(report: list[dict[str, Any]]) -> dict[str, int]:
    """What a pass must run by the report; rows of a floating-point embedding are no product."""
    found: dict[str, int] = {}
    for layer in report:
        if layer["kind"] != "VocabParallelEmbedding" or layer["products"]:
            found[layer["runs"]] = found.get(layer["runs"], 0) + (layer["products"] or 1)
    return found


def must_run(found: dict[str, Any], passes: dict[str, int]) -> None:
    assert found["ran"] == passes, "torch's profiler saw other products"
    assert products_of(found["report"]) == passes, "the report says otherwise than torch's profiler"
    assert all(bool(layer["reason"]) == (not layer["products"]) for layer in found["report"])


@pytest.mark.parametrize("case", PASSES)
def test_an_engine_gives_the_tokens_of_transformers(case: str, tmp_path: Path) -> None:
    found, log = started(case, tmp_path, **({"PYQUANT_VLLM": "prefer"} if case == "own reader" else {}))
    layers, passes = PASSES[case]
    assert found["tokens"]
    assert found["difference"] < 1e-4  # of float32 log-probabilities; other kernels of attention and norms
    assert found["equal"] == found["layers"] == layers, "a layer that pyquant does not run, or with other bits"
    must_run(found, passes)
    assert log.count("pyquant: ") >= 1
    assert log.count(" layers, of which run ") == (case != "own reader")
    if "planted" in found:  # the counts see a layer that went into floating point in silence
        with pytest.raises(AssertionError, match="torch's profiler saw other products"):
            must_run(found["planted"], passes)
        (record,) = [layer for layer in found["planted"]["report"] if layer["name"] == PLANTED]
        assert record["runs"] == "floating point"
        assert record["reason"].startswith("it is quantised in the checkpoint")


def test_in_bfloat16_the_layers_have_the_same_bits(tmp_path: Path) -> None:
    """The tokens need not be the same: vLLM's norms and attention round otherwise."""
    found, _ = started("bfloat16", tmp_path)
    assert found["equal"] == found["layers"] == 14
    must_run(found, {"integers": 8, "floating point": 1})


def test_without_the_variable_vllms_own_kernel_stays(tmp_path: Path) -> None:
    found, log = started("own reader", tmp_path)
    assert found["equal"] == 0
    must_run(found, {"vLLM's kernel": 8, "floating point": 1})
    (reason,) = {layer["reason"] for layer in found["report"] if layer["runs"] == "vLLM's kernel"}
    assert "PYQUANT_VLLM=prefer" in reason
    assert "Selected CPUInt8ScaledMMLinearKernel" in log


TWO_RANKS = {
    "two ranks": ("10 layers, of which run 8 weight-only, 2 in", {"weight-only": 8, "floating point": 1}),
    "experts, two ranks": ("7 layers, of which run 6 weight-only, 1 in", {"weight-only": 8, "floating point": 3}),
    "experts, expert parallel": ("7 layers, of which run 6 weight-only, 1 in", {"weight-only": 8, "floating point": 3}),
}


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks want two cores")
@pytest.mark.parametrize("case", TWO_RANKS)
def test_two_ranks_in_processes_of_their_own(case: str, tmp_path: Path) -> None:
    """Weight-only, as each rank finds the range of its own inputs otherwise."""
    found, log = started(case, tmp_path)
    told, passes = TWO_RANKS[case]
    assert found["tokens"]
    assert found["difference"] < 1e-4
    is_by_expert = case.endswith("expert parallel")
    assert log.count("Expert parallelism is enabled") == is_by_expert  # said by the first rank
    workers = ["Worker_TP0_EP0", "Worker_TP1_EP1"] if is_by_expert else ["Worker_TP0", "Worker_TP1"]
    assert all(f"({worker} pid=" in log for worker in workers)
    assert [products_of(report) for report in found["reports"]] == 2 * [passes]
    assert log.count(f"pyquant: {told} floating point") == 2


def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    """As files that its reader runs one after the other, with vLLM's processes as vLLM starts them."""
    page = Path(__file__).resolve().parents[3] / "docs" / "vllm.md"
    blocks = [block.text for block in fences(page) if block.language == "python"]
    assert len(blocks) == 2
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "PYQUANT_VLLM"))}
    for i, block in enumerate(blocks):
        (tmp_path / f"{i}.py").write_text(block)
        ran = subprocess.run(
            [sys.executable, f"{i}.py"],
            cwd=tmp_path,
            env=environment | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
    lines = [line for line in ran.stdout.splitlines() if not line.startswith("(")]  # vLLM's log begins so
    tokens, *layers = lines[-11:]
    assert len(json.loads(tokens)) == 8
    assert sum(" integers W4A8Dynamic(group_size=32)" in layer for layer in layers) == 8
    assert [layer.split()[0] for layer in layers if "floating point" in layer] == ["model.embed_tokens", "lm_head"]
    told = "pyquant: 10 layers, of which run 8 in integers, 2 in floating point"
    assert told in ran.stdout + ran.stderr
    assert told in page.read_text()
