"""What runs elsewhere wrote, into the results of their GPU: layers of several runs as one report, the rest as it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench import gemm
from bench.shared import folder_name
from pyquant.bench.partial import merge as merge_layers
from pyquant.errors import ArgumentError
from pyquant.io.atomic import write_file
from pyquant.report import registry
from pyquant.report.records.bench import GemmReport
from pyquant.report.records.record import load_record

LAYERS: Final = "gemm.json"
# Of these the last folder's count.
WHOLE: Final = ("rows", "decoder", "epilogue", "gpu_conv", "gpu_experts", "qat_step", "mlp", "mlp_end_to_end")


def merge(folders: Sequence[Path], target: Path | None = None, *, replace: bool = False) -> Path:
    """Merges folders of bench.gpu. -> the folder that holds the results now.

    target   default: bench/results/<gpu>. Shapes that it holds stay, but for those measured anew.
    replace  what it holds of another setting (libraries, driver, candidates) is left out; otherwise it is refused.
    Raises CheckpointError for faked times and damaged files, ArgumentError for different settings: nothing is written.
    """
    layers = [folder / LAYERS for folder in folders if (folder / LAYERS).exists()]
    if not layers:
        raise ArgumentError("--merge", ", ".join(map(str, folders)), f"folders with {LAYERS}")
    for folder in folders:
        for stem in WHOLE:
            if (folder / f"{stem}.json").exists():
                load_record(folder / f"{stem}.json")  # refuses what is no measurement
    where = target or gemm.RESULTS / folder_name(load_record(layers[0], GemmReport).environment)
    held = [where / LAYERS] if (where / LAYERS).exists() and not replace else []
    report = merge_layers([*held, *layers])
    registry.write_possible(report, where, Path(LAYERS).stem)
    for folder in folders:
        for path in sorted(path for stem in WHOLE for path in folder.glob(f"{stem}.*")):
            if path.suffix != ".jsonl":
                write_file(where / path.name, path.read_bytes())
    gemm.add_verdicts(where)
    return where
