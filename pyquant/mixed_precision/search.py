"""pyquant.search as users call it; what it needs is imported with the first call: `import pyquant` stays light."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

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
    max_drop           how much worse than the float model's the metric may be, absolutely. None: only other limits, of
                       which there must be one then. Without eval_fn it needs metric 'kl': with another one say
                       max_drop=None and, for instance, max_loss.
    objective          'latency' (microseconds, measured), 'size' (bytes) or 'effective_bits' (a weight on average, with
                       its share of scales and zero points): what becomes small.
    options            keywords, each with a default:
        metric         label-free loss of a configuration's outputs against the float model's: 'kl' (of logits),
                       'sqnr', 'mse', 'cosine': these with eval_fn, or with max_drop=None and another limit.
        sensitivity    where the first tables come from; '' measures `metric` with one group lowered at a time,
                       'fisher' needs one forward and one backward pass, others are in docs/sensitivity.md.
        algorithm      'dp' (exact front of a model that is refitted to what was measured), 'exhaustive', 'greedy',
                       'bisection', 'nsga2'.
        budget         configurations whose loss is measured, at most.
        batch          configurations proposed at once, for several processes; the plan depends on it, not on their
                       number.
        max_loss, max_latency_us, max_size_bytes, max_effective_bits   limits, None: no limit.
        higher_is_better  whether more of eval_fn is better.
        evaluations    calls of eval_fn, at most, the float model's aside.
        corner_share   how far the front is looked at: to this share of what the lowest uniform configuration loses.
                       None: as far as max_loss and max_drop allow, and where they allow everything to the end.
        candidates     configurations that are timed end to end before one is chosen.
        never_slower_margin  a format or a plan that is not faster by this share is not taken.
        score_data     batches for losses; None: those that calibrated. Held-out data is better.
        num_batches    how many batches calibrate, and how many of score_data are used; None: 16, or all of fewer.
        batch_to_inputs, grouping, filter_fn, to_output   as in SwitchableModel: the form of batches, which layers
                       share a format, which have a choice, which tensor of the output counts.
        latency        a LatencyTable, or the path of one, of this device and these layers; None: measured.
        latency_seconds  wall time for measuring the table, about.
        clock          'cpu', 'wall', 'cuda-graph'; None: what suits the device.
        journal        file that every finished piece of work is appended to; a killed search goes on from it.
        seed           of everything that is drawn.
        progress       called with (what, done, total) after every piece.
    ->                 Plan; plan.record has everything that was measured.
    How: losses of one group lowered at a time, a measured latency table, the exact Pareto front of their sums, refitted
    to every configuration that is measured, in rounds that come nearer to where max_drop lies; candidates within the
    limits are timed end to end, and where none is faster than the float model by never_slower_margin the plan is the
    float model.
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
    from pyquant.mixed_precision.run import Search

    return Search(model, example_inputs, calib_data_loader, formats, eval_fn, max_drop, objective, options).run()
