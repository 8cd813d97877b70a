"""Script: a package as docs/cli.md names it, and the page's commands in the order in which they stand there."""

import json
import shlex
import sys
from pathlib import Path

MODELS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(512, 512)  # wide enough that integers win on every machine: the search must find a plan
    def forward(self, x):
        return x + torch.relu(self.dense(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 512)
        self.encoder = nn.Sequential(Block(), Block())
        self.head, self.classifier = nn.Linear(512, 512), nn.Linear(512, 8)
    def forward(self, ids):
        return self.classifier(self.head(self.encoder(self.embed(ids).mean(1))))

def build():
    torch.manual_seed(0)
    return Net().eval()
"""
DATA = """
import functools
import torch
from mypackage.models import build

def batches():
    torch.manual_seed(1)
    return [torch.randint(0, 20, (32, 2)) for _ in range(BATCHES)]

calibration = batches

@functools.cache
def labelled():
    model = build()
    with torch.no_grad():
        return [(x, model(x).argmax(-1)) for x in batches()]

def accuracy(model):
    with torch.no_grad():
        return float(torch.cat([model(x).argmax(-1) == y for x, y in labelled()]).float().mean())
"""
# What needs a GPU, minutes, or results of such a run. Everything else on the page runs.
SKIPPED = ("pyquant bench", "pyquant tune", "pyquant report results/", "pyquant quantize ./hugging-face-folder")


def commands(page: Path) -> list[str]:
    """The commands in the fenced blocks of a page, in order, continued lines joined."""
    found, inside = [], False
    for line in page.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            inside = not inside
        elif inside and line.startswith("pyquant "):
            found.append(" ".join(line.split()))
    return found


def files_of(page: Path) -> None:
    """The configuration that the page prints, the package and the recipe that its commands name."""
    block = page.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    Path("quantise.yaml").write_text(block)
    Path("recipe.yaml").write_text("calib_params: {num_calib_batches: 4}\n")
    Path("mypackage").mkdir()
    Path("mypackage/models.py").write_text(MODELS)
    Path("mypackage/data.py").write_text(DATA.replace("BATCHES", "5"))


def shortened(command: str) -> list[str]:
    """The words of a command; those that time layers by the clock take two seconds instead of sixty."""
    words = shlex.split(command)[1:]
    if words[0] in ("latency", "search"):
        seconds = "--seconds" if words[0] == "latency" else "--latency-seconds"
        words += [] if seconds in words else [seconds, "2"]
    return words


def main(page: Path) -> None:
    """Prints [[command, exit code], ...] as its last line."""
    from pyquant.cli.main import main as pyquant

    files_of(page)
    done = []
    for command in commands(page):
        if not command.startswith(SKIPPED):
            print(f"$ {command}", file=sys.stderr, flush=True)
            try:
                code = pyquant(shortened(command))
            except SystemExit as stop:
                code = int(str(stop.code))
            done.append([command, code])
    print(json.dumps(done))


if __name__ == "__main__":
    main(PAGE)  # type: ignore[name-defined]  # noqa: F821
