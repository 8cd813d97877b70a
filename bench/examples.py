"""Runs the example scripts and puts what they print into docs/examples.md: `python -m bench.examples [name ...]`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.markers import put
from pyquant.measure.environment import describe_environment

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("digits_mlp", "byte_transformer", "sentence_embeddings", "vision_transformer", "recommender", "llm")


def run(name: str, *arguments: str) -> str:
    """What a script prints. Raises RuntimeError where it fails."""
    program = [sys.executable, "-W", "ignore", str(ROOT / "examples" / f"{name}.py"), *arguments]
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(program, capture_output=True, text=True, check=False, env=environment)
    if result.returncode != 0:
        raise RuntimeError(f"{name} failed:\n{result.stderr}")
    return result.stdout


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    document = ROOT / "docs" / "examples.md"
    for name in names or NAMES:
        text = run(name, *(["--quick"] if name == "llm" else []))  # which has no model of its own
        print(text)
        put(document, name, f"```\n{text.strip()}\n```")
    environment = describe_environment("cpu")
    put(
        document,
        "environment",
        f"torch {environment.torch}, Python {environment.python}, {environment.cpu}, one thread.",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
