"""From everything that a search found to its choice, its recipe and its record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from pyquant.errors import InfeasibleError
from pyquant.io.shards import digest
from pyquant.measure.environment import describe_environment
from pyquant.mixed_precision.choices.switchable import Config, SwitchableModel
from pyquant.mixed_precision.costs import CostTable, bits_cost, size_cost
from pyquant.mixed_precision.latencies import Interval
from pyquant.mixed_precision.options import SearchOptions
from pyquant.mixed_precision.plan import Plan, recipe_of_layers
from pyquant.mixed_precision.solve.problem import Constraint, SearchProblem
from pyquant.mixed_precision.solve.prune import Dropped
from pyquant.recipe import Provenance, SearchParams
from pyquant.results.float_format import FLOAT
from pyquant.results.latency import LatencyTable
from pyquant.results.pareto import pareto_front
from pyquant.results.record import to_plain
from pyquant.results.search import SearchedGroup, SearchedPoint, SearchReport

_UNITS: Final = {"us": "us", "bytes": "bytes", "bits": "bits a weight"}
_SCATTER: Final = 0.25  # an interval wider than this share of its median says little


@dataclass(frozen=True)
class Findings:
    """Everything that was found.

    losses   {configuration: measured loss}; drops, values: of the task metric, of those for which it was run.
    times    {configuration: (median, low, high) us} of those that were timed end to end.
    kept     configurations that keep every limit, by what was measured.
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
    values: dict[Config, float]
    times: dict[Config, Interval]
    kept: list[Config]
    dropped: Sequence[Dropped]
    counts: dict[str, int]
    settings: dict[str, str]
    is_task: bool

    @property
    def start(self) -> Config:
        """Everything in floating point."""
        return self.problem.uniform(0)


def plan_of(found: Findings) -> Plan:
    """The plan. Raises InfeasibleError where nothing keeps the limits."""
    chosen, verdict = _choose(found)
    configs = list(found.losses)
    front = {configs[i] for i in pareto_front([(found.problem.cost_of(c), found.losses[c]) for c in configs])}
    points = tuple(_point(found, config, config in front) for config in configs)
    environment = describe_environment(next((p.device for p in found.switchable.model.parameters()), "cpu"))
    record = SearchReport(
        model=type(found.switchable.model).__name__,
        formats=tuple(f.name for f in found.switchable.formats),
        groups=_groups(found),
        settings=found.settings,
        cost_unit=found.costs.unit,
        loss_unit=_loss_unit(found.options.metric),
        quality_name="" if found.max_drop is None else "eval_fn" if found.is_task else "predictions that stay",
        points=points,
        chosen=configs.index(chosen),
        reference=configs.index(found.start),
        verdict=verdict,
        counts=dict(found.counts),
        notes=_notes(found),
        environment={"": environment.line(), "command": environment.command},
    )
    provenance = Provenance(
        gpu=environment.gpu, driver=environment.driver, torch=environment.torch, pyquant=environment.pyquant,
        latency_table_sha256="" if found.latency is None else _digest(to_plain(found.latency)),
        model_sha256=_digest({name: digest(t.detach().cpu().contiguous()) for name, t in _tensors(found)}),
    )  # fmt: skip
    rules = {
        layer: replace(format.rule, reason=_reason(found, layer)) if format.is_float else format.rule
        for layer, format in found.switchable.layer_formats(chosen).items()
    }
    search = SearchParams(
        formats=record.formats, metric=found.options.metric, sensitivity=found.options.sensitivity,
        algorithm=found.options.algorithm, max_drop=min(1.0, found.max_drop or 0.0),
        never_slower_margin=found.options.never_slower_margin,
    )  # fmt: skip
    recipe = recipe_of_layers(
        dict(rules), max(1, len(found.switchable.batches)), provenance=provenance, search=search
    )  # fmt: skip
    return Plan(record, recipe, found.switchable.ranges(chosen))


def order_of(
    problem: SearchProblem, losses: Mapping[Config, float], max_drop: float | None, options: SearchOptions
) -> Callable[[Config], tuple[float, float]]:
    """What makes a configuration better among those that keep the limits: less cost where quality has a limit, else
    less loss."""
    if max_drop is None and options.max_loss is None:
        return lambda c: (losses[c], problem.cost_of(c))
    return lambda c: (problem.cost_of(c), losses[c])


def _choose(found: Findings) -> tuple[Config, str]:
    """The configuration, and why it is this one."""
    problem, start = found.problem, found.start
    if not found.kept:
        raise _infeasible(found, min(found.losses, key=lambda c: _excess(found, c)))
    order = order_of(problem, found.losses, found.max_drop, found.options)
    best = min(found.kept, key=order)
    if found.times:
        most = float("inf") if found.options.max_latency_us is None else found.options.max_latency_us
        candidates = [c for c in found.times if c in found.kept and found.times[c][0] <= most]
        if not candidates:
            raise _infeasible(found, min(found.times, key=lambda c: found.times[c][0]))
        best = min(candidates, key=order)
        if found.objective == "latency" and (found.max_drop is not None or found.options.max_loss is not None):
            return _fastest(found, candidates)
    least = found.max_drop is None and found.options.max_loss is None
    why = "loses least of what keeps the limits" if least else "costs least of what keeps the limits"
    saved = 1 - problem.cost_of(best) / max(problem.cost_of(start), 1e-300)
    measured = f", {found.times[best][0]:.1f} us end to end" if best in found.times else ""
    return best, (
        f"{saved:.1%} less {_UNITS[found.costs.unit]} than floating point{measured}; {why}: {found.losses[best]:.4g} "
        f"{_loss_unit(found.options.metric)}{_task(found, best)}"
    )


def _fastest(found: Findings, candidates: Sequence[Config]) -> tuple[Config, str]:
    """The fastest candidate as it was timed, or the float model where none is faster by the margin."""
    start, margin = found.start, found.options.never_slower_margin
    best = min(candidates, key=lambda c: (found.times[c][0], found.losses[c]))
    base = found.times[start][0]
    if best == start or (start in candidates and found.times[best][0] > (1 - margin) * base):
        told = "nothing that keeps the limits is faster than floating point by "
        return start, told + f"{margin:.0%}, measured end to end ({_times(found, start)})"
    saved = 1 - found.times[best][0] / base
    told = f"{saved:.1%} less latency than floating point, measured end to end ({_times(found, best, start)})"
    return best, f"{told}; loses {found.losses[best]:.4g} {_loss_unit(found.options.metric)}{_task(found, best)}"


def _times(found: Findings, *configs: Config) -> str:
    """Medians with their 95 % intervals; says so where they are too wide to be believed."""
    times = [found.times[config] for config in configs]
    text = " of ".join(f"{median:.1f} us, {low:.1f} to {high:.1f}" for median, low, high in times)
    if all(high - low <= _SCATTER * median for median, low, high in times):
        return text
    return text + ": the rounds scatter, so measure again on a quiet machine or with one thread"


def _task(found: Findings, config: Config) -> str:
    """What eval_fn gave, for a configuration and for the float model; '' where it was not run."""
    if not found.is_task or config not in found.values or found.start not in found.values:
        return ""
    return f"; eval_fn {found.values[config]:.6g} where floating point has {found.values[found.start]:.6g}"


def _limits(found: Findings, config: Config) -> list[tuple[str, float, float]]:
    """(name, what the configuration has, the limit) of every limit, as far as it was measured."""
    rows = [(c.name, c.cost_of(config), c.limit) for c in found.problem.constraints]
    if config in found.times and found.options.max_latency_us is not None:
        rows.append(("end to end us", found.times[config][0], found.options.max_latency_us))
    if found.options.max_loss is not None:
        rows.append(("loss", found.losses[config], found.options.max_loss))
    if found.max_drop is not None and config in found.drops:
        rows.append(("drop", found.drops[config], found.max_drop))
    return rows


def _excess(found: Findings, config: Config) -> float:
    """By how much a configuration misses the limits, each in units of itself."""
    return sum(max(0.0, value - limit) / max(limit, 1e-300) for _, value, limit in _limits(found, config))


def beyond_reach(switchable: SwitchableModel, limit: Constraint, least: Config) -> InfeasibleError:
    """A limit that no configuration keeps, not even `least`, which has the least of what it limits."""
    named = switchable.named(least)
    told = ", ".join(f"{g}: {f}" for g, f in named.items())
    return InfeasibleError(
        f"no configuration keeps {limit.name} {limit.limit:g}: {limit.cost_of(least):g} is the least, with {told}",
        named,
    )


def _infeasible(found: Findings, nearest: Config) -> InfeasibleError:
    limits = {"max_drop": found.max_drop, **found.options.limits()}
    wanted = ", ".join(f"{name} {limit:g}" for name, limit in limits.items() if limit is not None)
    named = found.switchable.named(nearest)
    told = ", ".join(f"{g}: {f}" for g, f in named.items())
    missed = "; ".join(f"{n} {value:g} exceeds {most:g}" for n, value, most in _limits(found, nearest) if value > most)
    return InfeasibleError(f"no configuration that was measured keeps {wanted}; the nearest is {told}: {missed}", named)


def _point(found: Findings, config: Config, on_front: bool) -> SearchedPoint:
    size, bits = size_cost(found.switchable), bits_cost(found.switchable)
    time = found.times.get(config)
    return SearchedPoint(
        configuration=found.switchable.named(config),
        cost=found.problem.cost_of(config),
        size_bytes=int(size.base + sum(size.table[g][f] for g, f in enumerate(config))),
        effective_bits=sum(bits.table[g][f] for g, f in enumerate(config)),
        loss=found.losses[config],
        predicted_loss=found.problem.loss_of(config),
        quality=found.values.get(config),
        drop=found.drops.get(config),
        latency_us=None if time is None else time[0],
        latency_low_us=None if time is None else time[1],
        latency_high_us=None if time is None else time[2],
        predicted_us=None if found.latency is None else found.latency.predict(config),
        is_on_front=on_front,
    )


def _groups(found: Findings) -> tuple[SearchedGroup, ...]:
    formats = [f.name for f in found.switchable.formats]
    dropped: dict[str, dict[str, str]] = {g.name: {} for g in found.switchable.groups}
    for (layer, format), why in found.switchable.refusals.items():
        owner = next(g.name for g in found.switchable.groups if layer in g.layers)
        dropped[owner].setdefault(format, why)
    for one in found.dropped:
        dropped[one.group].setdefault(one.format, one.reason)
    made = []
    for g, (group, row) in enumerate(zip(found.switchable.groups, found.switchable.allowed, strict=True)):
        allowed = [f for f in range(len(formats)) if row[f]]
        made.append(
            SearchedGroup(
                group.name,
                group.layers,
                found.switchable.numel[g],
                dropped[group.name],
                {formats[f]: float(found.problem.loss[g, f]) for f in allowed},
                {formats[f]: float(found.problem.cost[g, f]) for f in allowed},
            )
        )
    return tuple(made)


def _reason(found: Findings, layer: str) -> str:
    """Why a layer stays in floating point."""
    g = next(i for i, group in enumerate(found.switchable.groups) if layer in group.layers)
    if sum(found.switchable.allowed[g]) == 1:
        return "no format can be taken"
    slower = {one.format for one in found.dropped if one.group == found.switchable.groups[g].name}
    if all(
        not ok or f.is_float or f.name in slower for ok, f in zip(found.switchable.allowed[g], found.switchable.formats)
    ):
        return "nothing is faster"
    return "sensitive"


def _tensors(found: Findings) -> list[tuple[str, Tensor]]:
    return [(name, t) for name, t in found.switchable.model.state_dict().items() if isinstance(t, Tensor)]


def _digest(plain: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _notes(found: Findings) -> tuple[str, ...]:
    floating = found.switchable.formats[0]
    counted = "each counted by its dtype" if floating.name == FLOAT else f"{floating.weight_bits} bits a weight"
    notes = [f"{floating.name}: the layer as the model has it, {counted}"]
    if found.latency is not None and found.latency.bias is not None:
        error = found.latency.median_error or 0.0
        notes.append(
            f"latency table: predicted / measured {found.latency.bias:.3f} (median of {len(found.latency.held_out)} "
            f"configurations that it did not see), median error {error:.1%}"
        )
    return tuple(notes)


def _loss_unit(metric: str) -> str:
    from pyquant.mixed_precision.loss.metrics import find_metric

    return find_metric(metric).unit
