"""What quantisation costs a language model: schemes x methods x draws of calibration data, against float and rivals.

    python -m bench.lm MODEL_DIR TEXT_FILE                any local causal model of transformers, any text in UTF-8
    python -m bench.lm MODEL_DIR TEXT_FILE --cloze FILE   and the words that end the lines of a JSON-lines file
    python -m bench.lm --suite                            the project's own models (python -m bench.lm.train first)
    python -m bench.lm --suite --subjects resnet mobilenet --label cnn     the project's own convolutional networks

A method is `plain` (rounding), or names of improvers joined by '+', as quantize_(improve=) takes them: gptq,
rotate_online+gptq. --recipes adds recommended recipes by their names, or recipe files. Finished cells are kept in a
journal in pyquant's cache: the same command goes on where it was ended.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.lm.measure import PLAIN, Way, ways_of
from bench.lm.peers import PEERS, PeerJob, interpreters
from bench.lm.records import INTERVAL, LmGoal, LmReport, LmRow, body, judged, markdown, recipes_table
from bench.lm.run import Run, facts_of
from bench.lm.subject import LmOptions, Subject, language_model
from bench.lm.suite import LARGE, OPTIONS, SLOW, STILL, SUBJECTS, USUAL, subjects, suite_ways
from bench.lm.train import default_folder
from bench.markers import put
from bench.shared import folder_name
from pyquant.errors import ArgumentError, PyquantError
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import using_threads
from pyquant.ops.tuned import cache_folder
from pyquant.ptq.improve.steps import NAMES
from pyquant.recipe.recommended import NAMES as RECOMMENDED
from pyquant.report.records.figures import figures_of
from pyquant.report.records.record import save_record
from pyquant.report.render import write_text

SCHEMES = ("W8A8Dynamic", "W4A16", "W4A8Dynamic", "W4A4Dynamic(group_size=128, symmetric_inputs=False)")
METHODS = (PLAIN, "smooth", "search_scales", "gptq", "rotate_online", "rotate_online+gptq")
GOALS = (("W4A8, groups of 128", "W4A8", 1.0), ("W4A4, without training", "W4A4", 6.0))  # of the larger model


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.lm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL_DIR", help="a folder that AutoModelForCausalLM and AutoTokenizer load")
    add("text", nargs="?", metavar="TEXT_FILE", help="judged by windows of it")
    add("--suite", action="store_true", help="the project's own models instead")
    add(
        "--subjects",
        nargs="+",
        default=list(USUAL),
        metavar="NAME",
        help=f"of --suite: {' '.join(SUBJECTS)}; default: {' '.join(USUAL)}",
    )
    add("--large", metavar="DIR", help="of --suite: where the larger model is (default: where bench.lm.train puts it)")
    add("--cloze", metavar="FILE", help='lines {"context": ..., "word": ...} or {"text": ...}')
    add("--calibration", metavar="FILE", help="text to calibrate with (default: the first half of TEXT_FILE)")
    shown = f"default: {' '.join(SCHEMES)}; of --suite: rows of its own"
    add("--schemes", nargs="*", metavar="S", help=f"presets with options ({shown})")
    add("--methods", nargs="*", metavar="M", help=f"{PLAIN}, or of these, '+' between: {', '.join(NAMES)}")
    add("--recipes", nargs="*", default=[], metavar="R", help="files, or " + ", ".join(RECOMMENDED))
    add(
        "--peers",
        nargs="*",
        default=list(PEERS),
        metavar="P",
        help="rivals; none: --peers. Default: " + "; ".join(PEERS),
    )
    add("--peers-python", nargs="+", default=[], metavar="PACKAGE=PYTHON", help="another environment for a rival")
    add("--peer-draws", type=int, metavar="N", help="of rivals (default: as --draws)")
    add("--draws", type=int, default=3, metavar="N", help="of calibration data (default: 3)")
    add("--slow-draws", type=int, metavar="N", help="of the larger models of --suite (default: as --draws)")
    add("--length", type=int, metavar="N", help="tokens of a window (default: the model's, at most 2048)")
    add("--windows", type=int, default=128, metavar="N", help="judged, evenly spread; 0: all (default: 128)")
    add("--batches", type=int, default=8, metavar="N", help="of calibration (default: 8)")
    add("--rows", type=int, default=4, metavar="N", help="windows of a batch (default: 4)")
    add("--device", default="cpu", help="default: cpu")
    add("--threads", type=int, metavar="N", help="1: CPU time (default: the machine's, wall time)")
    add("--out", metavar="DIR", help="default: lm-out; of --suite bench/results/<cpu>")
    add("--docs", nargs="+", default=[], metavar="FILE", help="put the tables between the markers of these pages")
    add(
        "--recipes-page",
        metavar="FILE",
        help="put what recommended recipes cost between its markers",
    )
    add(
        "--label",
        metavar="NAME",
        help="of --suite, for some subjects: other files, lm_NAME, and markers, bench.lm NAME",
    )
    add("--quick", action="store_true", help="of --suite: little of everything, a check")
    args = parser.parse_args(argv)
    if args.suite == bool(args.model):
        parser.error("MODEL_DIR and TEXT_FILE, or --suite")
    if args.model and not args.text:
        parser.error("TEXT_FILE is missing")
    for name, least in (
        ("draws", 1),
        ("windows", 0),
        ("batches", 2),
        ("rows", 1),
        ("threads", 1),
        ("peer_draws", 1),
        ("slow_draws", 1),
    ):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} {value}: at least {least}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        with using_threads(args.threads or torch.get_num_threads()):
            return _run(args)
    except PyquantError as error:
        print(f"bench.lm: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    own = args.suite and args.schemes is None and args.methods is None
    schemes, methods = args.schemes if args.schemes is not None else SCHEMES, args.methods or METHODS
    ways = ways_of([] if own else schemes, methods, args.recipes)
    pythons = interpreters(args.peers_python)
    for peer in args.peers:
        if peer not in PEERS:
            raise ArgumentError("peers", repr(peer), "; ".join(PEERS))
    options = LmOptions(args.length, args.windows or None, args.batches, args.rows, args.device)
    rows: list[LmRow] = []
    journals = cache_folder() / "lm" / "journals"
    for subject, facts, job in _subjects(args, options):
        name = "".join(c if c.isalnum() else "-" for c in subject.name)
        with Run(subject, journals / f"{name}{'-quick' * args.quick}.journal", facts, _tell) as run:
            rows.append(run.float_row())
            taken = [*(suite_ways(subject) if own else []), *ways]
            draws = args.slow_draws or args.draws if subject.name in SLOW else args.draws
            rows += [run.row(way, draws) for way in _fitting(taken, subject)]
            if job is not None:
                for peer in args.peers:
                    python = pythons.get(PEERS[peer].package, sys.executable)
                    rows.append(run.peer_row(replace(job, peer=peer), python, args.peer_draws or args.draws))
    clock = "cpu" if (args.threads or torch.get_num_threads()) == 1 else "wall"
    notes = [INTERVAL, "s: of quantising; peak: memory that quantising takes above what the process had"]
    report = LmReport(describe_environment(args.device, clock=clock), rows, _goals(rows), notes)
    print(body(report))
    default = Path("bench/results") / folder_name(report.environment) if args.suite else Path("lm-out")
    label = args.label if args.suite else Path(args.model).resolve().name
    out, stem = Path(args.out) if args.out else default, f"lm_{label}" if label else "lm"
    marker = f"bench.lm {args.label}" if args.label else "bench.lm"
    write_text(out / f"{stem}.md", markdown(report))
    save_record(out / f"{stem}.json", figures_of(report))
    print(f"wrote {out / stem}.md, {out / stem}.json")
    for page in args.docs:
        put(Path(page), marker, f"{report.environment.line()}\n\n{body(report)}".replace("\n## ", "\n### "))
    if args.recipes_page:
        put(Path(args.recipes_page), marker, f"{report.environment.line()}\n\n{recipes_table(rows)}")
    return 1 if any(goal.verdict == "MISS" for goal in report.goals) else 0


def _subjects(args: argparse.Namespace, options: LmOptions) -> Any:
    """(subject, what its cells depend on, what rivals are told or None)."""
    threads = args.threads or torch.get_num_threads()
    if not args.suite:
        folder = Path(args.model)
        texts = {"calibration": args.calibration, "cloze": args.cloze}
        subject = language_model(folder, args.text, options=options, **texts)
        job = PeerJob("", str(folder.resolve()), args.text, args.calibration, args.cloze, options, 0, threads)
        yield subject, facts_of(folder, [args.text, args.calibration, args.cloze], options), job
        return
    large = Path(args.large) if args.large else None
    for name in args.subjects:
        (subject,) = subjects([name], large, share=0.05 if args.quick else 1.0)
        facts, job = {"suite": "1"}, None
        if subject.name == LARGE and not args.quick:
            folder = large or default_folder()
            texts = [str(folder / part) for part in ("held_out.txt", "calibration.txt", "cloze.jsonl")]
            facts = facts_of(folder, texts, OPTIONS)
            job = PeerJob("", str(folder), *texts, OPTIONS, 0, threads)
        yield subject, facts, job


def _fitting(ways: list[Way], subject: Subject) -> list[Way]:
    """The ways that a subject can go."""
    turns = subject.name not in STILL
    return [way for way in ways if turns or not any(name.startswith("rotate") for name in way.improvers)]


def _goals(rows: list[LmRow]) -> list[LmGoal]:
    """The larger model's, by whatever of the scheme reached least."""
    large = [row for row in rows if row.subject == LARGE and row.draws > 0]
    if not large:
        return []
    return [judged(name, limit, [r for r in large if r.scheme.startswith(scheme)]) for name, scheme, limit in GOALS]


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
