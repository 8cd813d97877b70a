"""The record and the recipe of a search, from everything that it measured."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from pyquant.io.shards import digest
from pyquant.measure.environment import describe_environment
from pyquant.mixed_precision.choices.switchable import Config
from pyquant.mixed_precision.costs import bits_cost, size_cost
from pyquant.mixed_precision.decide import Findings, choose, front_of
from pyquant.mixed_precision.plan import Plan
from pyquant.recipe import LayerRule, Provenance, Recipe, SearchParams
from pyquant.report.records.float_format import FLOAT
from pyquant.report.records.record import to_plain
from pyquant.report.records.search import SearchedGroup, SearchedPoint, SearchReport


def plan_of(findings: Findings) -> Plan:
    """The plan. Raises InfeasibleError where nothing keeps the limits."""
    chosen, verdict = choose(findings)
    configs, front = list(findings.losses), front_of(findings.problem, findings.losses)
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
    state = findings.switchable.model.state_dict()
    weights = {name: tensor.detach() for name, tensor in state.items() if isinstance(tensor, Tensor)}
    provenance = Provenance(
        gpu=environment.gpu,
        driver=environment.driver,
        torch=environment.torch,
        pyquant=environment.pyquant,
        latency_table_sha256="" if findings.latency is None else _digest(to_plain(findings.latency)),
        model_sha256=_digest({name: digest(t.cpu().contiguous()) for name, t in weights.items()}),
    )
    formats = {layer: findings.switchable.formats[f] for layer, f in findings.switchable.chosen(chosen).items()}
    rules = {
        layer: replace(format.rule, reason=_reason(findings, layer)) if format.is_float else format.rule
        for layer, format in formats.items()
    }
    search = SearchParams(
        formats=record.formats,
        metric=findings.options.metric,
        sensitivity=findings.options.sensitivity,
        algorithm=findings.options.algorithm,
        max_drop=None if findings.max_drop == math.inf else findings.max_drop,
        never_slower_margin=findings.options.never_slower_margin,
    )
    # about exactly these layers; everything else is left alone
    recipe = Recipe(default=LayerRule(FLOAT), layers=rules, provenance=provenance, search=search)
    calibration = replace(recipe.calib_params, num_calib_batches=max(1, len(findings.switchable.batches)))
    recipe = replace(recipe, calib_params=calibration)
    return Plan(record, recipe, findings.switchable.ranges(chosen))


def _point(findings: Findings, config: Config, on_front: bool) -> SearchedPoint:
    size, bits = size_cost(findings.switchable), bits_cost(findings.switchable)
    median, low, high = findings.times.get(config, (None, None, None))
    return SearchedPoint(
        configuration=findings.switchable.named(config),
        cost=findings.problem.cost_of(config),
        size_bytes=int(size.base + sum(size.table[g][f] for g, f in enumerate(config))),
        effective_bits=sum(bits.table[g][f] for g, f in enumerate(config)),
        loss=findings.losses[config],
        predicted_loss=findings.problem.loss_of(config),
        quality=findings.quality.get(config),
        drop=findings.drops.get(config),
        latency_us=median,
        latency_low_us=low,
        latency_high_us=high,
        predicted_us=None if findings.latency is None else findings.latency.predict(config),
        is_on_front=on_front,
    )


def _groups(findings: Findings) -> tuple[SearchedGroup, ...]:
    formats = [f.name for f in findings.switchable.formats]
    switchable, problem = findings.switchable, findings.problem
    dropped: dict[str, dict[str, str]] = {g.name: {} for g in switchable.groups}
    for (layer, format), why in switchable.refusals.items():
        dropped[switchable.groups[switchable.group_of[layer]].name].setdefault(format, why)
    for one in findings.dropped:
        dropped[one.group].setdefault(one.format, one.reason)
    groups = []
    for g, (group, row) in enumerate(zip(switchable.groups, switchable.allowed, strict=True)):
        loss, cost = (
            {name: float(value) for name, value, ok in zip(formats, table[g], row, strict=True) if ok}
            for table in (problem.loss, problem.cost)
        )
        groups.append(SearchedGroup(group.name, group.layers, switchable.numel[g], dropped[group.name], loss, cost))
    return tuple(groups)


def _reason(findings: Findings, layer: str) -> str:
    switchable, g = findings.switchable, findings.switchable.group_of[layer]
    able = [f.name for f, ok in zip(switchable.formats, switchable.allowed[g], strict=True) if ok and not f.is_float]
    if not able:
        return "no format can be taken"
    slower = {one.format for one in findings.dropped if one.group == switchable.groups[g].name}
    return "nothing is faster" if slower.issuperset(able) else "sensitive"


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
    if lucky := _passed_alone(findings):
        notes.append(
            f"{lucky} of the configurations measured keep{'s' * (lucky == 1)} the limit of {findings.max_drop:g} alone "
            "and not by the trend of those that lose less: taken for luck and left out (docs/mixed-precision.md)"
        )
    return tuple(notes)


def _passed_alone(findings: Findings) -> int:
    """How many configurations hold max_drop by their own measurement and were left out (accuracy_limit)."""
    if findings.max_drop is None:
        return 0
    left_out = set(findings.drops) - {*findings.feasible, findings.start}
    return sum(findings.drops[config] <= findings.max_drop for config in left_out)
