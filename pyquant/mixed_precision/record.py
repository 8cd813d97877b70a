"""The record and the recipe of a search, from everything that it measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from pyquant.io.shards import digest
from pyquant.measure.environment import describe_environment
from pyquant.mixed_precision.choices.switchable import Config
from pyquant.mixed_precision.costs import bits_cost, size_cost
from pyquant.mixed_precision.decide import Findings, choose
from pyquant.mixed_precision.plan import Plan, recipe_of_layers
from pyquant.recipe import Provenance, SearchParams
from pyquant.report.records.float_format import FLOAT
from pyquant.report.records.pareto import pareto_front
from pyquant.report.records.record import to_plain
from pyquant.report.records.search import SearchedGroup, SearchedPoint, SearchReport


def plan_of(findings: Findings) -> Plan:
    """The plan. Raises InfeasibleError where nothing keeps the limits."""
    chosen, verdict = choose(findings)
    configs = list(findings.losses)
    front = {configs[i] for i in pareto_front([(findings.problem.cost_of(c), findings.losses[c]) for c in configs])}
    points = tuple(_point(findings, config, config in front) for config in configs)
    environment = describe_environment(findings.switchable.device)
    record = SearchReport(
        model=type(findings.switchable.model).__name__,
        formats=tuple(f.name for f in findings.switchable.formats),
        groups=_groups(findings),
        settings=findings.settings,
        cost_unit=findings.costs.unit,
        loss_unit=findings.loss_unit,
        quality_name="" if findings.max_drop is None else "eval_fn" if findings.has_task else "predictions that stay",
        points=points,
        chosen=configs.index(chosen),
        reference=configs.index(findings.start),
        verdict=verdict,
        counts=dict(findings.counts),
        notes=_notes(findings),
        environment={"": environment.line(), "command": environment.command},
    )
    provenance = Provenance(
        gpu=environment.gpu, driver=environment.driver, torch=environment.torch, pyquant=environment.pyquant,
        latency_table_sha256="" if findings.latency is None else _digest(to_plain(findings.latency)),
        model_sha256=_digest({name: digest(t.detach().cpu().contiguous()) for name, t in _tensors(findings)}),
    )  # fmt: skip
    formats = {layer: findings.switchable.formats[f] for layer, f in findings.switchable.chosen(chosen).items()}
    rules = {
        layer: replace(format.rule, reason=_reason(findings, layer)) if format.is_float else format.rule
        for layer, format in formats.items()
    }
    search = SearchParams(
        formats=record.formats, metric=findings.options.metric, sensitivity=findings.options.sensitivity,
        algorithm=findings.options.algorithm, max_drop=min(1.0, findings.max_drop or 0.0),
        never_slower_margin=findings.options.never_slower_margin,
    )  # fmt: skip
    recipe = recipe_of_layers(
        dict(rules), max(1, len(findings.switchable.batches)), provenance=provenance, search=search
    )  # fmt: skip
    return Plan(record, recipe, findings.switchable.ranges(chosen))


def _point(findings: Findings, config: Config, on_front: bool) -> SearchedPoint:
    size, bits = size_cost(findings.switchable), bits_cost(findings.switchable)
    time = findings.times.get(config)
    return SearchedPoint(
        configuration=findings.switchable.named(config),
        cost=findings.problem.cost_of(config),
        size_bytes=int(size.base + sum(size.table[g][f] for g, f in enumerate(config))),
        effective_bits=sum(bits.table[g][f] for g, f in enumerate(config)),
        loss=findings.losses[config],
        predicted_loss=findings.problem.loss_of(config),
        quality=findings.quality.get(config),
        drop=findings.drops.get(config),
        latency_us=None if time is None else time[0],
        latency_low_us=None if time is None else time[1],
        latency_high_us=None if time is None else time[2],
        predicted_us=None if findings.latency is None else findings.latency.predict(config),
        is_on_front=on_front,
    )


def _groups(findings: Findings) -> tuple[SearchedGroup, ...]:
    formats = [f.name for f in findings.switchable.formats]
    dropped: dict[str, dict[str, str]] = {g.name: {} for g in findings.switchable.groups}
    for (layer, format), why in findings.switchable.refusals.items():
        owner = next(g.name for g in findings.switchable.groups if layer in g.layers)
        dropped[owner].setdefault(format, why)
    for one in findings.dropped:
        dropped[one.group].setdefault(one.format, one.reason)
    groups = []
    for g, (group, row) in enumerate(zip(findings.switchable.groups, findings.switchable.allowed, strict=True)):
        allowed = [f for f in range(len(formats)) if row[f]]
        groups.append(
            SearchedGroup(
                group.name,
                group.layers,
                findings.switchable.numel[g],
                dropped[group.name],
                {formats[f]: float(findings.problem.loss[g, f]) for f in allowed},
                {formats[f]: float(findings.problem.cost[g, f]) for f in allowed},
            )
        )
    return tuple(groups)


def _reason(findings: Findings, layer: str) -> str:
    """Why a layer stays in floating point."""
    g = next(i for i, group in enumerate(findings.switchable.groups) if layer in group.layers)
    if sum(findings.switchable.allowed[g]) == 1:
        return "no format can be taken"
    slower = {one.format for one in findings.dropped if one.group == findings.switchable.groups[g].name}
    if all(
        not ok or f.is_float or f.name in slower
        for ok, f in zip(findings.switchable.allowed[g], findings.switchable.formats)
    ):
        return "nothing is faster"
    return "sensitive"


def _tensors(findings: Findings) -> list[tuple[str, Tensor]]:
    return [(name, t) for name, t in findings.switchable.model.state_dict().items() if isinstance(t, Tensor)]


def _digest(plain: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _notes(findings: Findings) -> tuple[str, ...]:
    floating = findings.switchable.formats[0]
    counted = "each counted by its dtype" if floating.name == FLOAT else f"{floating.weight_bits} bits a weight"
    notes = [f"{floating.name}: the layer as the model has it, {counted}"]
    latency = findings.latency
    if latency is not None and latency.bias is not None:
        notes.append(
            f"latency table: predicted / measured {latency.bias:.3f} (median of {len(latency.held_out)} "
            f"configurations that it did not see), median error {latency.median_error or 0.0:.1%}"
        )
    return tuple(notes)
