"""What training does to the ranges: clipped share, drift of scales and gradient norms, as lines of a CSV file."""

from __future__ import annotations

import csv
import errno
import io
import math
import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.core.paths import file_path
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.qat.integer import IntegerForwardLinear
from pyquant.qat.prepare import weight_matrix
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.kinds import is_simulated

COLUMNS: Final = ("step", "loss", "layer", "tensor", "clip_share", "scale", "scale_drift", "grad_norm")
_ONES: Final = torch.tensor([bin(byte).count("1") for byte in range(256)], dtype=torch.uint8, device="cpu")


class QATMonitor(AbstractContextManager["QATMonitor"]):
    """Watches the quantised tensors of a prepared model, every `every` steps.

    model        a prepared model, not compiled (a compiled graph has no place to look into).
    path         CSV file, or None. Lines of a run are appended to what is there, those of a step in one write; half a
                 line that a killed run left is cut off. With several processes give a path to one of them.
    every        steps between two looks; the steps in between cost nothing.
    tensorboard  None, a directory (needs the package tensorboard), or an object with add_scalar(tag, value, step).

    Call it as monitor(step, loss), after backward and before the optimiser: finetune(..., on_step=monitor) does so.
    One row a tensor:
      clip_share   share of the elements that its range cut off in this step; 0 for ranges that follow their data.
      scale        geometric mean of its scales.        scale_drift   that, divided by the one of the first look.
      grad_norm    of the layer's weight, in the row of the weight; of a learned scale in the rows of other tensors.
    A figure that does not exist (a tensor that was not used) is empty in the file and None in `rows`. As a context
    manager it takes its hooks out at the end; so does close().
    Raises ArgumentError for a model without fake quantisation, and a file that holds something else.

    Example:
        >>> from pyquant import W8A8Dynamic, prepare_qat_
        >>> model = prepare_qat_(nn.Sequential(nn.Linear(4, 2)), W8A8Dynamic())
        >>> with QATMonitor(model) as monitor:
        ...     model(torch.ones(1, 4)).sum().backward()
        ...     monitor(0, 1.0)
        >>> [(row["layer"], row["tensor"], row["clip_share"]) for row in monitor.rows]
        [('0', 'weight', 0.0), ('0', 'input', 0.0)]
    """

    def __init__(
        self, model: nn.Module, path: str | os.PathLike[str] | None = None, *, every: int = 1, tensorboard: Any = None
    ) -> None:
        arguments.module("model", model)
        arguments.whole("every", every, 1)
        self.rows: list[dict[str, Any]] = []  # of the last look
        self._watched = [
            _Watched(name, tensor, layer, fake)
            for name, layer in model.named_modules()
            if is_simulated(layer)
            for tensor, fake in layer.fake_quantizers().items()
        ]
        if not self._watched:
            raise ArgumentError("model", f"a {type(model).__name__} without fake quantisation", "a prepared model")
        self._every, self._armed, self._calls = every, True, 0
        self._path = None if path is None else file_path("path", path)
        if self._path is not None:
            _open_csv(self._path)
        self._writer = _writer(tensorboard)
        self._writes_alone = isinstance(tensorboard, (str, os.PathLike))
        self._handles = [watched.hook(self._is_armed) for watched in self._watched]

    def _is_armed(self) -> bool:
        return self._armed and not torch.compiler.is_compiling()

    @torch.no_grad()
    def __call__(self, step: int, loss: float | None = None) -> None:
        """Look at the step that has just run backward; write its rows where it is one of every `every`."""
        if self._armed:
            self.rows = [{"step": step, "loss": loss, **watched.look()} for watched in self._watched]
            if self._path is not None:
                _append(self._path, self.rows)
            for row in self.rows if self._writer is not None else ():
                for column in COLUMNS[4:]:
                    if row[column] is not None:
                        self._writer.add_scalar(f"{row['layer']}.{row['tensor']}/{column}", row[column], step)
        self._calls += 1
        self._armed = self._calls % self._every == 0

    def close(self) -> None:
        """Take the hooks out of the model, and close the writer that was made for a directory."""
        for handle in self._handles:
            handle.remove()
        if self._writes_alone:
            self._writer.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Watched:
    """One quantised tensor: what its forward passes since the last look clipped, and its first scale."""

    def __init__(self, layer_name: str, tensor: str, layer: nn.Module, fake: FakeQuantize) -> None:
        self.layer_name, self.tensor, self.layer, self.fake = layer_name, tensor, layer, fake
        self.seen: list[tuple[Tensor, int]] = []  # clipped (on its device: read at the look), elements
        self.log_scale: Tensor | None = None
        self.first: float | None = None

    def hook(self, is_armed: Callable[[], bool]) -> Any:
        # the integer forward does not call its input's quantiser: it makes codes
        module = self.layer if isinstance(self.layer, IntegerForwardLinear) and self.tensor == "input" else self.fake

        def observe(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            if is_armed() and torch.is_grad_enabled() and self.tensor != "weight" and self.fake.mode == "quantize":
                self.observe(inputs[0].detach())

        return module.register_forward_pre_hook(observe)

    def observe(self, x: Tensor) -> None:
        fake = self.fake
        if not fake.is_calibrated or x.numel() == 0:
            return
        scale, zero_point = fake.qparams(x)
        self.log_scale = scale.log().mean()
        if fake.follows:
            self.seen.append((torch.zeros((), dtype=torch.int64, device="cpu"), x.numel()))
            return
        mask = torch.ops.pyquant.fake_quantize(x, scale, zero_point, *fake.how)[1]
        inside = _ONES.to(mask.device)[mask.to(torch.int64)].sum(dtype=torch.int64)
        self.seen.append((x.numel() - inside, x.numel()))

    def look(self) -> dict[str, Any]:
        weight = getattr(self.layer, "weight", None) if self.tensor == "weight" else None
        if isinstance(weight, Tensor):
            self.observe(weight_matrix(self.layer))
        clipped, total = sum(int(c) for c, _ in self.seen), sum(n for _, n in self.seen)
        scale = None if self.log_scale is None else math.exp(float(self.log_scale))
        self.first = self.first if self.first is not None else scale
        source = weight if weight is not None else getattr(self.fake, "scale", None)
        grad = source.grad if isinstance(source, nn.Parameter) else None
        self.seen, self.log_scale = [], None
        drift = None if scale is None or not self.first else scale / self.first
        norm = None if grad is None else float(torch.linalg.vector_norm(grad.float()))
        figures = (self.layer_name, self.tensor, clipped / total if total else None, scale, drift, norm)
        return dict(zip(COLUMNS[2:], figures, strict=True))


def _open_csv(path: Path) -> None:
    """Accept a file of ours (or none), without the half line of a run that was killed."""
    if not os.path.lexists(path):
        return
    with os.fdopen(_regular(path, os.O_RDWR), "r+b") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return
        file.seek(0)
        header = file.readline(4096)
        if header.strip() != ",".join(COLUMNS).encode():
            raise ArgumentError("path", f"{path.name}, which begins with {header[:60]!r}", "a new file, or a monitor's")
        file.seek(max(file.seek(0, os.SEEK_END) - 65536, 0))
        start, tail = file.tell(), file.read()
        if not tail.endswith(b"\n"):
            file.truncate(start + tail.rfind(b"\n") + 1)


def _regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file; links are not followed, and opening a pipe does not block."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ArgumentError("path", f"{path}, a link", "a regular file, or a new one") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ArgumentError("path", f"{path}, which is no regular file", "a regular file, or a new one")
    return descriptor


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    descriptor = _regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        if os.fstat(descriptor).st_size == 0:
            writer.writeheader()
        writer.writerows(rows)
        data = text.getvalue().encode()
        while data:  # one write, unless the disk takes less
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


def _writer(tensorboard: Any) -> Any:
    if tensorboard is None or hasattr(tensorboard, "add_scalar"):
        return tensorboard
    if not isinstance(tensorboard, (str, os.PathLike)):
        raise ArgumentError("tensorboard", type(tensorboard).__name__, "None, a directory, or a writer with add_scalar")
    try:
        from torch.utils.tensorboard import SummaryWriter  # optional, and slow to import
    except ImportError as error:
        raise UnsupportedError(f"writing TensorBoard files needs the package tensorboard ({error})") from None
    return SummaryWriter(os.fspath(tensorboard))
