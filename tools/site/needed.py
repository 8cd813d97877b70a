"""Prints the requirements of the extra `docs` of pyproject.toml, one a line: the one place where they are pinned."""

from __future__ import annotations

from pathlib import Path

import tomllib

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"

if __name__ == "__main__":
    extras = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    print("\n".join(extras["docs"]))
