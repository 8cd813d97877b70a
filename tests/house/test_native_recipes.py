"""CONTRIBUTING's recipes for csrc, done: a copy gets a dummy activation and a dummy instruction set, which are called.

The CPU engine of the copy is compiled, and its Python package runs without compiled libraries; nothing but the files
that the recipes name is touched.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from house.test_recipes import ROOT, stated

from csrc import cpu_engine as engine

pytestmark = pytest.mark.skipif(engine.compiler() is None, reason="no C++ compiler")

CPU_LISTS = r"(#define PYQUANT_CPU_ISAS\(X\)(?:.*\\\n)+.*)\n"  # of each processor
STRUCT = """struct softsign {
  static constexpr bool kHasVectors = false;
  PYQ_HD_MEMBER float of(float t, float, float) { return fdiv(t, fadd(1.f, magnitude(t))); }
};

"""
ENTRY = """    "softsign": Activation(
        lambda t: t / (1 + t.abs()), F.softsign, lambda grad, t: grad / (1 + t.abs()) ** 2, nn.Softsign
    ),
"""


def after(text: str, anchor: str, added: str) -> str:
    assert text.count(anchor) == 1, anchor
    return text.replace(anchor, anchor + added)


# Recipe -> file -> what becomes of its text.
EDITS: dict[str, dict[str, Callable[[str], str]]] = {
    "activation": {
        "csrc/core/activation_math.h": lambda t: after(
            after(t, " X(silu)", " X(softsign)"), "struct silu {", "@"
        ).replace("struct silu {@", STRUCT.replace("magnitude", "activation_detail::magnitude") + "struct silu {"),
        "pyquant/core/names.py": lambda t: after(t, '"gelu_tanh", "silu"', ', "softsign"'),
        "pyquant/numerics/activation.py": lambda t: after(t, "torch.ops.aten.silu_backward, nn.SiLU),\n", ENTRY),
        "pyquant/nn/fuse_rules.py": lambda t: after(t, 'nn.SiLU: "silu"', ', nn.Softsign: "softsign"'),
    },
    "CPU instruction set": {
        "csrc/cpu/isas.h": lambda t: re.sub(CPU_LISTS, r"\1 \\\n  X(plain, true)\n", t),
    },
}
# As if it were the best: it is chosen when the library is loaded, once its self-test has passed.
PLAIN = """// processors: any
// The portable kernels, counted.
extern "C" __attribute__((visibility("default"))) int plain_calls;
int plain_calls = 0;
"""

USE = """
import sys
import torch
import pyquant
from pyquant.numerics.activation import ACTIVATIONS

assert pyquant.__file__.startswith(sys.argv[1])
t = torch.linspace(-4, 4, 101)
assert torch.equal(ACTIVATIONS["softsign"].formula(t), torch.nn.functional.softsign(t))
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Softsign())
x = torch.linspace(-2, 2, 24).view(3, 8)
want = model(x)
pyquant.quantize_(model, "W8A8Dynamic")
pyquant.fuse_(model)
assert model[0].activation == "softsign", model
assert (model(x) - want).abs().max() < 0.02
assert model[0].activation in str(model)
print("used")
"""


def text_of_plain(text: str) -> str:
    head = text.index("#include")
    body = text[head:].replace("Isa::scalar", "Isa::plain").replace("kernels_scalar", "kernels_plain")
    anchor = "             const Ahead&) {\n"
    return PLAIN + after(body, anchor, "  ++plain_calls;\n")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of csrc and pyquant in which both recipes are followed."""
    folder = tmp_path_factory.mktemp("native_tree")
    for name in ("csrc", "pyquant"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("lib", "*.so", "__pycache__"))
    for name, edit in (pair for edits in EDITS.values() for pair in edits.items()):
        before = (folder / name).read_text()
        (folder / name).write_text(edit(before))
        assert (folder / name).read_text() != before, name
    (folder / "csrc/cpu/isa_plain.cpp").write_text(text_of_plain((folder / "csrc/cpu/isa_scalar.cpp").read_text()))
    return folder


@pytest.mark.parametrize("recipe", EDITS)
def test_a_recipe_takes_the_files_that_it_names(recipe: str) -> None:
    count, text = stated(recipe)
    assert len(EDITS[recipe]) == count
    assert [name for name in EDITS[recipe] if f"`{name}`" not in text] == []


def test_the_python_of_a_new_activation_is_used(tree: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYQUANT_DISABLE_NATIVE": "1"}
    command = [sys.executable, "-c", USE, str(tree)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "used"


@pytest.mark.nightly  # compiles the CPU engine: a minute or two
def test_a_new_activation_and_a_new_instruction_set_compute(tree: Path, tmp_path: Path) -> None:
    harness = ROOT / "tests/csrc/cpu_harness.cpp"
    objects = engine.objects(tmp_path, harness, include=tree / "csrc")
    library = engine.load(engine.link(tmp_path / "libcpu_engine.so", objects, "-shared"))
    calls = ctypes.c_int.in_dll(library, "plain_calls")
    plain = library.t_isa()
    assert plain == len(engine.ISAS)  # behind all others, and chosen: its self-test has passed
    report = ctypes.create_string_buffer(1 << 12)
    library.t_report(report, len(report))
    assert b"plain" in report.value

    rng = np.random.default_rng(7)
    m, n, k = 5, 67, 130
    x, w = rng.integers(-128, 128, (m, k)), rng.integers(-128, 128, (n, k))
    x8, w8 = x.astype(np.int8), w.astype(np.int8)
    scale = rng.uniform(1e-5, 1e-3, n).astype(np.float32)
    softsign = 6  # the last of the list
    t = (x @ w.T).astype(np.float32) * scale
    want = t / (np.float32(1) + np.abs(t))
    for isa in range(plain, -1, -1):
        if not library.t_use_isa(isa):
            continue
        before = calls.value
        out = np.zeros((m, n), np.float32)
        sizes = np.array(
            [m, n, k, engine.S8, engine.S8, engine.F32, k, k, n, n, 0, 0, 0, engine.F32, softsign, -127, 127]
        )
        pointers = (ctypes.c_void_p * 11)(x8.ctypes.data, w8.ctypes.data, None, None, scale.ctypes.data)
        pointers[8] = out.ctypes.data
        library.t_gemm(engine.at(sizes), pointers, ctypes.c_float(0), ctypes.c_float(0))
        assert np.array_equal(out.view(np.uint32), want.view(np.uint32)), isa
        assert (calls.value > before) == (isa == plain)
