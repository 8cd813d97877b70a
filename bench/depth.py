"""What reconstruction costs by the number of blocks: CPU time, passes of a block, and memory.

    python -m bench.depth [--blocks 8 64] [--width 128] [--batches 8] [--improve gptq ...] [--docs FILE]

A chain of blocks (norm, two Linears, residual) is quantised to W4A8Dynamic in three ways, each in a fresh process of
one thread: in memory (improvers with save_to), the same stopped halfway and begun again, and from files to files. Time
is that of the processor: others at work on the machine do not count. Memory is the most above what was there before,
which is the model where it is in memory. The goal: a block of the deepest chain takes at most 1.1 times what one of the
shallowest takes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.markers import get, put
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import using_threads
from pyquant.report.render import table

GOAL: Final = 1.1
WAYS: Final = {"memory": "in memory", "stopped": "in memory, stopped halfway and begun again", "files": "from files"}
_RUN: Final = """
import json, re, sys, time
from pathlib import Path
import torch, pyquant
from pyquant import W4A8Dynamic, gptq_, insert_fake_quantize_
from safetensors.torch import save_file
from torch import nn

way, blocks, width, count, folder, *improve = sys.argv[1:]
blocks, width, count, folder = int(blocks), int(width), int(count), Path(folder)
torch.set_num_threads(1)
torch.manual_seed(0)
passes = 0

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        global passes
        passes += 1
        return x + self.down(torch.relu(self.up(self.norm(x))))

def build(count):
    return nn.Sequential(nn.Sequential(*(Block() for _ in range(count))), nn.LayerNorm(width)).eval()

def quantise(count, name, stop=0):
    scheme = W4A8Dynamic(group_size=32)
    if way == "files":
        with torch.device("meta"):
            model = build(count)
        pyquant.quantize_files(model, folder / name, folder / f"{name}.out", scheme, data=data, improve=improve)
        return
    def progress(done, *_):
        if done == stop:
            raise KeyboardInterrupt
    for function in improve:
        how = {"save_to": folder / name / function, "progress": progress}
        models[name] = insert_fake_quantize_(models[name], scheme) if function == improve[0] else models[name]
        getattr(pyquant, f"{function}_")(models[name], data, len(data), **how)

def written(count, name):
    torch.manual_seed(1)
    if way != "files":
        return build(count)
    (folder / name).mkdir()
    (folder / name / "config.json").write_text("{}")
    tensors = {}
    with torch.device("meta"):
        state = build(count).state_dict()
    one = Block()
    for key, tensor in state.items():
        tensors[key] = one.state_dict()[key.split(".", 2)[2]].clone() if key.startswith("0.") else torch.ones(width)
    save_file(tensors, folder / name / "model.safetensors")

word = lambda name: int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
data = [torch.randn(64, width) for _ in range(count)]
models = {"warm": written(2, "warm"), "it": written(blocks, "it")}
quantise(2, "warm")  # what a first use loads
passes, begun = 0, time.process_time()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = word("VmRSS")
if way == "stopped":
    try:
        quantise(blocks, "it", blocks // 2)
    except KeyboardInterrupt:
        pass
    models["it"] = written(blocks, "it")
quantise(blocks, "it")
print(json.dumps({"seconds": time.process_time() - begun, "passes": passes, "peak": word("VmHWM") - before}))
"""


@using_threads(1)
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.depth", description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", nargs="+", type=int, default=[8, 64], help="default: 8 64")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--improve", nargs="+", choices=("gptq", "learn_rounding", "bias_correction"), default=["gptq"])
    parser.add_argument("--docs", metavar="FILE", help="put the table between the markers of this Markdown file")
    args = parser.parse_args(argv)
    if not Path("/proc/self/clear_refs").exists():
        print("the peak of a process is read from /proc, which is not here")
        return 1
    if args.docs:
        get(Path(args.docs), "bench.depth")
    lines, status = [], 0
    for way, what in WAYS.items():
        found = [_measured(way, blocks, args) for blocks in args.blocks]
        by_block = [one["seconds"] / blocks for one, blocks in zip(found, args.blocks, strict=True)]
        for blocks, one, cost in zip(args.blocks, found, by_block, strict=True):
            times = cost / by_block[0]
            status |= times > GOAL and way != "stopped"
            shown = [
                f"{one['seconds']:.1f}",
                f"{times:.2f}",
                f"{one['passes'] / blocks:.1f}",
                f"{one['peak'] / 2**20:.0f}",
            ]
            lines.append([f"{what}, {blocks} blocks", *shown])
    header = ["", "CPU time, s", "of a block, times", "passes of a block", "most memory, MiB"]
    machine = describe_environment("cpu", clock="cpu").line()
    print(shown := f"{machine}\n\n{table(header, lines)}")
    if args.docs:
        put(Path(args.docs), "bench.depth", shown)
    return int(status)


def _measured(way: str, blocks: int, args: argparse.Namespace) -> dict[str, Any]:
    # glibc would keep what was let go: what is in use is asked for
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "PYTHONPATH": f"{Path(__file__).resolve().parents[1]}",
    }
    with tempfile.TemporaryDirectory() as folder:
        words = [way, str(blocks), str(args.width), str(args.batches), folder, *args.improve]
        command = [sys.executable, "-c", _RUN, *words]
        found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if found.returncode:
        raise SystemExit(found.stderr)
    measured: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return measured


if __name__ == "__main__":
    sys.exit(main())
