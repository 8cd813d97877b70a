"""Quantises the real MiniLM under several schemes, prints a table, writes JSON, Markdown and a picture."""

from __future__ import annotations

import argparse
import copy
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from bench.minilm import readme
from bench.minilm.measure import (
    embed,
    latency_inputs,
    measure_latency,
    model_row,
    reload_elsewhere,
    save,
    scale_and_vector_bytes,
    state_bytes,
)
from bench.minilm.model import MODEL_NAME, Embedder, load_float, variants
from bench.minilm.report import ModelReport, ModelRow, model_markdown, model_png
from bench.minilm.text import sentences
from bench.shared import keep_freed_memory
from pyquant.cli.progress import ProgressBar
from pyquant.errors import UnsupportedError
from pyquant.io.atomic import write_file
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import default_clock, make_clock
from pyquant.report.records.bench import Bar
from pyquant.report.records.figures import figures_of
from pyquant.report.records.record import save_record
from pyquant.report.render import write_text

_BASE, _MAIN, _FUSED = "fp32", "W8A8Dynamic", "W8A8Dynamic, GELU in the kernel"
_RIVALS = ("bf16", "torch.ao dynamic int8")
_ASKED_FOR = ("W8A16",)  # weight-only: made for GPUs, slower than fp32 on a CPU; `--only W8A16` measures it


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.minilm", description=__doc__)
    parser.add_argument("--out", default="demo-out", metavar="DIR", help="where results go (default: demo-out)")
    parser.add_argument("--device", default=None, help="default: cuda when there is a GPU, else cpu")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; 1: CPU time (default: the machine's)")
    parser.add_argument(
        "--clock",
        choices=("cpu", "wall", "cuda-events"),
        help="default: wall, cpu with one thread; cuda-events on a GPU",
    )
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds (default: 11)")
    parser.add_argument("--sentences", type=int, default=200, help="for the fidelity figures (default: 200)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="variants whose names hold one of these, and fp32")
    parser.add_argument(
        "--keep-memory", action="store_true", help="keep freed memory (glibc), so that no page faults are timed"
    )
    parser.add_argument(
        "--readme",
        nargs="+",
        metavar="FILE",
        help="also put the table between the markers of these Markdown files, the picture into docs/ beside the first",
    )
    parser.add_argument("--bars", action="store_true", help="exit code 1 when a stated bar is missed (on a CPU)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.keep_memory and not keep_freed_memory():
        print("--keep-memory: this C library has no such setting", file=sys.stderr)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    started = time.perf_counter()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    clock = make_clock(
        args.clock or ("cuda-events" if device.type == "cuda" else default_clock(torch.get_num_threads()))
    )
    out = Path(args.out)
    texts = sentences(args.sentences)
    chosen = [
        v for v in variants() if not args.only or v.name == _BASE or any(o.lower() in v.name.lower() for o in args.only)
    ]
    if not args.only:
        chosen = [v for v in chosen if v.name not in _ASKED_FOR]
    if device.type == "cuda":
        chosen = [v for v in chosen if not v.name.startswith("torch.ao")]  # fbgemm is a CPU library
    inputs = latency_inputs(texts, device)
    models: dict[str, Embedder] = {}
    rows: list[ModelRow] = []
    with ProgressBar("minilm", 2 * len(chosen) + len(inputs) + 3) as shown:
        shown.step("load the model")
        loaded = load_float()
        for variant in chosen:
            shown.step(f"quantise, {variant.name}")
            models[variant.name] = variant.make(copy.deepcopy(loaded)).to(device).eval()
        timings = measure_latency(models, inputs, clock, args.rounds, shown.step)
        reference = None
        for variant in chosen:
            shown.step(f"embed {len(texts)} sentences, {variant.name}")
            embedded = embed(models[variant.name], texts, device)
            reference = embedded if reference is None else reference
            rows.append(model_row(variant, models[variant.name], embedded, reference, texts, timings, _BASE))
        saved = {out / "models" / _slug(v.name): (v, models[v.name]) for v in chosen if v.ours}
        shown.step("save")
        sizes = {v.name: save(model, folder) for folder, (v, model) in saved.items()}
        shown.step("load in a second process")
        equal = reload_elsewhere(saved, inputs, out / "probe.safetensors") if saved else {}
    rows = [replace(r, reload_equal=equal.get(r.variant), file_bytes=sizes.get(r.variant)) for r in rows]
    report = ModelReport(
        environment=describe_environment(device, clock=clock.name),
        model=MODEL_NAME,
        data=f"{len(texts)} sentences from the docstrings of Python's standard library",
        baseline=_BASE,
        rows=rows,
        bars=_bars(rows, models, device),
        notes=_notes(args, device),
    )
    markdown = model_markdown(report)
    print(markdown)
    write_text(out / "minilm.md", markdown)
    save_record(out / "minilm.json", figures_of(report))
    written = ["minilm.md", "minilm.json", *_picture(report, out)]
    if args.readme:
        pages = [Path(page) for page in args.readme]
        readme.update(pages, report, out / "minilm.png" if "minilm.png" in written else None)
    print(f"{time.perf_counter() - started:.0f} s; wrote " + ", ".join(str(out / name) for name in written))
    if any(row.reload_equal is False for row in rows):
        return 1
    return 1 if args.bars and not all(bar.passed for bar in report.bars) else 0


def _bars(rows: list[ModelRow], models: dict[str, Embedder], device: torch.device) -> list[Bar]:
    row = next((r for r in rows if r.variant == _MAIN), None)
    if row is None or device.type != "cpu":
        return []
    goals = {"batch 1, 24 tokens": 3.0, "batch 32, 32 tokens": 2.8}
    bars = [Bar(f"{_MAIN} against fp32, {name}", goals[name], row.speedup[name]) for name in row.speedup]
    by_name = {r.variant: r for r in rows}
    for rival in (name for name in _RIVALS if name in by_name):
        bars += [
            Bar(f"{_MAIN} against {rival}, {name}", 1.0, row.speedup[name] / by_name[rival].speedup[name])
            for name in row.speedup
        ]
    if (fused := by_name.get(_FUSED)) is not None:
        bars += [
            Bar(f"{_FUSED}, against {_MAIN}, {name}", 1.0, fused.speedup[name] / row.speedup[name])
            for name in row.speedup
        ]
    bars.append(Bar(f"{_MAIN}: cosine to fp32, mean", 0.997, row.cosine_mean, unit=""))
    codes = row.state_bytes - scale_and_vector_bytes(models[_MAIN])
    share = codes / state_bytes(models[_BASE])
    bars.append(Bar(f"{_MAIN}: codes / fp32's state (scales, biases, norms apart)", 0.25, share, "<=", ""))
    return bars


def _notes(args: argparse.Namespace, device: torch.device) -> list[str]:
    notes = [
        (
            "latency: one forward pass with pooling, without tokenising; median of interleaved rounds; in brackets the "
            "median of the per-round ratios to fp32"
        ),
        (
            "cosine: between the embeddings of the same sentence; same nearest: share of sentences whose nearest "
            "neighbour among the others stays the same"
        ),
        "state: all tensors of the checkpoint; pyquant variants hold their embeddings as int8 with a scale a row",
        "reloaded: saved, loaded by a second process into a model of random weights, every output bit compared",
    ]
    if args.keep_memory:
        notes.append("freed memory is kept by the process for all variants alike, so that no page faults are timed")
    if device.type == "cpu":
        notes.append(
            "one CPU thread and CPU time, so that other programs do not disturb"
            if torch.get_num_threads() == 1
            else "the machine's threads and wall time; one thread by CPU time, which other programs do not disturb: "
            "`--threads 1`"
        )
    return notes


def _picture(report: ModelReport, out: Path) -> list[str]:
    try:
        write_file(out / "minilm.png", model_png(report))
    except UnsupportedError as error:
        print(f"no picture: {error}", file=sys.stderr)
        return []
    return ["minilm.png"]


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
