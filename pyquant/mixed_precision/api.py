"""pyquant.search as users call it; what it needs is imported with the first call: `import pyquant` stays light."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

import pyquant.search  # noqa: F401 (the package first: then its name in pyquant is the function's for good)

if TYPE_CHECKING:
    from pyquant.mixed_precision.plan import Plan


def search(
    model: nn.Module,
    example_inputs: Any = None,
    calib_data_loader: Iterable[Any] | None = None,
    formats: Sequence[str] = ("float", "int8", "int4"),
    eval_fn: Callable[[nn.Module], Any] | None = None,
    max_drop: float | None = 0.01,
    objective: str = "latency",
    **options: Any,
) -> Plan:
    """Find the cheapest format for every group of layers that keeps the model good enough.

    model              float nn.Module; not changed.
    example_inputs     one batch, as the model will see it in use: latencies are measured for it. None: the first batch
                       of the data.
    calib_data_loader  batches without labels: they calibrate static formats, and losses are measured on them unless
                       `score_data` gives others (better: on held-out data).
    formats            the float one, and others: 'int8', 'int4', or presets such as 'W4A8Dynamic(group_size=64)'.
    eval_fn            eval_fn(model) -> the task's metric. None: with logits (metric 'kl'), the share of predictions
                       that stay the float model's; accuracy can never drop by more than what is missing to 1.
    max_drop           how much worse than the float model's the metric may be, absolutely. None: only other limits.
    objective          'latency' (microseconds, measured), 'size' (bytes) or 'effective_bits': what becomes small.
    options            see SearchOptions: metric, algorithm, budget, limits, grouping, journal, ...
    ->                 Plan; plan.record has everything that was measured.
    How: losses of one group lowered at a time, a measured latency table, the exact Pareto front of their sums, refitted
    to every configuration that is measured; candidates within the limits are timed end to end, and where none is faster
    than the float model by never_slower_margin the plan is the float model.
    With torch.distributed initialised every process calls this alike, evaluations are spread, all get the same plan.
    Raises ArgumentError; InfeasibleError where no configuration is within the limits, naming the nearest.
    Source: docs/search.md.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
        >>> data = [torch.randn(8, 16) for _ in range(4)]
        >>> plan = search(model, data[0], data, ("float", "int8"), max_drop=1.0, objective="size", num_batches=4)
        >>> plan.configuration
        {'0': 'int8', '2': 'int8'}
    """
    from pyquant.mixed_precision.run import run_search

    return run_search(model, example_inputs, calib_data_loader, formats, eval_fn, max_drop, objective, options)
