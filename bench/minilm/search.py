"""A precision for each of MiniLM's 36 Linear layers: searched, verified, applied. `python -m bench.minilm.search`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import pyquant
from bench.minilm.model import MODEL_NAME, load_float, tokenise
from bench.minilm.text import sentences
from pyquant.cli.progress import Stages
from pyquant.cli.search import summary

_BATCH = 8


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.minilm.search", description=__doc__)
    parser.add_argument("--out", default="demo-out/search", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--formats", nargs="+", default=["float", "int8", "int4"], help="default: float int8 int4")
    parser.add_argument("--grouping", default="none", help="none: 36 choices; auto: q, k, v together; default: none")
    parser.add_argument("--max-drop", type=float, default=0.01, help="of the mean cosine to fp32; default: 0.01")
    parser.add_argument("--budget", type=int, default=40, help="default: 40")
    parser.add_argument("--batches", type=int, default=7, help=f"of {_BATCH} sentences, of each part; default: 7")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; 1: CPU time (default: the machine's)")
    parser.add_argument("--latency-seconds", type=float, default=60.0, help="default: 60")
    parser.add_argument("--journal", metavar="FILE", help="a killed search goes on from it")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.threads is not None and args.threads < 1:
        sys.exit(f"--threads {args.threads}: at least 1")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    started = time.perf_counter()
    model = load_float()
    count = args.batches * _BATCH
    texts = sentences(4 * count)
    # Four parts that share no sentence: for ranges, for losses, for the limit, and to see whether it holds.
    ranges, losses, limit, unseen = (_batches(texts[part::4]) for part in range(4))
    example = tokenise([" ".join(texts[i : i + 6]) for i in range(32)], tokens=32)
    floats = {id(batches): _embed(model, batches) for batches in (limit, unseen)}

    def cosine(candidate: nn.Module, batches: list[tuple[Tensor, Tensor]] = limit) -> float:
        return float((_embed(candidate, batches) * floats[id(batches)]).sum(1).mean())

    with Stages("search") as shown:
        plan = pyquant.search(
            model,
            example,
            ranges,
            args.formats,
            cosine,
            args.max_drop,
            metric="cosine",
            budget=args.budget,
            num_batches=args.batches,
            batch_to_inputs=tuple,
            score_data=losses,
            grouping=args.grouping,
            latency_seconds=args.latency_seconds,
            journal=args.journal,
            progress=shown,
        )
    seconds = time.perf_counter() - started
    print("\n".join(summary(plan.record)))
    out = Path(args.out)
    written = [plan.save(out / "recipe.yaml"), plan.save_ranges(out / "calibration.json")]
    written += [plan.report(out / f"search.{form}") for form in ("json", "md", "csv", "png", "html")]
    quantised = plan.apply_(load_float())
    held = 1 - cosine(quantised, unseen)
    print(
        f"{MODEL_NAME}: {seconds:.0f} s for the search; on sentences that it never saw the mean cosine drops by "
        f"{held:.4f} (limit {args.max_drop:g})"
    )
    print("wrote " + ", ".join(map(str, written)))
    return 0 if held <= args.max_drop else 1


def _batches(texts: list[str]) -> list[tuple[Tensor, Tensor]]:
    return [tokenise(texts[i : i + _BATCH], tokens=32) for i in range(0, len(texts), _BATCH)]


@torch.inference_mode()
def _embed(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.cat([model(*batch).double() for batch in batches])


if __name__ == "__main__":
    sys.exit(main())
