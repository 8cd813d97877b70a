"""No run of more than twelve lines of code stands twice, in csrc, pyquant or the simulator, without a
comment above that says why."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = 12  # lines that may stand twice
SUFFIXES = {".py", ".h", ".cpp", ".cu", ".cuh"}
# What is no code of its own: comments, brackets, what a file brings in; in Python the parameters and arguments that the
# formatter writes one a line (an op, its shape rule and its reference have one signature).
THIN = re.compile(
    r"(//.*|#(?!define).*|import .*|from .* import .*|using .*|[\W_]*|return \w*;|\w+(: [^=]+( = .+)?)?,)$"
)

Line = tuple[Path, int, str]


def code(path: Path) -> list[Line]:
    """The lines of code of a file with their numbers, spaces folded."""
    folded = (" ".join(text.split()) for text in path.read_text().splitlines())
    return [(path, i, text) for i, text in enumerate(folded) if not THIN.match(text)]


def is_explained(path: Path, line: int) -> bool:
    """Whether a comment stands above the line, at most a line in between: the head of its block."""
    above = path.read_text().splitlines()[max(0, line - 2) : line]
    return any(text.strip().startswith(("//", "# ")) for text in above)


def repeats(paths: list[Path]) -> list[str]:
    places = defaultdict(list)
    for path in paths:
        lines = code(path)
        for i in range(len(lines) - MOST):
            places[tuple(text for *_, text in lines[i : i + MOST + 1])].append(lines[i])
    found = []
    for where in places.values():
        if len(where) > 1 and not any(is_explained(path, line) for path, line, _ in where):
            found.append(" = ".join(f"{path}:{line + 1}" for path, line, _ in where))
    return found


def test_nothing_long_stands_twice() -> None:
    folders = [ROOT / name for name in ("csrc", "pyquant", "tools/ptxsim/src")]
    paths = [p for folder in folders for p in sorted(folder.rglob("*")) if p.suffix in SUFFIXES]
    assert len(paths) > 300
    assert repeats(paths) == []


def test_a_run_that_stands_twice_is_found(tmp_path: Path) -> None:
    run = "\n".join(f"  total_{i} += weight[{i}];" for i in range(MOST + 1))
    one, two = tmp_path / "one.cpp", tmp_path / "two.cpp"
    one.write_text(f"void f() {{\n{run}\n}}\n")
    two.write_text("int x;\n" * 9 + f"void g() {{\n\n{run}\n}}\n")
    assert repeats([one, two]) == [f"{one}:2 = {two}:12"]
    two.write_text("int x;\n" * 9 + f"// Written out: the compiler unrolls no table.\nvoid g() {{\n{run}\n}}\n")
    assert repeats([one, two]) == []
    two.write_text("\n".join(run.splitlines()[:MOST]))
    assert repeats([one, two]) == []
