"""Runs exactly N batches through a model whose layers collect statistics, and leaves the model as it was.

The runner sees layers only through `CalibrationTarget`. It moves batches to the model's device, runs in eval mode
without gradients, restores training flags, hooks and random state also after an exception, names the layer and batch
of a NaN and the layers that saw no data, adds up data-parallel processes, and saves what it has every few batches.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyquant.calibrate.padding import NO_PADDING, Padding, has_decoder, left_out, padding_of
from pyquant.calibrate.progress import SavedStatistics
from pyquant.calibrate.statistics import RangeStatistics
from pyquant.core import arguments
from pyquant.core.dtypes import describe
from pyquant.core.modes import evaluating
from pyquant.core.names import listed
from pyquant.errors import ArgumentError, CalibrationError, PyquantError, QuantizationWarning

LABELS = ("label", "labels")
# what models raise over a batch that is not theirs, beside RuntimeError
_OF_MODELS: Final = (ValueError, AttributeError, LookupError, AssertionError)

Collected = dict[str, Mapping[str, RangeStatistics]]


class Inputs(NamedTuple):
    """A call of a module: arguments, keyword arguments, and which of its positions are padding."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    padding: Padding = NO_PADDING


@runtime_checkable
class CalibrationTarget(Protocol):
    """A module that can collect statistics of its own tensors in its forward."""

    def start_calibration(self) -> Mapping[str, RangeStatistics]:
        """From here on every forward observes. -> the statistics that it fills, by a name such as 'input'.

        They are new (a second start begins again), and the runner may load saved ones into them.
        """

    def stop_calibration(self) -> None:
        """From here on no forward observes; may follow a failed start. Stores nothing: ranges are the caller's job."""


def run_calibration(
    model: nn.Module,
    targets: Mapping[str, CalibrationTarget] | Iterable[CalibrationTarget],
    data: Iterable[Any],
    num_batches: int,
    *,
    batch_to_inputs: Callable[[Any], Any] | None = None,
    save_every: int | None = None,
    save_to: str | None = None,
    process_group: Any = None,
    reduce: bool = False,
    on_silent: str = "raise",
    on_batch: Callable[[int], None] | None = None,
) -> Collected:
    """Statistics of `num_batches` batches, by name of the target.

    model            called once a batch, in eval mode, without gradients; afterwards it is as before.
    targets          modules of the model that follow CalibrationTarget, by name; without names: those of the model.
    data             yields batches: a tensor is the model's argument; of a tuple or list the first item is; a mapping
                     (also a BatchEncoding) gives keyword arguments, those that forward() takes, labels left out.
                     Positions that its attention_mask calls padding do not count in the statistics.
    num_batches      how many are run: neither one more nor one less. Of a longer `data` no further batch is fetched.
    batch_to_inputs  replaces that rule: batch -> tensor, tuple of arguments, or mapping of keyword arguments.
    save_every       with save_to (a directory): saves the statistics after every so many batches, and a run with the
                     same model, targets and num_batches goes on after the last saved batch. `data` must then repeat
                     its order; saved batches are fetched and left unused.
    reduce           True: adds up the processes of torch.distributed (of process_group) after the last batch.
    on_silent        'raise' or 'ignore' where a target saw no data.
    on_batch         called with the number of batches done, after each.
    ->               {target: {role: statistics}}; pass each to compute_range().

    Raises CalibrationError naming targets that saw no data, how many batches there were, or the batch on which the
    model raised a RuntimeError (its cause); NonFiniteError naming
    target and batch of the first NaN or infinity; ArgumentError. Source: docs/calibration.md 4.

    Example:
        >>> class Watched(nn.Linear):
        ...     statistics = None
        ...     def start_calibration(self):
        ...         self.statistics = RangeStatistics()
        ...         return {"input": self.statistics}
        ...     def stop_calibration(self):
        ...         self.statistics = None
        ...     def forward(self, x):
        ...         if self.statistics is not None:
        ...             self.statistics.observe(x)
        ...         return super().forward(x)
        >>> model = nn.Sequential(Watched(4, 2))
        >>> collected = run_calibration(model, [model[0]], [torch.ones(3, 4), 2 * torch.ones(3, 4)], 2)
        >>> collected["0"]["input"].amax().item()
        2.0
    """
    arguments.whole("num_batches", num_batches, 1)
    arguments.one_of("on_silent", on_silent, ("raise", "ignore"))
    if (save_every is None) != (save_to is None):
        raise ArgumentError("save_every", repr(save_every), "given together with save_to")
    every = num_batches if save_every is None else arguments.whole("save_every", save_every, 1)
    arguments.iterable("data", data)
    named = _named(model, targets)
    to_inputs = inputs_of(model, batch_to_inputs)
    collected: Collected = {}
    with contextlib.ExitStack() as undo:
        for name, target in named.items():
            undo.callback(target.stop_calibration)
            collected[name] = target.start_calibration()
        saved = SavedStatistics.open(save_to, model, collected, num_batches) if save_to is not None else None
        running = undo.enter_context(_as_before(model, named))
        done = -1
        for done, batch in zip(range(num_batches), data, strict=False):
            if saved is not None and done < saved.batches:
                continue
            running.clear()
            args, kwargs, padding = to_inputs(batch)
            try:
                with batch_named(done), left_out(padding):
                    model(*args, **kwargs)
            except TypeError as error:
                check_call(model, args, kwargs, batch, error)
                raise
            except ArgumentError as error:
                where = f"{running[-1]}, " if running else ""
                raise type(error)(error.argument, f"{error.got} ({where}batch {done})", error.allowed) from error
            if saved is not None and (done + 1) % every == 0:
                saved.save(done + 1)
            if on_batch is not None:
                on_batch(done + 1)
        if done + 1 < num_batches:
            raise too_few(num_batches, done + 1)
        for name in sorted(collected) if reduce else ():  # the same order in every process
            for role in sorted(collected[name]):
                collected[name][role].reduce_(process_group)
        if on_silent == "raise":
            refuse_silent(silent_in(collected), len(named))
    return collected


@contextlib.contextmanager
def batch_named(number: int) -> Iterator[None]:
    """What a model raises over a batch inside, as a CalibrationError that says which. Our own errors, and what means
    that memory is out, pass."""
    try:
        yield
    except (RuntimeError, *_OF_MODELS) as error:
        if type(error).__name__ == "UncapturedHigherOrderOpError":  # torch.cond, which compiles its branches
            raise CalibrationError(
                "data: layers in branches of torch.cond cannot be watched: give them a scheme that needs no data "
                "(W8A8Dynamic), or leave them out"
            ) from error
        is_other = isinstance(error, RuntimeError) and type(error) is not RuntimeError  # out of memory
        if is_other or isinstance(error, PyquantError):
            raise
        kind = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
        raise CalibrationError(f"data: on batch {number} the model raised: {kind}{error}") from error


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any, error: TypeError) -> None:
    """Raise ArgumentError where that is why a call failed: a batch did not give forward() the arguments that it has to
    have. (Before the call nobody knows: hooks and decorators add some.)"""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # of compiled code
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as wrong:
        got = f"batches ({type(batch).__name__}) from which forward{signature}"[:300] + f" is called wrongly: {wrong}"
        allowed = "mappings of keyword arguments, or batch_to_inputs, which makes arguments of a batch"
        raise ArgumentError("data", got, allowed) from error


def silent_in(collected: Collected) -> list[str]:
    """Targets that saw no data."""
    return [name for name, roles in collected.items() if any(s.count == 0 for s in roles.values())]


def refuse_silent(silent: Sequence[str], total: int) -> None:
    """Raise CalibrationError where there are any."""
    if silent:
        out = "leave them out (filter_fn, None in the config, --skip)"
        ways = f"{out}, give them a dynamic scheme, or data that reaches them"
        what = f"{len(silent)} of {total} layers saw no data: {', '.join(silent)}"
        raise CalibrationError(f"{what}. The model never called them in eval mode on these batches: {ways}")


def warn_of_own_data(what: str) -> None:
    """One QuantizationWarning where this is one of several processes: each finds ranges in its own share of the data,
    and with them another model."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        advice = (
            "give every process the same data, or calibrate with reduce=True (insert_fake_quantize_, "
            "QuantizationCalibrator().calibrate_model(reduce=True), convert_: docs/distributed.md)"
        )
        told = f"{what} in each of {dist.get_world_size()} processes for itself"
        warnings.warn(f"{told}: models differ where their data do; {advice}", QuantizationWarning, 3)


def warn_of_zeros(names: Sequence[str]) -> None:
    """One QuantizationWarning for tensors of which the data showed nothing but zeros."""
    if names:
        what = f"the data held only zeros for {listed(list(names), 5)}: a scale of 1 stands for the range"
        advice = "calibrate with other data, after training, or take a dynamic scheme there"
        warnings.warn(f"{what}, and larger numbers will be rounded to whole ones; {advice}", QuantizationWarning, 3)


def too_few(asked: int, given: int) -> CalibrationError:
    """The error of data that ends before the number of batches that was asked for."""
    named = f"num_batches={given} (num_calib_batches of a calibrator or recipe, --batches of a command), or "
    lower = named if given else ""
    more = f"data of at least {asked} batches"
    return CalibrationError(f"num_batches: {asked} batches were asked for, the data had {given}; pass {lower}{more}")


def _named(
    model: nn.Module, targets: Mapping[str, CalibrationTarget] | Iterable[CalibrationTarget]
) -> dict[str, CalibrationTarget]:
    if isinstance(targets, Mapping):
        named = dict(targets)
    else:
        names = {id(module): name for name, module in model.named_modules()}
        named = {names.get(id(target), f"targets[{i}]"): target for i, target in enumerate(targets)}
    if not named:
        raise ArgumentError("targets", "none", "at least one module with start_calibration and stop_calibration")
    for name, target in named.items():
        if not isinstance(target, CalibrationTarget):
            allowed = "modules with start_calibration and stop_calibration"
            raise ArgumentError("targets", f"{name}: {type(target).__name__}", allowed)
    return named


@contextlib.contextmanager
def _as_before(model: nn.Module, targets: Mapping[str, object]) -> Iterator[list[str]]:
    """Eval mode, no gradients, and a list of the targets whose forward is running; all undone at the end."""
    running: list[str] = []
    device = _device_of(model)

    def leave(*_: object) -> None:
        running.pop()

    with contextlib.ExitStack() as undo:
        undo.enter_context(torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []))
        for name, target in targets.items():
            if isinstance(target, nn.Module):
                undo.callback(target.register_forward_pre_hook(lambda *_, name=name: running.append(name)).remove)
                undo.callback(target.register_forward_hook(leave).remove)
        undo.enter_context(evaluating(model))
        with torch.no_grad():
            yield running


def _device_of(model: nn.Module) -> torch.device | None:
    tensors = (*model.parameters(), *model.buffers())
    return next((tensor.device for tensor in tensors if not tensor.is_meta), None)


def inputs_of(model: nn.Module, batch_to_inputs: Callable[[Any], Any] | None) -> Callable[[Any], Inputs]:
    """The rule of run_calibration: batch -> the model's call, on its device, with what the batch tells of padding."""
    arguments.function("batch_to_inputs", batch_to_inputs, "batch -> arguments of the model")
    device = _device_of(model)
    accepted, names, decodes = _keywords(model), _positions(model), has_decoder(model)

    def of_batch(batch: Any) -> Inputs:
        args: Any = ()
        if batch_to_inputs is not None:
            batch = batch_to_inputs(batch)
            args = batch if isinstance(batch, tuple | list) else ()
        elif isinstance(batch, tuple | list):
            if not batch:
                raise ArgumentError("data", "an empty batch", "batches that begin with the model's input")
            batch = batch[0]
        if isinstance(batch, Mapping):
            keywords = {k: v for k, v in batch.items() if batch_to_inputs is not None or accepted(k)}
            if not keywords:
                raise ArgumentError("data", f"a batch with {sorted(batch)}", "names that the model's forward() takes")
            padding = padding_of(batch, decodes)  # also of a mask that forward() does not take
            return Inputs((), {k: _moved(v, device) for k, v in keywords.items()}, padding)
        if not args:
            if not isinstance(batch, Tensor):
                allowed = "a tensor or mapping, alone or first in a tuple or list; batch_to_inputs for anything else"
                raise ArgumentError("data", f"a batch whose input is a {type(batch).__name__}", allowed)
            args = (batch,)
        padding = padding_of(dict(zip(names, args, strict=False)), decodes)
        return Inputs(tuple(_moved(a, device) for a in args), {}, padding)

    return of_batch


def _keywords(model: nn.Module) -> Callable[[str], bool]:
    """Whether forward() takes a keyword; labels never are inputs of a calibration."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return lambda name: name not in LABELS
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return lambda name: name in names and name not in LABELS


def _positions(model: nn.Module) -> list[str]:
    """The names of forward()'s positional arguments."""
    parameters = inspect.signature(model.forward).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _moved(value: Any, device: torch.device | None) -> Any:
    """A copy on the device: models may write into their inputs, and batches are run several times."""
    if not isinstance(value, Tensor):
        return value
    if value.is_meta and device is not None and device.type != "meta":
        raise ArgumentError("data", f"{describe(value)} on meta", "batches with numbers")
    return value.clone() if device is None else value.to(device, copy=True)
