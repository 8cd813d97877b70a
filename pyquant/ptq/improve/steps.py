"""The improvers by name, in the order in which they act: some on the float model, the others after calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from pyquant.calibrate.run import inputs_of
from pyquant.core import arguments
from pyquant.core.registry import IMPROVERS
from pyquant.errors import ArgumentError
from pyquant.nn.sites import Config
from pyquant.nn.undo import Undo
from pyquant.ptq.blockwise.stage import Improver
from pyquant.ptq.improve.bias_correction import BiasCorrection, bias_correction_
from pyquant.ptq.improve.equalize import equalize_reversibly
from pyquant.ptq.improve.gptq import gptq_, gptq_improver
from pyquant.ptq.improve.learned_rounding import learn_rounding_, rounding_improver
from pyquant.ptq.improve.replay import BatchToInputs
from pyquant.ptq.improve.rotate import rotate_reversibly
from pyquant.ptq.improve.scale_search import search_scales_reversibly
from pyquant.ptq.improve.smooth import smooth_reversibly


@dataclass(frozen=True)
class Before:
    """What improvers of the float model are given. config: what it is to be quantised by; undo: receives the steps
    that take a change back."""

    model: nn.Module
    config: Config
    data: Iterable[Any]
    num_batches: int
    undo: list[Undo]
    batch_to_inputs: BatchToInputs | None

    def example(self) -> object:
        """The first batch, as the model is called with it."""
        args, keywords, _ = inputs_of(self.model, self.batch_to_inputs)(next(iter(self.data), None))
        return keywords or tuple(args)

    def equalize(self) -> None:
        equalize_reversibly(self.model, None, self.example(), self.undo)

    def smooth(self) -> None:
        smooth_reversibly(self.model, self.data, self.num_batches, 0.5, None, self.undo, self.batch_to_inputs)

    def search_scales(self) -> None:
        how: dict[str, Any] = {"batch_to_inputs": self.batch_to_inputs}
        search_scales_reversibly(self.model, self.config, self.data, self.num_batches, self.undo, **how)

    def rotate(self, online: bool = False) -> None:
        rotate_reversibly(self.model, self.example(), None, 0, online, self.undo)

    def rotate_online(self) -> None:
        self.rotate(online=True)


# A new one is a line in one of the two tables; quantize_, recipes, the command line and bench.lm know it then.
_BEFORE: Final[dict[str, Callable[[Before], None]]] = {
    "equalize": Before.equalize,
    "smooth": Before.smooth,
    "search_scales": Before.search_scales,
    "rotate": Before.rotate,
    "rotate_online": Before.rotate_online,
}
_AFTER: Final = {"gptq": gptq_, "learn_rounding": learn_rounding_, "bias_correction": bias_correction_}
NAMES: Final = (*_BEFORE, *_AFTER)
for _name, _improver in {**_BEFORE, **_AFTER}.items():
    IMPROVERS.register(_name)(_improver)
_ONE_OF: Final = (("smooth", "search_scales"), ("rotate", "rotate_online"))  # the second does what the first does


def check_names(improve: object, data: object) -> tuple[str, ...]:
    """The names of improvers, each once. Raises ArgumentError for unknown ones and for data of one pass."""
    if isinstance(improve, str):
        raise ArgumentError("improve", repr(improve), f"a sequence of names, such as ({improve!r},)")
    names = tuple(arguments.one_of("improve", name, NAMES) for name in arguments.iterable("improve", improve, "names"))
    if len(set(names)) < len(names):
        raise ArgumentError("improve", ", ".join(names), "each name once")
    for pair in _ONE_OF:
        if set(pair) <= set(names):
            raise ArgumentError("improve", " and ".join(pair), "one of the two")
    if names and data is None:
        raise ArgumentError("data", f"None, with improve={names!r}", "batches")
    if names and isinstance(data, Iterator):
        allowed = "a list or a DataLoader: every improver goes through it"
        raise ArgumentError("data", f"a {type(data).__name__}", allowed)
    return names


def improve_before(names: tuple[str, ...], before: Before) -> None:
    """What is done to the float model."""
    for name, improver in _BEFORE.items():
        if name in names:
            improver(before)


def parted(names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those that act on the float model, and those that act after calibration."""
    return tuple(name for name in names if name in _BEFORE), tuple(name for name in names if name in _AFTER)


def improvers_of(names: tuple[str, ...], num_batches: int) -> dict[str, Improver]:
    """What improve_after does to the layers of a stage, by name, for those who go through a model in another way."""
    found: dict[str, Improver] = {}
    if "gptq" in names:
        found["gptq"] = gptq_improver(num_batches)
    if "learn_rounding" in names:
        found["learn_rounding"] = rounding_improver(num_batches)
    if "bias_correction" in names:
        found["bias_correction"] = BiasCorrection()
    return found


def improve_after(
    model: nn.Module,
    names: tuple[str, ...],
    data: Iterable[Any],
    num_batches: int,
    batch_to_inputs: BatchToInputs | None,
) -> None:
    """What is done to a calibrated model of simulating layers."""
    for name, improver in _AFTER.items():
        if name in names:
            improver(model, data, num_batches, batch_to_inputs=batch_to_inputs)  # type: ignore[operator]
