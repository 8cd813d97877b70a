"""The plan's cost model as it is in this build, beside times that bench.rows measured: after a change of the model,
without a GPU.

    python -m bench.rows_again bench/results/<gpu>/rows.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from bench.cards import CARDS
from bench.rows import DryRig, problems_of
from bench.shared import geometric_mean
from pyquant import _native
from pyquant.errors import ArgumentError, PyquantError
from pyquant.measure.tune import Problem, candidates
from pyquant.report.records.figures import Figures
from pyquant.report.records.record import load_record
from pyquant.report.render import table

_FAMILIES: Final = {row["name"]: row["family"] for row in _native.kernel_table()}


@dataclass(frozen=True)
class Again:
    """A problem of the file. us, modelled_us: of every kernel that was timed, by name. chosen: the model's choice among
    all kernels of the table, timed or not."""

    scheme: str
    problem: Problem
    us: dict[str, float]
    modelled_us: dict[str, float]
    chosen: str

    @property
    def loss(self) -> float | None:
        """The time of the model's choice over that of the quickest kernel; None: the choice was not timed."""
        return self.us[self.chosen] / min(self.us.values()) if self.chosen in self.us else None


def device_of(gpu: str) -> Mapping[str, Any]:
    """The card of that name. Raises ArgumentError for one that bench.cards does not have."""
    for card in CARDS:
        if card.name == gpu.split(",")[0]:  # "NVIDIA H200, sm_90, 132 SMs"
            return card.device
    raise ArgumentError("file", f"measured on {gpu!r}", ", ".join(card.name for card in CARDS))


def again(measured: Figures) -> Iterator[Again]:
    """Every problem of a record of bench.rows. Kernels that the table no longer has are left out."""
    device = device_of(measured.environment.gpu)

    def where(line: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(line[name] for name in ("scheme", "k", "n", "m", "w_layout"))

    for (scheme, k, n, m, layout), lines in groupby(measured.rows("kernels"), key=where):
        problem = problems_of(DryRig(), k, n, scheme, [m])[0] | {"w_layout": layout}
        us = {str(line["row"]): float(str(line["us"])) for line in lines if line["row"] in _FAMILIES}
        costs = {row: _native.cost_us(row, problem, device) for row in us}
        if us:
            yield Again(scheme, problem, us, costs, candidates(problem, device, only_compiled=False)[0])


def text(found: Sequence[Again]) -> str:
    """What the model's choices lose, by scheme, and measured over modelled time, by family of kernels."""
    by_scheme: list[list[Any]] = []
    for scheme in dict.fromkeys(one.scheme for one in found):
        losses = [one.loss for one in found if one.scheme == scheme]
        known = [loss for loss in losses if loss is not None]
        mean = (f"{geometric_mean(known):.3f}", f"{max(known):.2f}") if known else ("", "")
        by_scheme.append([scheme, len(losses), len(losses) - len(known), *mean])
    by_family: list[list[Any]] = []
    for family in sorted({_FAMILIES[row] for one in found for row in one.us}):
        shares = [us / one.modelled_us[row] for one in found for row, us in one.us.items() if _FAMILIES[row] == family]
        numbers = (f"{share:.2f}" for share in (statistics.median(shares), min(shares), max(shares)))
        by_family.append([family, len(shares), *numbers])
    return "\n\n".join(
        [
            table(["scheme", "shapes", "choice not timed", "loss, mean", "worst"], by_scheme),
            table(["family", "times", "measured over modelled, median", "least", "most"], by_family),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """-> 0; 2 for a file that is not one of bench.rows, or of a card that is not known."""
    parser = argparse.ArgumentParser(prog="python -m bench.rows_again", description=__doc__.split("\n\n")[0])
    parser.add_argument("file", help="rows.json of bench.rows")
    args = parser.parse_args(argv)
    try:
        print(text([*again(load_record(args.file, Figures))]))
    except PyquantError as error:
        print(f"bench.rows_again: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
