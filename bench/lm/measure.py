"""One cell of the table: a model that was quantised in one way with one draw of calibration data, judged and timed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from bench.lm.subject import Judgement, Subject
from pyquant import Recipe, quantize_, scheme_from_name
from pyquant.errors import ArgumentError
from pyquant.ptq.improve.steps import check_names

FLOAT: Final = "float"
PLAIN: Final = "plain"


@dataclass(frozen=True)
class Way:
    """How a model is quantised: a scheme and the names of improvers, joined by '+', or a recipe.

    label    of the row.
    needs_data   whether there must be calibration data.
    varies       whether a draw of the data makes another model of it: rotations and equalisation only look whether
                 outputs stay.
    """

    scheme: str
    method: str
    recipe: Recipe | None = None

    @property
    def label(self) -> str:
        return f"{self.scheme}, {self.method}" if self.recipe is None else f"recipe {self.method}"

    @property
    def improvers(self) -> tuple[str, ...]:
        if self.recipe is not None:
            return self.recipe.improve
        return () if self.method == PLAIN else tuple(self.method.split("+"))

    @property
    def needs_data(self) -> bool:
        if self.recipe is None:
            schemes = [scheme_from_name(self.scheme)]
        else:
            schemes = [scheme for scheme in self.recipe.config().entries.values() if scheme is not None]
        return bool(self.improvers) or any(scheme.is_static for scheme in schemes)

    @property
    def varies(self) -> bool:
        plain = (
            replace(self, method=PLAIN)
            if self.recipe is None
            else replace(self, recipe=replace(self.recipe, improve=()))
        )
        return not set(self.improvers) <= {"rotate", "rotate_online", "equalize"} or plain.needs_data


@dataclass(frozen=True)
class Cell:
    """losses, hits: as Judgement has them. seconds: quantising, nothing else. peak_bytes: most memory of the process
    (on a GPU: of the device) meanwhile above what it had, None where the system does not tell. state_bytes: of the
    model's parameters and buffers."""

    losses: list[float]
    hits: list[float]
    seconds: float
    peak_bytes: int | None
    state_bytes: int


def ways_of(schemes: Sequence[str], methods: Sequence[str], recipes: Sequence[str]) -> list[Way]:
    """Every scheme with every method, and recipes by the name of a preset or their file.

    Raises ArgumentError for unknown ones.
    """
    for method in methods:
        if method != PLAIN:
            try:
                check_names(method.split("+"), [0])
            except ArgumentError as error:
                raise ArgumentError(
                    "methods", f"{method!r}: {error.got}", f"{PLAIN}, or with '+' between: {error.allowed}"
                ) from None
    for scheme in schemes:
        scheme_from_name(scheme)
    ways = [Way(scheme, method) for scheme in schemes for method in methods]
    return ways + [Way("", _recipe_name(name), _recipe(name)) for name in recipes]


def _recipe(name: str) -> Recipe:
    from pyquant import recommended

    return Recipe.load(name) if Path(name).suffix else recommended(name)


def _recipe_name(name: str) -> str:
    return Path(name).stem if Path(name).suffix else name


def measured(subject: Subject, way: Way, draw: int, reference: Judgement) -> Cell:
    """The model of a subject, quantised, judged against the float one."""
    model = subject.make()
    data = subject.batches(draw) if way.needs_data else None
    with peak_memory(next(model.parameters()).device) as peak:
        before = _now()
        quantised(model, way, data, subject.alone)
        seconds = _now() - before
    found = subject.judge(model, reference.reference)
    return Cell(found.losses, found.hits, seconds, peak[0] if peak else None, state_bytes(model))


def quantised(model: nn.Module, way: Way, data: list[Any] | None, alone: Sequence[str]) -> nn.Module:
    """The model, quantised in place."""
    if way.recipe is not None:
        recipe = way.recipe
        if data is not None:
            recipe = replace(recipe, calib_params=replace(recipe.calib_params, num_calib_batches=len(data)))
        params, present = recipe.selective_quantizer_params, dict(model.named_modules())
        skipped = (*(params.skip_modules or ()), *(name for name in alone if name in present))
        recipe = replace(recipe, selective_quantizer_params=replace(params, skip_modules=skipped or None))
        return quantize_(model, recipe, data=data, check_speed=False)
    config = {**dict.fromkeys(alone), "_default": scheme_from_name(way.scheme)}
    return quantize_(model, config, data=data, improve=way.improvers, heads=False, check_speed=False)


def _now() -> float:
    """CPU time with one thread, which others on the machine do not lengthen; wall time otherwise."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[list[int]]:
    """The list holds, afterwards, the most bytes in use above those at the start; it stays empty where nobody tells."""
    found: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        yield found
        found.append(torch.cuda.max_memory_allocated(device) - start)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark begins anew
        start = _status("VmRSS")
    except (OSError, ValueError):
        yield found
        return
    yield found
    found.append(max(0, _status("VmHWM") - start))


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(key)


def state_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, those that are shared once; of a tensor made of others, as rivals have them,
    those of the others."""
    whole = [tensor for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor)]
    parts = {t.data_ptr(): t.nbytes for tensor in whole for t in _parts(tensor) if t.numel()}
    return sum(parts.values())


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))
