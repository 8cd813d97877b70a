"""retarget: exported programs with their weights packed for another device, with the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from qlayers import CODES_OUT, INTEGER, layer
from torch import Tensor, nn

import pyquant
from pyquant import ops
from pyquant.core.qtensor import QTensor
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.integrations.compile import fuse_exported, retarget
from pyquant.nn import weights
from pyquant.nn.chain import Dequantize
from pyquant.ops import LinearSpec, fallback, rows_layout

native = pytest.mark.skipif(not ops.native_available(), reason=f"compiled library not in use: {ops.why_not_native()}")
SCHEMES = [*INTEGER, *CODES_OUT[:3]]
X = torch.linspace(-2, 2, 5 * 32).reshape(5, 32)


def model_of(scheme: pyquant.QScheme) -> nn.Module:
    return nn.Sequential(layer(scheme), *([Dequantize()] if scheme.outputs else [])).eval()


def exported(model: nn.Module, x: Tensor = X) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=64)},))


def specs(program: torch.export.ExportedProgram) -> list[LinearSpec]:
    calls = [n for n in program.graph.nodes if n.target is torch.ops.pyquant.qlinear.default]
    return [LinearSpec.from_ints(n.args[3]) for n in calls]


RUN = """
import sys, torch, pyquant
from pathlib import Path
assert not pyquant.ops.native_available()
folder = Path(sys.argv[1])
x = torch.linspace(-2, 2, 5 * 32).reshape(5, 32)
for path in sorted(folder.glob("*.pt2")):
    (folder / f"{path.stem}.bits").write_bytes(torch.export.load(path).module()(x).numpy().tobytes())
"""


@native
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rows_have_the_bits_and_come_back(scheme: pyquant.QScheme) -> None:
    model = model_of(scheme)
    with torch.no_grad():
        y = model(X)
    program = retarget(exported(model), "cpu", layout="rows")
    (call,) = (n for n in program.graph.nodes if n.target is torch.ops.pyquant.qlinear.default)
    got = fallback.IMPLEMENTATIONS["qlinear"](X, program.constants["0.storage"], None, call.args[3])
    assert torch.equal(got if scheme.outputs is None else model[1](QTensor(got, *outputs(model))), y)
    with pytest.raises(Exception, match="'cpu_blocked' on the CPU"):
        program.module()(X)
    assert torch.equal(retarget(program, "cpu").module()(X), y)


def outputs(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    return model[0].output_scale, model[0].output_zero_point  # type: ignore[index]


@native
@pytest.mark.nightly  # a process more, 6 seconds
def test_rows_run_without_the_library_and_come_back(tmp_path: Path) -> None:
    wanted = []
    for i, scheme in enumerate(SCHEMES):
        model = model_of(scheme)
        with torch.no_grad():
            y = model(X)
        program = retarget(exported(model), "cpu", layout="rows")
        assert [spec.layout for spec in specs(program)] == ["rows"]
        torch.export.save(program, tmp_path / f"{i:02}.pt2")
        assert torch.equal(retarget(program, "cpu").module()(X), y), scheme
        assert [spec.layout for spec in specs(program)] == ["cpu_blocked"]
        wanted.append(y.numpy().tobytes())
    path = {**os.environ, "PYQUANT_DISABLE_NATIVE": "1", "PYTHONPATH": str(Path(pyquant.__file__).parents[1])}
    words = [sys.executable, "-W", "ignore", "-c", RUN, str(tmp_path)]
    done = subprocess.run(words, env=path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / f"{i:02}.bits").read_bytes() for i in range(len(SCHEMES))] == wanted


PACKED = """
import hashlib, torch, pyquant, qlayers
digest = hashlib.sha256()
for scheme in qlayers.INTEGER:
    for n, k in ((24, 32), (130, 96), (7, 48)):
        digest.update(qlayers.layer(scheme, k, n).storage.numpy().tobytes())
in_use = [line for line in torch.ops.pyquant._cpu_info().splitlines() if "in use" in line]
print(in_use[0].split(":")[0], digest.hexdigest())
"""


@native
@pytest.mark.nightly  # a process for each instruction set
def test_every_instruction_set_packs_the_same_bytes() -> None:
    """A program may be exported on one CPU and run on another."""
    names = [line.split(":") for line in torch.ops.pyquant._cpu_info().splitlines()]
    here = [name for name, *rest in names if "not available" not in "".join(rest)]
    assert "scalar" in here
    found = {}
    for name in here:
        folders = [str(Path(pyquant.__file__).parents[1]), str(Path(__file__).resolve().parents[1] / "support")]
        path = {**os.environ, "PYQUANT_CPU_ISA": name, "PYTHONPATH": os.pathsep.join(folders)}
        words = [sys.executable, "-W", "ignore", "-c", PACKED]
        done = subprocess.run(words, env=path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        used, found[name] = done.stdout.split()
        assert used == name
    assert len(set(found.values())) == 1, found


@native
@pytest.mark.parametrize("layout", ["rows", rows_layout.BLOCKED])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_for_a_gpu_the_bytes_are_those_of_a_layer_there(scheme: pyquant.QScheme, layout: str) -> None:
    """What pack_linear gives on CUDA is rows_layout.pack; the program's constant is compared with it."""
    from pyquant.integrations.compile.retarget import _layer

    one, cuda = layer(scheme), torch.device("cuda")
    program = exported(nn.Sequential(one, *([Dequantize()] if scheme.outputs else [])).eval())
    (spec,) = specs(program)
    two_level = scheme.weights.two_level
    if two_level and layout == rows_layout.BLOCKED:
        pytest.skip("steps of 16 codes have no blocks")
    held, wanted = _layer(program, "0.storage", spec, cuda, layout)
    is_packed = two_level or spec.w_type.is_packed
    assert wanted.layout == (layout if is_packed else "rows")
    assert wanted.two_level == two_level
    assert wanted.w_bits == scheme.weights.bits
    words = list(wanted.to_ints())
    w, scale = weights.packed_operands(one._canonical(), one.weight_scale, scheme.weights, 32, words)
    numbers = (one.input_scale, one.input_zero_point, one.output_scale, one.output_zero_point)
    want = rows_layout.pack(wanted, w, scale, one.bias_, *numbers)
    assert torch.equal(held.packed(wanted), want)
    assert int(want.count_nonzero()) > 0


@native
def test_models_of_several_layers_fused_and_convolutions() -> None:
    torch.manual_seed(0)
    linears = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    images = torch.randn(3, 4, 9, 9)
    for model, x in ((linears, X), (nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)), images)):
        quantised = pyquant.quantize_(model.eval(), pyquant.W8A8Dynamic(), check_speed=False)
        program = exported(quantised, x)
        assert fuse_exported(program) == {"activations": 1}
        with torch.no_grad():
            y = pyquant.fuse_(quantised)(x)
        before = {name: value.clone() for name, value in program.constants.items()}
        retarget(program, "cpu", layout="rows")
        assert all(not torch.equal(program.constants[name], before[name]) for name in before)
        retarget(program, "cpu")
        assert all(torch.equal(program.constants[name], before[name]) for name in before)
        assert torch.equal(program.module()(x), y)


@native
@pytest.mark.parametrize(
    ("device", "layout", "argument"),
    [
        ("meta", None, "device"),
        ("nonsense", None, "device"),
        (3.5, None, "device"),
        ("cpu", "rows_blocked128", "layout"),
    ],
)
def test_other_devices_and_layouts_are_refused(device: Any, layout: str | None, argument: str) -> None:
    program = exported(model_of(INTEGER[0]))
    with pytest.raises(ArgumentError) as refused:
        retarget(program, device, layout=layout)
    assert refused.value.argument == argument
    assert [spec.layout for spec in specs(program)] == [ops.layout_for(torch.device("cpu"))]


@native
def test_what_cannot_be_read_is_refused_and_nothing_is_changed() -> None:
    program = exported(nn.Sequential(layer(INTEGER[0]), layer(INTEGER[0], 24, 16)).eval())
    before = {name: value.clone() for name, value in program.constants.items()}
    del program.state_dict["1.weight_scale_"]
    with pytest.raises(UnsupportedError, match="the scales of '1' are not in the program"):
        retarget(program, "cpu", layout="rows")
    assert all(torch.equal(program.constants[name], value) for name, value in before.items())
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="torch finds no GPU here"):
            retarget(program, "cuda")
    with pytest.raises(ArgumentError, match="argument 'program'"):
        retarget(nn.Linear(2, 2), "cpu")  # type: ignore[arg-type]
