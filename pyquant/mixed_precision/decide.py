"""The choice of a search: which of the measured configurations is the plan, why, and which limits none can meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pyquant.errors import InfeasibleError
from pyquant.mixed_precision.choices.switchable import Config, SwitchableModel
from pyquant.mixed_precision.costs import CostTable
from pyquant.mixed_precision.loss.metrics import find_metric
from pyquant.mixed_precision.options import SearchOptions
from pyquant.mixed_precision.solve.problem import Constraint, SearchProblem
from pyquant.mixed_precision.solve.prune import Dropped
from pyquant.mixed_precision.tables import Interval
from pyquant.report.records.latency import LatencyTable
from pyquant.report.records.pareto import pareto_front

_UNITS: Final = {"us": "us", "bytes": "bytes", "bits": "bits a weight"}
_SCATTER: Final = 0.25  # an interval wider than this share of its median says little


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything that a search measured.

    quality   what eval_fn gave, or the share of predictions that stay; drops: how much worse than the float model's.
    times     of the configurations that were timed end to end.
    feasible  configurations that keep every limit, by what was measured.
    dropped   options that are not worth having; counts: pieces of work by stage; has_task: quality is eval_fn's.
    """

    switchable: SwitchableModel
    objective: str
    max_drop: float | None
    options: SearchOptions
    problem: SearchProblem
    costs: CostTable
    latency: LatencyTable | None
    losses: dict[Config, float]
    drops: dict[Config, float]
    quality: dict[Config, float]
    times: dict[Config, Interval]
    feasible: list[Config]
    dropped: Sequence[Dropped]
    counts: dict[str, int]
    settings: dict[str, str]
    has_task: bool

    @property
    def start(self) -> Config:
        """Everything in floating point."""
        return self.problem.uniform(0)

    @property
    def loss_unit(self) -> str:
        return find_metric(self.options.metric).unit


def front_of(problem: SearchProblem, losses: Mapping[Config, float]) -> list[Config]:
    """The configurations that none dominates in (cost, loss), the cheapest first."""
    configs = list(losses)
    return [configs[i] for i in pareto_front([(problem.cost_of(c), losses[c]) for c in configs])]


def order_of(
    problem: SearchProblem, losses: Mapping[Config, float], has_quality: bool
) -> Callable[[Config], tuple[float, float]]:
    """What makes a configuration better among those that keep the limits: less cost where quality has a limit, else
    less loss."""
    if has_quality:
        return lambda c: (problem.cost_of(c), losses[c])
    return lambda c: (losses[c], problem.cost_of(c))


def choose(findings: Findings) -> tuple[Config, str]:
    """The configuration, and why it is this one."""
    problem, start = findings.problem, findings.start
    if not findings.feasible:
        raise _infeasible(findings, min(findings.losses, key=lambda c: _excess(findings, c)))
    has_quality = findings.max_drop is not None or findings.options.max_loss is not None
    order = order_of(problem, findings.losses, has_quality)
    best = min(findings.feasible, key=order)
    if findings.times:
        most = float("inf") if findings.options.max_latency_us is None else findings.options.max_latency_us
        candidates = [c for c in findings.times if c in findings.feasible and findings.times[c][0] <= most]
        if not candidates:
            raise _infeasible(findings, min(findings.times, key=lambda c: findings.times[c][0]))
        best = min(candidates, key=order)
        if findings.objective == "latency" and has_quality:
            return _fastest(findings, candidates)
    why = f"{'costs' if has_quality else 'loses'} least of what keeps the limits"
    saved = 1 - problem.cost_of(best) / max(problem.cost_of(start), 1e-300)
    measured = f", {findings.times[best][0]:.1f} us end to end" if best in findings.times else ""
    return best, (
        f"{saved:.1%} less {_UNITS[findings.costs.unit]} than floating point{measured}; {why}: "
        f"{findings.losses[best]:.4g} {findings.loss_unit}{_task(findings, best)}"
    )


def _fastest(findings: Findings, candidates: Sequence[Config]) -> tuple[Config, str]:
    """The fastest candidate as it was timed, or the float model where none is faster by the margin."""
    start, margin = findings.start, findings.options.never_slower_margin
    best = min(candidates, key=lambda c: (findings.times[c][0], findings.losses[c]))
    base = findings.times[start][0]
    if best == start or (start in candidates and findings.times[best][0] > (1 - margin) * base):
        return start, (
            f"nothing that keeps the limits is faster than floating point by {margin:.0%}, measured end to end "
            f"({_times(findings, start)})"
        )
    saved = 1 - findings.times[best][0] / base
    return best, (
        f"{saved:.1%} less latency than floating point, measured end to end ({_times(findings, best, start)}); "
        f"loses {findings.losses[best]:.4g} {findings.loss_unit}{_task(findings, best)}"
    )


def _times(findings: Findings, *configs: Config) -> str:
    """Medians with their 95 % intervals; says so where they are too wide to be believed."""
    times = [findings.times[config] for config in configs]
    text = " of ".join(f"{median:.1f} us, {low:.1f} to {high:.1f}" for median, low, high in times)
    if all(high - low <= _SCATTER * median for median, low, high in times):
        return text
    return text + ": the rounds scatter, so measure again on a quiet machine or with one thread"


def _task(findings: Findings, config: Config) -> str:
    """What eval_fn gave, for a configuration and for the float model; '' where it was not run."""
    if not findings.has_task or config not in findings.quality or findings.start not in findings.quality:
        return ""
    return f"; eval_fn {findings.quality[config]:.6g} where floating point has {findings.quality[findings.start]:.6g}"


def _limits(findings: Findings, config: Config) -> list[tuple[str, float, float]]:
    """(name, what the configuration has, the limit) of every limit, as far as it was measured."""
    rows = [(c.name, c.cost_of(config), c.limit) for c in findings.problem.constraints]
    if config in findings.times and findings.options.max_latency_us is not None:
        rows.append(("end to end us", findings.times[config][0], findings.options.max_latency_us))
    if findings.options.max_loss is not None:
        rows.append(("loss", findings.losses[config], findings.options.max_loss))
    if findings.max_drop is not None and config in findings.drops:
        rows.append(("drop", findings.drops[config], findings.max_drop))
    return rows


def _excess(findings: Findings, config: Config) -> float:
    """By how much a configuration misses the limits, each in units of itself."""
    return sum(max(0.0, value - limit) / max(limit, 1e-300) for _, value, limit in _limits(findings, config))


def beyond_reach(switchable: SwitchableModel, limit: Constraint, least: Config) -> InfeasibleError:
    """A limit that no configuration keeps, not even `least`, which has the least of what it limits."""
    text = f"no configuration keeps {limit.name} {limit.limit:g}: {limit.cost_of(least):g} is the least, with "
    return InfeasibleError(text + switchable.text(least), switchable.named(least))


def _infeasible(findings: Findings, nearest: Config) -> InfeasibleError:
    limits = {"max_drop": findings.max_drop, **findings.options.limits()}
    asked = ", ".join(f"{name} {limit:g}" for name, limit in limits.items() if limit is not None)
    formats = findings.switchable.text(nearest)
    missed = "; ".join(f"{n} {v:g} exceeds {most:g}" for n, v, most in _limits(findings, nearest) if v > most)
    text = f"no configuration that was measured keeps {asked}; the nearest is {formats}: {missed}"
    return InfeasibleError(text, findings.switchable.named(nearest))
