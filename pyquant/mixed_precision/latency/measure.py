"""What groups of layers cost in every format, and whole models side by side: on this machine, for these inputs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.core.dtypes import dtype_name
from pyquant.errors import ArgumentError
from pyquant.measure.environment import describe_environment, library_digest
from pyquant.measure.gpu_timing import on_device
from pyquant.measure.timing import Clock, make_clock, using_threads
from pyquant.mixed_precision.choices.groups import Grouping
from pyquant.mixed_precision.choices.switchable import Config, SwitchableModel
from pyquant.mixed_precision.choices.watch import hooked
from pyquant.mixed_precision.latency import samples as analysis
from pyquant.mixed_precision.latency.in_place import samples_in_place
from pyquant.mixed_precision.latency.isolated import GRAPH_CLOCKS, isolated_samples, whole_samples
from pyquant.mixed_precision.latency.samples import Effort, ProgressCall, Samples, Task, median_interval, silent
from pyquant.mixed_precision.latency.timers import STAMPS, StampClock, make_stamps
from pyquant.nn.sites import Filter
from pyquant.report.records.latency import LatencyTable, MeasuredConfig


def measure_latency(
    model: nn.Module | SwitchableModel,
    example_inputs: Any = None,
    formats: Sequence[str] | None = None,
    data: Iterable[Any] | None = None,
    *,
    grouping: Grouping = "auto",
    filter_fn: Filter | None = None,
    num_batches: int | None = None,
    batch_to_inputs: Callable[[Any], Any] | None = None,
    rounds: int = 40,
    min_rounds: int = 8,
    max_seconds: float = 60.0,
    tolerance: float = 0.02,
    held_out: int = 8,
    clock: str | StampClock | Clock | None = None,
    threads: int | None = None,
    borders: bool | None = None,
    seed: int = 0,
    progress: ProgressCall | None = None,
) -> LatencyTable:
    """The latency of every group of layers in every format, and of the rest of the model, for one batch.

    model           float model, or a SwitchableModel, which has formats, data and groups of its own.
    example_inputs  one batch, whose size and shape the figures are for; None: the first batch of the data.
    formats         names as in formats_of: ('float', 'int8', 'W4A8Dynamic').
    data, num_batches, batch_to_inputs, grouping, filter_fn   as SwitchableModel; data where a format is static.
    rounds, min_rounds, max_seconds, tolerance   rounds are added until every median is known to +- tolerance (95 %),
                    at most `rounds`, none begun after max_seconds; at least min_rounds.
    held_out        how many random configurations are run besides, which the table does not see.
    clock           'cpu' (CPU time; one thread), 'wall', 'cuda-graph', 'cuda-events'. None: 'cuda-graph' on a GPU,
                    'cpu' with one thread, otherwise 'wall'.
    threads         torch threads while measuring; None: as they are.
    borders         whether a group's time may depend on the format before it; None: where a layer returns anything
                    other than a floating-point tensor.
    seed            of the order of runs and of the random configurations.
    progress        called after every step with (done, total, what).
    ->              LatencyTable; the model is as before, also after an exception or Ctrl-C.
    Raises ArgumentError naming what is wrong. Method: docs/latency.md.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
        >>> table = measure_latency(model, torch.randn(8, 16), ("float", "W8A8Dynamic"), rounds=2, min_rounds=1)
        >>> table.groups, table.predict((0, 1)) > 0
        (('0', '2'), True)
    """
    arguments.function("progress", progress, "(done, total, what)")
    if borders is not None:
        arguments.flag("borders", borders)
    arguments.whole("seed", seed, -sys.maxsize)
    effort = Effort(rounds, min_rounds, max_seconds, tolerance)
    arguments.whole("held_out", held_out, 0)
    if isinstance(model, SwitchableModel):
        if formats is not None or data is not None:
            raise ArgumentError("formats", "given with a SwitchableModel", "None: it has formats and data")
        switchable = model
    elif formats is None:
        raise ArgumentError("formats", "None", "names such as ('float', 'int8', 'W4A8Dynamic')")
    else:
        switchable = SwitchableModel(
            model,
            formats,
            data,
            num_batches=num_batches,
            batch_to_inputs=batch_to_inputs,
            grouping=grouping,
            filter_fn=filter_fn,
        )
    task = Task(switchable, *example_of(switchable, example_inputs), effort, seed, progress or silent)
    with using_threads(threads), on_device(switchable.device), torch.inference_mode():
        timer = clock_of(clock, switchable)
        plan = _plan(switchable, held_out, seed)
        has_borders = _look(task, plan, borders)
        if isinstance(timer, StampClock):
            samples = samples_in_place(task, plan.design, plan.whole, timer)
        else:
            given = None if clock is None or isinstance(clock, str) else timer
            samples = isolated_samples(task, plan.whole, lambda: given or make_clock(timer.name))
        fingerprint = latency_fingerprint(switchable, example_inputs)
    return _table(switchable, plan, samples, has_borders, timer.name, fingerprint)


def measure_configurations(
    switchable: SwitchableModel,
    configs: Sequence[Config],
    example_inputs: Any = None,
    *,
    effort: Effort,
    clock: str | StampClock | Clock | None = None,
    seed: int = 0,
) -> dict[Config, tuple[float, float, float]]:
    """Microseconds of the whole model in each configuration, in interleaved rounds of one run: what is promised of a
    plan is measured as the model really runs.

    ->  {configuration: (median, low, high)}, the interval being that of the median (95 %). What slows a whole round
        alike is taken out of all of them.
    Raises ArgumentError for no or wrong configurations; the model is as before, also after an exception.
    """
    checked = list(dict.fromkeys(switchable.check(config) for config in configs))
    if not checked:
        raise ArgumentError("configs", "none", "at least one configuration")
    task = Task(switchable, *example_of(switchable, example_inputs), effort, seed, silent)
    with on_device(switchable.device), torch.inference_mode():
        timer = clock_of(clock, switchable)
        if isinstance(timer, StampClock):
            samples = samples_in_place(task, [], checked, timer)
        else:
            samples = whole_samples(task, checked, timer, Samples())
    return _intervals(samples, checked)


def load_latency(
    path: str | os.PathLike[str], switchable: SwitchableModel, example_inputs: Any = None, threads: int | None = None
) -> LatencyTable:
    """The table in a file, measured with this model, these inputs, on this machine.

    Raises CheckpointError naming the entry of the fingerprint that differs; also for a damaged file.
    """
    with using_threads(threads):
        return LatencyTable.load(path, latency_fingerprint(switchable, example_inputs))


def latency_fingerprint(switchable: SwitchableModel, example_inputs: Any = None) -> dict[str, str]:
    """What a latency belongs to: machine, versions, threads, shapes and dtypes of the inputs, formats, layers."""
    args, kwargs = example_of(switchable, example_inputs)
    environment = describe_environment(switchable.device)
    facts = {
        "device": switchable.device.type,
        "cpu": environment.cpu,
        "gpu": environment.gpu,
        "driver": environment.driver,
        "cuda": environment.cuda,
        "threads": str(environment.threads),
        "torch": environment.torch,
        "pyquant": environment.pyquant,
        "libraries": library_digest(),
        "formats": ", ".join(f.name for f in switchable.formats),
    }
    facts |= {f"input {i}": _text_of(value) for i, value in enumerate(args)}
    facts |= {f"input {name!r}": _text_of(value) for name, value in kwargs.items()}
    for name, g in switchable.group_of.items():
        layer: Any = switchable.layer(name, 0)
        shape, dtype = " x ".join(map(str, layer.weight.shape)), dtype_name(layer.weight.dtype)
        called = switchable.called(name, 0)
        before = "" if called is layer else f" behind {type(called).__name__}({called.extra_repr()})"
        facts[f"layer {name!r}"] = (
            f"{type(layer).__name__} {shape} {dtype}{before}, in group {switchable.groups[g].name}"
        )
    return facts


# ---- what is run


@dataclass(frozen=True)
class _Plan:
    """design: run with timers inside; uniform (one a format) and held_out: run as a whole."""

    design: list[Config]
    uniform: list[Config]
    held_out: list[Config]

    @property
    def known(self) -> list[Config]:
        """What a table may be fitted to."""
        return list(dict.fromkeys([*self.design, *self.uniform]))

    @property
    def whole(self) -> list[Config]:
        """Without timers, each once."""
        return list(dict.fromkeys([*self.known, *self.held_out]))


def _plan(switchable: SwitchableModel, count: int, seed: int) -> _Plan:
    uniform = list(dict.fromkeys(switchable.uniform(f) for f in range(len(switchable.formats))))
    design = analysis.design(switchable.allowed)
    unseen = analysis.held_out(switchable.allowed, [*design, *uniform], count, seed)
    if len(unseen) < count:  # a small model: the design is all there is; run as a whole they are still a check
        unseen += [config for config in design if config not in uniform][: count - len(unseen)]
    return _Plan(design, uniform, unseen)


def _look(task: Task, plan: _Plan, borders: bool | None) -> bool:
    """One forward of every uniform configuration: which layers are called, in which order, and what they return."""
    switchable, group_of = task.switchable, task.switchable.group_of
    called: list[str] = []
    integers = False

    def watch(name: str) -> Callable[..., None]:
        def seen(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            nonlocal integers
            called.append(name)
            integers |= not (isinstance(result, Tensor) and result.is_floating_point())

        return seen

    for config in plan.uniform:
        before = len(called)
        watched = [(switchable.called(name, f), watch(name)) for name, f in switchable.chosen(config).items()]
        with switchable.using(config), hooked(watched):
            task.run()
    missing = [name for name in group_of if name not in called]
    if missing:
        raise ArgumentError(
            "example_inputs",
            f"a batch for which {missing[0]!r} is not called",
            "one that calls every layer of the groups, or filter_fn to leave layers out",
        )
    with_borders = integers if borders is None else borders
    order = dict.fromkeys(group_of[name] for name in called[before:])
    if with_borders and list(order) != list(range(len(switchable.groups))):
        raise ArgumentError("borders", True, "False: the model does not call its groups in their order")
    return with_borders


# ---- the record


def _table(
    switchable: SwitchableModel, plan: _Plan, samples: Samples, borders: bool, clock: str, fingerprint: dict[str, str]
) -> LatencyTable:
    from pyquant.mixed_precision.latency.estimate import estimate  # numpy, which `import pyquant` does without

    groups, formats = switchable.groups, range(len(switchable.formats))
    fit = estimate(samples, [group.layers for group in groups], borders, plan.known)
    for group, row, g in zip(groups, switchable.allowed, range(len(groups)), strict=True):
        if missing := [f for f in formats if row[f] and (g, f) not in fit.groups]:
            raise ArgumentError(
                "grouping",
                f"{group.name}: in {switchable.formats[missing[0]].name} the model never calls its layers",
                "groups that are called in every format; fused encoder layers need several groups",
            )
    layer_us = {
        name: tuple(
            fit.groups[g, f][0] * _share(fit.layers[name, f], [fit.layers[n, f] for n in groups[g].layers])
            if (g, f) in fit.groups
            else None
            for f in formats
        )
        for name, g in switchable.group_of.items()
    }
    interval = _intervals(samples, plan.whole)

    def measured(config: Config) -> MeasuredConfig:
        return MeasuredConfig(config, *interval[config], fit.of(config))

    notes = []
    if samples.isolated:
        notes.append("layers were timed alone, on the inputs that the model gives them")
    if any(config in plan.design for config in plan.held_out):
        notes.append("the model is small: configurations held out were also run with timers inside")
    if fit.scale != 1:
        notes.append(f"figures of groups are {fit.scale:.3f} times what was read: so whole models come out best")
    cells = [[fit.groups.get((g, f)) for f in formats] for g in range(len(groups))]
    border_us = None
    if fit.borders is not None:
        border_us = tuple(
            tuple(tuple(fit.borders.get((g, a, b)) for b in formats) for a in formats) for g in range(1, len(groups))
        )
    return LatencyTable(
        groups=tuple(group.name for group in groups),
        layers=tuple(group.layers for group in groups),
        formats=tuple(f.name for f in switchable.formats),
        weight_bits=tuple(f.weight_bits for f in switchable.formats),
        input_bits=tuple(f.input_bits for f in switchable.formats),
        base_us=fit.base,
        group_us=tuple(tuple(cell and cell[0] for cell in row) for row in cells),
        interval_us=tuple(tuple(cell and cell[1:] for cell in row) for row in cells),
        layer_us=layer_us,
        border_us=border_us,
        uniform=tuple(measured(config) for config in plan.uniform),
        held_out=tuple(measured(config) for config in plan.held_out),
        clock=clock,
        rounds=samples.rounds,
        fingerprint=fingerprint,
        scale=fit.scale,
        notes=tuple(notes),
    )


def _intervals(samples: Samples, configs: Sequence[Config]) -> dict[Config, tuple[float, float, float]]:
    totals = samples.steadied().totals
    return {config: median_interval([us for _, us in totals[config]]) for config in configs}


def _share(part: float, parts: Sequence[float]) -> float:
    return part / sum(parts) if sum(parts) > 0 else 1 / len(parts)


# ---- what the machine and the inputs are


def example_of(switchable: SwitchableModel, example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the model's call for the batch, or for the first one that was kept."""
    if not isinstance(switchable, SwitchableModel):
        raise ArgumentError("switchable", type(switchable).__name__, "a SwitchableModel")
    if example_inputs is None:
        if not switchable.batches:
            raise ArgumentError("example_inputs", "None, and no data", "a batch")
        example_inputs = switchable.batches[0]
    args, kwargs, _ = switchable.inputs(example_inputs)
    return args, kwargs


def clock_of(clock: str | StampClock | Clock | None, switchable: SwitchableModel) -> StampClock | Clock:
    on_gpu = switchable.device.type == "cuda"
    if clock is None:
        clock = "cuda-graph" if on_gpu else "cpu" if torch.get_num_threads() == 1 else "wall"
    if not isinstance(clock, str):
        if not hasattr(clock, "name") or not (hasattr(clock, "seconds") or isinstance(clock, StampClock)):
            allowed = "the name of a clock, or a Clock (its seconds and name)"
            raise ArgumentError("clock", arguments.shown(clock), allowed)
        return clock
    names = GRAPH_CLOCKS if on_gpu else tuple(STAMPS)
    if clock not in names:
        raise ArgumentError("clock", repr(clock), f"{', '.join(map(repr, names))} for a model on {switchable.device}")
    return make_clock(clock) if on_gpu else make_stamps(clock)


def _text_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)} [{', '.join(map(str, value.shape))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text_of(v)}" for key, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_text_of, value)) + ")"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
