"""torch.ops.pyquant is one table: what the compiled library defines by itself is what Python would define."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pyquant import ops
from pyquant.ops.load import LIBRARY
from pyquant.ops.schema import NATIVE, ROUTED, SCHEMAS, TAGS

PACKAGE = LIBRARY.parents[1]

native = pytest.mark.skipif(not ops.native_available(), reason=f"compiled library not in use: {ops.why_not_native()}")

LISTED = """
import json, torch
names = sorted(n for n in torch._C._dispatch_get_all_op_names() if n.startswith("pyquant::"))
ops = {n.split("::")[1]: getattr(torch.ops.pyquant, n.split("::")[1]).default for n in names}
print(json.dumps({n: [str(op._schema), sorted(str(tag) for tag in op.tags)] for n, op in ops.items()}))
"""
USED = f"""
import torch
o, spec = torch.ops.pyquant, {list(ops.LinearSpec(3, 4, layout="cpu_blocked").to_ints())}
packed = o.pack_linear(torch.tensor([[1, -2, 3, 4]] * 3, dtype=torch.int8), torch.ones(3), *[None] * 5, spec)
print(o.qlinear(torch.tensor([[127.0, 1.0, 0.0, -1.0]]), packed, None, spec).tolist())
"""
ANSWER = "[[121.0, 121.0, 121.0]]"
LOADED = f"import sys, torch; torch.ops.load_library({str(LIBRARY)!r}); assert 'pyquant' not in sys.modules\n"
CALLED = "import pyquant, torch; print(pyquant.ops.quantize(torch.ones(2), torch.ones(1)).tolist())"

# A change of schema.py, and what the error says of a library that was built before it
CHANGES = {
    "default": (
        '{_GIVEN}, int qmin=-127, int qmax=127) -> Tensor"',
        '{_GIVEN}, int qmin=-128, int qmax=127) -> Tensor"',
        "its op pyquant::quantize(Tensor x",
    ),
    "mutation": ("(Tensor(a!) grad, ", "(Tensor grad, ", "its op pyquant::fake_quantize_backward_"),
    "product": (
        "float clamp_max=0.0, int out_qmin=-127",
        "float clamp_max=1.0, int out_qmin=-127",
        "its op pyquant::gemm",
    ),
    "more": ('"_cpu_info": "() -> str",', '"_cpu_info": "() -> str", "_more": "() -> str",', "no kernel for _more"),
}
SMALLER = '    "_cpu_multiply": "(int rows, int quads, int calls) -> int",\n'

# Children of a process that has torch and nothing of pyquant: each is fresh, and none waits for torch.
DRIVER = """
import json, os, sys, tempfile, torch
from pathlib import Path

def child(path, environment, code):
    os.environ.update(environment)
    sys.path.insert(0, path)
    exec(compile(code, "child", "exec"), {})

results = {}
for name, (path, environment, code) in json.loads(Path(sys.argv[1]).read_text()).items():
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
            try:
                torch.set_num_threads(1)
                child(path, environment, code)
                status = 0
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                status = 1
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        results[name] = [status, *((f.seek(0), f.read().decode().strip())[1] for f in (out, err))]
print(json.dumps(results))
"""


def tree(folder: Path, old: str, new: str) -> Path:
    """The package with another schema.py around the library at hand."""
    shutil.copytree(PACKAGE, folder / "pyquant", ignore=shutil.ignore_patterns("lib", "*.so", "__pycache__"))
    (folder / "pyquant/lib").symlink_to(PACKAGE / "lib")
    for module in PACKAGE.glob("*.so"):
        (folder / "pyquant" / module.name).symlink_to(module)
    table = folder / "pyquant/ops/schema.py"
    assert table.read_text().count(old) == 1, old
    table.write_text(table.read_text().replace(old, new))
    return folder


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """{case: [exit status, output, errors]}."""
    folder, here, off = tmp_path_factory.mktemp("definitions"), str(PACKAGE.parent), {"PYQUANT_DISABLE_NATIVE": "1"}
    cases: dict[str, Any] = {
        "python lists": (here, off, "import pyquant\n" + LISTED),
        "both list": (here, {}, "import pyquant\n" + LISTED),
    }
    if ops.native_available():
        (folder / "copy").mkdir()
        for name in ("libpyquant_core.so", LIBRARY.name):
            shutil.copy2(LIBRARY.with_name(name), folder / "copy" / name)
        there = f"import torch; torch.ops.load_library({str(folder / 'copy' / LIBRARY.name)!r})\n"
        late = f"import pyquant, torch; torch.ops.load_library({str(LIBRARY)!r})\n"
        smaller = str(tree(folder / "smaller", SMALLER, ""))
        cases |= {
            "library lists": (here, {}, LOADED + LISTED),
            "library computes": (here, {}, LOADED + USED),
            "copy after": (here, {}, "import pyquant\n" + there + USED),
            "copy before": (here, {}, there + "import pyquant\n" + USED),
            "library late": (here, off, late + USED),
            "smaller table": (smaller, {}, CALLED),
        }
        for name, (old, new, _) in CHANGES.items():
            cases[name] = (str(tree(folder / name, old, new)), {}, CALLED)
        cases["as advised"] = (str(folder / "default"), off, CALLED)
    (folder / "cases.json").write_text(json.dumps(cases))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYQUANT_")}
    kept |= {"PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-c", DRIVER, str(folder / "cases.json")]
    done = subprocess.run(words, env=kept, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {"folder": folder, **json.loads(done.stdout.splitlines()[-1])}


# A library of the stable ABI can give tags from torch 2.12 on; for older ones Python gives them.
OF_LIBRARY = TAGS if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12) else ()


def check_is_the_table(result: list[Any], expected: tuple[str, ...] = TAGS, with_python: bool = True) -> None:
    status, out, err = result
    assert status == 0, err
    found, table = json.loads(out), {**SCHEMAS, **NATIVE}
    assert set(found) == set(table) | set(ROUTED if with_python else ())
    for name, schema in ROUTED.items() if with_python else ():
        said, tags = found.pop(name)
        assert torch._C.parse_schema(said) == torch._C.parse_schema(f"pyquant::{name}{schema}"), name
        assert tags == sorted(f"Tag.{tag}" for tag in (*TAGS, "cudagraph_unsafe")), name
    for name, (schema, tags) in found.items():
        assert torch._C.parse_schema(schema) == torch._C.parse_schema(f"pyquant::{name}{table[name]}"), name
        assert tags == sorted(f"Tag.{tag}" for tag in expected if name in SCHEMAS), name


def test_python_defines_what_no_library_did(said: dict[str, Any]) -> None:
    check_is_the_table(said["python lists"])


def test_python_adds_no_op_to_those_of_the_library(said: dict[str, Any]) -> None:
    check_is_the_table(said["both list"])


@native
def test_the_library_alone_defines_the_table_and_computes(said: dict[str, Any]) -> None:
    check_is_the_table(said["library lists"], OF_LIBRARY, with_python=False)
    assert said["library computes"] == [0, ANSWER, ""]


@native
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_second_copy_of_the_library_changes_nothing(said: dict[str, Any], when: str) -> None:
    assert said[f"copy {when}"] == [0, ANSWER, ""]


@native
def test_a_library_that_comes_late_serves_the_definitions_of_python(said: dict[str, Any]) -> None:
    assert said["library late"][:2] == [0, ANSWER], said["library late"]


@native
@pytest.mark.parametrize("change", CHANGES)
def test_a_library_of_another_version_is_refused_by_name(said: dict[str, Any], change: str) -> None:
    status, _, err = said[change]
    assert status == 1
    last = err.splitlines()[-1]
    library = said["folder"] / change / "pyquant/lib" / LIBRARY.name
    assert last.startswith(f"ImportError: {library} was built from another version of pyquant"), err
    assert CHANGES[change][2] in last
    assert "PYQUANT_DISABLE_NATIVE=1" in last


@native
def test_the_advice_for_it_works(said: dict[str, Any]) -> None:
    assert said["as advised"][:2] == [0, "[1, 1]"], said["as advised"]


@native
def test_a_library_with_more_ops_is_taken(said: dict[str, Any]) -> None:
    assert said["smaller table"] == [0, "[1, 1]", ""]
