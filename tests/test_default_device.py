"""torch's default device is the user's: what pyquant makes for itself is where its operands are, or on the CPU."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "support" / "default_device.py"
MAKERS = {f.__name__ for f in _device_constructors()}
# vLLM makes the parameters of a model under the device that it loads onto.
FOLLOW_THE_DEFAULT = tuple(f"pyquant/integrations/vllm/{name}.py" for name in ("scheme", "embedding", "experts"))


def without_device(source: str) -> Iterator[int]:
    """The lines of calls torch.<maker>(...) that name no device."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(of := node.func, ast.Attribute) and isinstance(of.value, ast.Name):
            named = {keyword.arg for keyword in node.keywords}
            if of.value.id == "torch" and of.attr in MAKERS and not named & {"device", None}:
                yield node.lineno


@pytest.mark.parametrize("folder", ["pyquant", "bench"])
def test_every_tensor_is_made_on_a_named_device(folder: str) -> None:
    found = [
        f"{name}:{line}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (name := str(path.relative_to(ROOT))) not in FOLLOW_THE_DEFAULT
        for line in without_device(path.read_text())
    ]
    assert not found, f"made where the user's default device is: {', '.join(found)}"


def test_the_rule_sees_what_it_is_for() -> None:
    source = "torch.zeros(3)\ntorch.zeros(3, device=x.device)\ntorch.zeros_like(x)\ntorch.randperm(\n  3, generator=g)"
    assert [*without_device(source)] == [1, 4]


def test_every_way_through_the_library_leaves_the_default_device_alone() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) > 10, done.stdout[-2000:] + done.stderr[-2000:]
    assert not (wrong := [f"{one['name']}: {one['wrong']}" for one in lines if one["wrong"]]), "\n".join(wrong)
    assert done.returncode == 0, done.stderr[-2000:]
