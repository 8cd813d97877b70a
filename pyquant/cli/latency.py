"""`pyquant latency MODEL --data FN --formats ...`: measure what every layer costs in every format on this machine."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from pyquant.cli.calibrate import DATA_HELP
from pyquant.cli.models import MODEL_HELP, load_batches, model_factory
from pyquant.cli.options import add_formats, check_batches, formats_of
from pyquant.cli.outputs import check_file
from pyquant.cli.progress import ProgressBar

_EXAMPLES = """\
examples:
  pyquant latency mypackage.models:build --data mypackage.data:batches --out latency.json
  pyquant latency mypackage.models:build --data mypackage.data:batches --formats float W8A8Dynamic --threads 1
  pyquant report latency.json --out report

The figures are for the shape of the first batch. `pyquant report` draws the saved table.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Times every group of layers in every format, inside of the model as it runs, and says how well "
        "their sum predicts random configurations of the whole model."
    )
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("model", metavar="MODEL", help=MODEL_HELP)
    add("--data", required=True, metavar="FN", help=DATA_HELP)
    add_formats(parser)
    add("--batches", type=int, help="batches that calibrate; default 4, or all where there are fewer")
    add("--rounds", type=int, default=40, help="most rounds; default %(default)s")
    add("--seconds", type=float, default=60.0, help="no new round after that; default %(default)s")
    add("--held-out", type=int, default=8, help="random configurations that check; default %(default)s")
    add("--clock", help="cpu, wall, cuda-graph, cuda-events; default: by device and threads")
    add("--threads", type=int, help="torch threads; default: as they are")
    add("--out", default="latency.json", metavar="FILE", help="default %(default)s")


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table, saves it. -> 0. Raises ArgumentError, or what building the model raises."""
    from pyquant.mixed_precision.latency.measure import measure_latency
    from pyquant.report.latency import to_markdown

    check_batches(args)
    out = Path(args.out)
    check_file("--out", args.out, (".json",))
    factory, data = model_factory(args.model), load_batches(args.data, "--data", args.model)
    batches = data() if args.batches is not None else list(itertools.islice(data(), 4))
    with ProgressBar("latency", args.rounds) as shown:

        def tell(done: int, total: int, what: str) -> None:
            shown.total = total
            shown.step(what)

        table = measure_latency(
            factory(),
            formats=formats_of(args.formats),
            data=batches,
            num_batches=args.batches,
            rounds=args.rounds,
            min_rounds=min(8, args.rounds),
            max_seconds=args.seconds,
            held_out=args.held_out,
            clock=args.clock,
            threads=args.threads,
            progress=tell,
        )
    saved = table.save(out)  # first: who reads the table may stop
    print(to_markdown(table))
    print(f"saved in {saved}")
    return 0
