"""CONTRIBUTING's recipes, done: each adds its files to a copy of the package, and a new process uses what was added.

A recipe says how many files it takes, and the copy gets no more than that. Those in C++ are read here: the files whose
code names a built-in one are those that the recipe names. test_native_recipes.py compiles them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path
from token import NAME, STRING

import pytest

ROOT = Path(__file__).resolve().parents[2]
START = "pyquant/cli/start.py"

CALIBRATOR = '''
"""'half': half of the largest magnitude."""
from pyquant.calibrate.registry import Range, calibrator

@calibrator("half")
def half(statistics, scheme):
    return Range.symmetric(statistics.amax() / 2)
'''
SCORER = '''
"""'numel': how many weights a group has."""
from pyquant.mixed_precision.loss.scorers.scorer import Scorer, Work, sensitivity_metric

@sensitivity_metric("numel")
class Numel(Scorer):
    unit = "weights"

    def work(self):
        return [Work("all")]

    def measure(self, work):
        return [1.0]

    def table(self, rows):
        return [[0.0] + [float(n)] * (len(self.scoring.switchable.formats) - 1) for n in self.scoring.switchable.numel]
'''
ALGORITHM = '''
"""'lowest': the lowest format everywhere, and nothing else."""
from pyquant.mixed_precision.solve.solver import search_algorithm

@search_algorithm("lowest")
def lowest(search):
    search.measure([search.problem.uniform(len(search.problem.formats) - 1)])
'''
COMMAND = '''
"""`pyquant hello`: says so."""

def add_arguments(parser):
    parser.add_argument("--to", default="you")

def run(args):
    print(f"hello {args.to}")
    return 0
'''
# Recipe -> the files that it adds, and the line that it adds to a file there is.
ADDED = {
    "calibration method": ({"pyquant/calibrate/methods/half.py": CALIBRATOR}, ""),
    "sensitivity metric": ({"pyquant/mixed_precision/loss/scorers/numel.py": SCORER}, ""),
    "search algorithm": ({"pyquant/mixed_precision/solve/methods/lowest.py": ALGORITHM}, ""),
    "command": ({"pyquant/cli/hello.py": COMMAND}, START),
}
USE = '''
import sys
from pathlib import Path
import pyquant
from pyquant.cli.main import main
from pyquant.recipe import Recipe

Path("recipe.json").write_text("""{
    "calib_params": {"histogram_calib_method": "half", "num_calib_batches": 1}, "default": "W8A8",
    "layers": {"0": {"scheme": "W8A8", "inputs": {"calibrator": "half"}, "weights": {"calibrator": "half"}}},
    "search": {"formats": ["float", "int8"], "sensitivity": "numel", "algorithm": "lowest"}}""")
recipe = Recipe.load("recipe.json")
Path("mine.py").write_text("""
import torch
def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 4))
def batches():
    return [torch.linspace(-4, 4, 16).view(2, 8)]
""")
import mine

model = pyquant.quantize_recipe_(mine.build(), recipe, mine.batches())
assert abs(model[0].input_scale.item() - 2 / 127) < 1e-6, model[0].input_scale
assert pyquant.sensitivity(mine.build(), mine.batches(), ("float", "int8"), "numel").unit == "weights"
options = dict(sensitivity="numel", algorithm="lowest", max_loss=9.0)
assert pyquant.search(mine.build(), None, mine.batches(), ("float", "int8"), None, None, "size", **options)

words = ["mine:build", "--data", "mine:batches"]
assert main(["hello", "--to", "them"]) == 0
assert main(["calibrate", *words, "--recipe", "recipe.json"]) == 0
assert main(["sensitivity", *words, "--formats", "float", "int8", "--metric", "numel"]) == 0
more = ["--objective", "size", "--max-loss", "9", "--out", "plan.json", "--calibration", "ranges.json"]
assert main(["search", *words, *more, "--recipe", "recipe.json"]) == 0
assert main(["search", *words, *more, "--sensitivity", "numel", "--algorithm", "lowest"]) == 0
assert pyquant.__file__.startswith(sys.argv[1])
print("all used")
'''


def stated(recipe: str) -> tuple[int, str]:
    """The number of files in the title of a recipe of CONTRIBUTING.md, and its text."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (found,) = re.findall(rf"\*\*A new {recipe} \((\d+) files?(?: and a line)?\)\.\*\*(.*?)\n\n", text, flags=re.S)
    return int(found[0]), found[1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, compiled libraries by reference, with the files of every recipe."""
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "pyquant", folder / "pyquant", ignore=shutil.ignore_patterns("lib", "*.so"))
    for built in [ROOT / "pyquant/lib", *(ROOT / "pyquant").glob("*.so")]:
        if built.exists():
            (folder / "pyquant" / built.name).symlink_to(built)
    for files, edited in ADDED.values():
        for name, text in files.items():
            assert not (folder / name).exists()
            (folder / name).write_text(text)
        if edited:
            head = "COMMANDS: Final = {\n"
            text = (folder / edited).read_text()
            assert head in text
            (folder / edited).write_text(text.replace(head, f'{head}    "hello": "greet",\n'))
    return folder


def use(tree: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", USE, str(tree)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_what_the_recipes_add_is_used(tree: Path, tmp_path: Path) -> None:
    done = use(tree, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "all used"
    assert "hello them" in done.stdout


@pytest.mark.parametrize("recipe", ADDED)
def test_a_recipe_takes_as_many_files_as_it_says(recipe: str) -> None:
    files, edited = ADDED[recipe]
    count, text = stated(recipe)
    assert len(files) + bool(edited) == count
    for name in [*(str(Path(name).parent) for name in files), *([edited] if edited else [])]:
        assert f"`{name}" in text


def test_a_list_that_stands_a_second_time_is_found(tree: Path, tmp_path: Path) -> None:
    sections = tree / "pyquant/recipe/sections.py"
    text = sections.read_text()
    sections.write_text(text.replace("choice(SEARCH_ALGORITHMS.names)", 'choice("dp", "greedy")'))
    try:
        done = use(tree, tmp_path)
    finally:
        sections.write_text(text)
    assert done.returncode == 1
    assert "lowest" in done.stderr


def naming(word: str, *folders: str) -> set[str]:
    """The files whose code has the word as a name or as a whole text; comments and docstrings do not count."""
    found = set()
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*"))):
        if path.suffix not in (".py", ".h", ".cpp", ".cu", ".cuh", ".cmake") or word not in path.read_text():
            continue
        if path.suffix == ".py":
            with path.open("rb") as file:
                tokens = {t.string.strip("\"'") for t in tokenize.tokenize(file.readline) if t.type in (NAME, STRING)}
            names = word in tokens
        else:
            names = re.search(rf"\b{word}\b", re.sub(r"//.*|#.*(?=\n)", _directives, path.read_text())) is not None
        if names:
            found.add(str(path.relative_to(ROOT)))
    return found


def _directives(match: re.Match[str]) -> str:
    """Of a comment of C++ or CMake nothing, of a line of the preprocessor everything."""
    return match[0] if re.match(r"#\s*(include|define|if|elif|undef)", match[0]) else ""


def test_a_cpu_instruction_set_is_its_file_and_a_line() -> None:
    count, text = stated("CPU instruction set")
    assert count == 1
    assert "`csrc/cpu/isa_<name>.cpp`" in text
    assert "`csrc/cpu/isas.h`" in text
    isas = re.findall(r"^  X\((\w+), ", (ROOT / "csrc/cpu/isas.h").read_text(), flags=re.M)
    for isa in set(isas) - {"scalar"}:
        assert naming(isa, "csrc", "cmake") <= {"csrc/cpu/isas.h", f"csrc/cpu/isa_{isa}.cpp"}


def test_an_activation_is_named_in_the_files_of_its_recipe_alone() -> None:
    count, text = stated("activation")
    files = naming("gelu_tanh", "csrc", "pyquant", "cmake")  # a name that nothing but an activation has
    assert len(files) == count <= 5
    assert [name for name in files if f"`{name}`" not in text] == []


def test_only_code_names_a_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/quiet.py").write_text('"""Of \'curve\'."""\nx = 1  # curve\n')
    (tmp_path / "a/quiet.h").write_text("int x;  // curve\n")
    (tmp_path / "a/table.py").write_text('NAMES = ("curve",)\n')
    (tmp_path / "a/case.cuh").write_text("#define LIST(X) X(curve)\n")
    assert naming("curve", "a") == {"a/table.py", "a/case.cuh"}
