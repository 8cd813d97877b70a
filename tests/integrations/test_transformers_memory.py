"""What from_pretrained of transformers holds at most while pyquant quantises on the fly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

T = pytest.importorskip("transformers")
MEMORY = """
import json, os, re, sys
from pathlib import Path
import torch, transformers, pyquant
from pyquant.integrations.transformers import PyquantConfig

def load(folder, way):
    kind = transformers.AutoModelForCausalLM
    recipe = pyquant.Recipe.from_dict({"default": "W8A8Dynamic", "heads": False})
    config = PyquantConfig(recipe if way == "recipe" else "W8A8Dynamic", check_speed=False)
    return kind.from_pretrained(folder, dtype=torch.float32, quantization_config=config)

def measure(folder, way):
    load(folder + "/small", way)  # what a first use loads
    status = lambda word: int(re.search(word + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    model = load(folder + "/large", way)
    held = {id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}
    return status("VmHWM") - before, sum(held.values())

for folder, way in json.loads(sys.argv[1]):
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
    else:  # each in a process of its own, which has imported nothing of its own
        torch.set_num_threads(1)
        print(*measure(folder, way), flush=True)
        os._exit(0)
"""
WAYS = [("Llama", "scheme"), ("Qwen3Moe", "scheme"), ("Qwen3Moe", "recipe")]


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[int, int, int]]:
    """{kind and way: the peak of a load, what the model holds, its floats}"""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process is measured on Linux")
    made = {kind: tmp_path_factory.mktemp(kind) for kind, _ in WAYS}
    floats = {kind: floats_of(kind, path) for kind, path in made.items()}
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}  # what is in use, not what glibc keeps of it
    command = [sys.executable, "-c", MEMORY, json.dumps([(str(made[kind]), way) for kind, way in WAYS])]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert found.returncode == 0, found.stderr
    lines = [tuple(map(int, line.split())) for line in found.stdout.splitlines()]
    return {way: (peak, held, floats[way[0]]) for way, (peak, held) in zip(WAYS, lines, strict=True)}


def floats_of(kind: str, path: Path) -> int:
    """Directories of a small and a large model in bfloat16; the bytes of the large one in float32."""
    sizes: dict[str, Any] = {"hidden_size": 384, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 96}
    if kind == "Qwen3Moe":
        sizes |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "head_dim": 64}
    else:
        sizes |= {"intermediate_size": 1536}
    for folder, count in (("small", 1), ("large", 16)):
        config = getattr(T, f"{kind}Config")(**sizes, num_hidden_layers=count, dtype=torch.bfloat16)
        with torch.device("meta"):
            model = getattr(T, f"{kind}ForCausalLM")(config).bfloat16()
        for parameter in model.to_empty(device="cpu").parameters():
            parameter.data.fill_(1.0)
        model.save_pretrained(path / folder, max_shard_size="8MB")
    return 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_on_the_fly_holds_the_floats_of_one_layer(
    kind: str, way: str, peaks: dict[tuple[str, str], tuple[int, int, int]]
) -> None:
    """In float32, which the files are not, and with experts, which files hold one by one: transformers copies both."""
    peak, held, floats = peaks[kind, way]
    one = floats / 16 * 1.5  # of a layer or bank, in both types
    assert held < floats / 3.5
    assert peak < held + one + 24 * 2**20, f"{peak >> 20} MiB for {held >> 20} MiB"
    assert peak < floats * 0.62
