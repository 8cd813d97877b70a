"""What a user of a GPU does, on one: real layers have the bits of their CPU copies, pages run on its tensors."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pyquant
from pyquant.core.presets import scheme_from_name

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
INTEGER = (
    "W8A8",
    "W8A8Dynamic",
    "W4A8Dynamic",
    "W4A8Dynamic(group_size=128)",
    "W4A8TwoLevelDynamic",
    "W4A4Dynamic",
)
# Not "sensitivity", which draws its data with a generator of the CPU, and not "compile", which moves things to the CPU
# by hand: as they are written, they want a default device that is the CPU.
PAGES = (
    "quickstart",
    "calibration",
    "reconstruction",
    "selective",
    "formats",
    "latency",
    "qat",
)
# A process of its own: the device that tensors are made on is the process's.
RUN_PAGE = """
import os, sys, warnings
root, page, folder = sys.argv[1:]
sys.path[:0] = [root, f"{root}/tests/docs", f"{root}/tests/support"]
import torch
torch.set_default_device("cuda")
from pathlib import Path
from fences import fences
from test_tutorials import Reader
reader, path = Reader(Path(folder)), Path(root, "docs", f"{page}.md")
sys.modules["tutorial"] = reader.module
os.chdir(folder)
warnings.simplefilter("ignore")
for block in fences(path):
    if block.language in ("python", "yaml", "bash"):
        print("block", block.line, flush=True)
        reader.run(block, path)
"""


def _layer(scheme: str, k: int, n: int, dtype: torch.dtype, rows: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(k + n)
    floats = nn.Linear(k, n, dtype=dtype, device="cuda")
    x = torch.randn(rows, k, dtype=dtype, device="cuda")
    model = nn.Sequential(floats)
    pyquant.quantize_(model, scheme_from_name(scheme), data=[x] if scheme == "W8A8" else None)
    return model, x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("k", "n"), [(4096, 4096), (768, 3072), (1000, 1004)])
@pytest.mark.parametrize("scheme", INTEGER)
def test_a_layer_has_the_bits_of_its_cpu_copy(scheme: str, k: int, n: int, dtype: torch.dtype) -> None:
    if k % 128 and "128" in scheme + ("128" if "TwoLevel" in scheme else ""):
        pytest.skip("groups of 128 do not divide this layer")
    model, x = _layer(scheme, k, n, dtype, 130)
    on_cpu = copy.deepcopy(model).cpu()
    with torch.inference_mode():
        for rows in (1, 5, 16, 64, 130):
            assert torch.equal(model(x[:rows]).cpu(), on_cpu(x[:rows].cpu())), rows


def test_a_compiled_model_and_a_captured_one_have_the_bits_of_the_eager_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda().bfloat16()
    pyquant.quantize_(model, pyquant.W8A8Dynamic())
    pyquant.fuse_(model)
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        want = model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x)
        graph.replay()
        assert torch.equal(captured, want)
        assert torch.equal(torch.compile(model, fullgraph=True)(x), want)


def test_a_saved_model_is_loaded_onto_the_gpu(tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).cuda()

    model = pyquant.quantize_(build(), pyquant.W4A8Dynamic(group_size=128))
    pyquant.save_pretrained(model, tmp_path / "out")
    again = pyquant.load_pretrained(tmp_path / "out", build).cuda()
    x = torch.randn(33, 512, device="cuda")
    with torch.inference_mode():
        assert torch.equal(again(x), model(x))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_with_its_tensors_on_the_gpu(page: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN_PAGE, str(ROOT), page, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-4000:]
