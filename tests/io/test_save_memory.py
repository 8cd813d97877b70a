"""A save holds a layer's codes and a file at a time, not those of the whole model: measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LAYERS, WIDTH, SHARD = 128, 1024, 4 * 2**20
SCRIPT = f"""
import re, sys
from pathlib import Path
import torch, pyquant
from pyquant.io import checkpoint
from pyquant.nn.qlinear import QLinear

codes, scale = torch.zeros({WIDTH}, {WIDTH}, dtype=torch.int8), torch.ones({WIDTH}, {WIDTH} // 128)
make = lambda: QLinear.from_codes(codes, scale, scheme=pyquant.W4A16(128))
checkpoint.save_checkpoint.__kwdefaults__["max_shard_bytes"] = {SHARD}
pyquant.save_pretrained(torch.nn.Sequential(make()), sys.argv[1] + "/first")  # what a first save loads
model = torch.nn.Sequential(*(make() for _ in range({LAYERS})))
status = lambda word: int(re.search(word + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS")
pyquant.save_pretrained(model, sys.argv[1] + "/second")
print(len(list(Path(sys.argv[1], "second").glob("*.safetensors"))), status("VmHWM") - before)
"""


def test_the_codes_of_a_model_are_never_all_in_memory(tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process is measured on Linux")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    files, peak = map(int, found.stdout.split())
    assert files >= 6
    unpacked = LAYERS * WIDTH * WIDTH
    assert peak < unpacked // 2, f"{peak >> 20} MiB on top of the model"
