"""QConv2d on a GPU beside torch's own convolution in bf16: the layers of ResNet, ResNeXt and MobileNetV3.

    python -m bench.gpu_conv [--model NAME ...] [--layer TEXT ...] [--batch B ...] [--channels-first] [--clock faked]
        [--out DIR]

Floats in and out with dynamic and with static scales, and codes in and out as inside a linked chain; and the kernel
that the plan takes for each. The base of ratios is cuDNN's best kernel on channels_last images, its bias added as torch
adds it. First every result is compared with the CPU's: larger batches repeat the images of the smallest one, so that
each number has its bits to meet. bench/results/<gpu>/gpu_conv.json and .md are written after each layer and batch.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.cpu_conv import CODES, DYNAMIC, FORMATS, MODELS, SCHEMES, STATIC, Conv, codes_of, data_of, quantised
from bench.rows import DryRig
from bench.shared import check_counts, device_for, exit_code, folder_name, follow, geometric_mean, reason_of
from pyquant import QConv2d, QTensor, _native
from pyquant.core.patches import Patches
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import make_clock, time_interleaved
from pyquant.ops import layer_time, plan
from pyquant.report.records.environment import FAKED, Environment
from pyquant.report.render import bullets, page, section, table

BF16, NO_BIAS = "bf16", "bf16 without bias"
KINDS: Final = (DYNAMIC, STATIC, CODES)
LAST, FIRST = "channels_last", "channels first"
BATCHES: Final = (1, 8, 64)
IN_GROUPS: Final = ("given", "grouped_conv")  # one kernel, whatever the groups are
Run = Callable[[], Any]
_LEGEND: Final = (
    f"Below, microseconds a call; in brackets how many times as fast as {BF16}. MiB: memory besides the operands, the "
    f"result included, of {BF16} / {' / '.join(KINDS)}. Kernel: `given` reads the images (under a window of one pixel "
    "the rows that they are), `patches` a matrix that is written first, `bytes` padded rows. Exact: the CPU's bits."
)


@dataclass(frozen=True)
class GpuConvRow:
    """One layer at one batch in one memory format, by what is timed.

    us, ratio  microseconds a call, and how many times as fast as bf16.
    mib        memory that a call takes besides its operands, its result included; empty in a dry run.
    form, row  how the kernel finds its rows ('given': in the images; 'patches': in a matrix of them) and its name.
    exact      whether the result has the CPU's bits.
    """

    model: str
    layer: str
    memory: str
    batch: int
    us: dict[str, float]
    ratio: dict[str, float]
    mib: dict[str, float]
    form: dict[str, str]
    row: dict[str, str]
    exact: dict[str, bool]


@dataclass(frozen=True)
class GpuConvReport:
    """All rows, and why one failed: {layer, batch and memory format: reason}."""

    environment: Environment
    rows: list[GpuConvRow] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether everything ran and has the bits of the CPU."""
        return not self.failed and all(all(row.exact.values()) for row in self.rows)


def moved(layer: QConv2d, device: str) -> QConv2d:
    """A copy of the layer on the device."""
    return copy.deepcopy(layer).to(device)


def candidates(
    conv: Conv, batch: int, first: int, memory: str, device: str
) -> tuple[dict[str, Run], dict[str, Tensor]]:
    """What is timed, by name, and what the CPU says that it gives. first: images that are not repetitions."""
    torch.manual_seed(0)
    floats = conv.module()
    layers = quantised(floats)
    x = torch.randn(first, conv.channels, conv.size, conv.size, device="cpu").to(torch.bfloat16)
    x = x.to(memory_format=FORMATS[memory])

    def repeated(images: Tensor) -> Tensor:
        return images[torch.arange(batch, device="cpu") % first].to(memory_format=FORMATS[memory])

    last = repeated(x).to(device, memory_format=torch.channels_last)
    own = floats.to(device, torch.bfloat16, memory_format=torch.channels_last)
    bare = partial(F.conv2d, last, own.weight, None, own.stride, own.padding, groups=conv.groups)
    runs: dict[str, Run] = {BF16: partial(own, last), NO_BIAS: bare}
    wanted: dict[str, Tensor] = {}
    for kind, layer in layers.items():
        given: Tensor | QTensor = codes_of(x, layer) if kind == CODES else x
        with torch.inference_mode():
            wanted[kind] = repeated(data_of(layer(given)))
        there, images = moved(layer, device), repeated(data_of(given)).to(device)
        # the layer's own scale: codes of an equal one elsewhere are compared by value, which a graph cannot capture
        runs[kind] = partial(there, QTensor(images, there.input_scale) if kind == CODES else images)
    return runs, wanted


def has_bits(got: Tensor | QTensor, want: Tensor) -> bool:
    """Whether a result has the bits of another one: -0.0 is not 0.0."""
    bits = [t.view(torch.int16) if t.is_floating_point() else t for t in (data_of(got).cpu(), want)]
    return torch.equal(*bits)


def problem_of(conv: Conv, batch: int, scheme: QScheme, out_dtype: torch.dtype) -> tuple[str, dict[str, Any]]:
    """(entry, problem) of the plan's route, as csrc/bind/conv_cuda.cpp asks it for images on the device."""
    window = Patches.make(conv.kernel, conv.stride, conv.kernel // 2)
    height, width = window.out_size(conv.size, conv.size)
    spec = layer_time.spec_of(scheme, conv.out, conv.channels * window.pixels, None)
    problem = plan.problem_of(spec, batch * height * width, out_dtype)
    problem |= {"x": "s8", "k": spec.k, "ldx": conv.channels, "x_align": math.gcd(16, conv.channels)}
    if conv.kernel == conv.stride == 1:
        return "linear", problem
    full = conv.size + 2 * (conv.kernel // 2)
    return "conv", problem | {"image": plan.image_rows(window, full, full, conv.channels)}


def routes(conv: Conv, batch: int, chip: Mapping[str, Any], *, only_compiled: bool) -> dict[str, tuple[str, str]]:
    """(form, name of the row) that the plan takes on a chip for each kind; only_compiled: of this build's rows."""
    if conv.groups > 1:
        return dict.fromkeys(SCHEMES, IN_GROUPS)
    found = {}
    for kind, scheme in SCHEMES.items():
        entry, problem = problem_of(conv, batch, scheme, torch.int8 if kind == CODES else torch.bfloat16)
        form, name, *_ = _native.route(entry, problem, dict(chip), only_compiled=only_compiled)
        found[kind] = (form, name or "none")
    return found


def _mib(run: Run, device: str) -> float:
    """Of memory that a call takes at its peak, once it is warm."""
    run()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def timed(model: str, conv: Conv, batch: int, first: int, memory: str, clock: str, rounds: int) -> GpuConvRow:
    """One row, on the GPU or, with a faked clock, on the CPU."""
    device = device_for(clock)
    chip = vars(plan.Device.of(torch.device(device))) if device == "cuda" else DryRig.device
    runs, wanted = candidates(conv, batch, first, memory, device)
    # cuDNN times its kernels in the first call and takes the best one from then on.
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, benchmark=True):
        exact = {kind: has_bits(runs[kind](), want) for kind, want in wanted.items()}
        mib = {name: _mib(run, device) for name, run in runs.items()} if device == "cuda" else {}
        timings = time_interleaved(runs, clock=make_clock(clock), rounds=rounds, min_sample_s=0.002, warm_calls=2)
    found = routes(conv, batch, chip, only_compiled=device == "cuda")
    return GpuConvRow(
        model,
        conv.name(),
        memory,
        batch,
        {name: timings.median_us(name) for name in runs},
        {name: timings.ratio(BF16, name) for name in runs},
        mib,
        {kind: form for kind, (form, _) in found.items()},
        {kind: name for kind, (_, name) in found.items()},
        exact,
    )


def measure(
    work: Sequence[tuple[str, Conv]],
    batches: Sequence[int],
    memories: Sequence[str],
    clock: str,
    rounds: int,
    report: GpuConvReport,
) -> Iterator[str]:
    """Fills the report, row by row. -> what was done."""
    for (model, conv), memory, batch in itertools.product(work, memories, batches):
        what = f"{model} {conv.name()}, {memory}, batch {batch}"
        try:
            row = timed(model, conv, batch, min(batches), memory, clock, rounds)
        except RuntimeError as error:  # UnsupportedError among them
            report.failed[what] = reason_of(error)
            yield f"{what}: failed"
            continue
        report.rows.append(row)
        yield f"{what}: timed" + "".join(f", {kind} has WRONG BITS" for kind, right in row.exact.items() if not right)


def _kernels(row: GpuConvRow) -> str:
    """The kernels of a row, those of several kinds once."""
    kinds: dict[str, list[str]] = {}
    for kind in row.row:
        kinds.setdefault(f"{row.form[kind]} {row.row[kind].removeprefix('gemm_')}", []).append(kind)
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"{', '.join(names)}: {kernel}" for kernel, names in kinds.items())


def _table(rows: Sequence[GpuConvRow]) -> str:
    """Those of one memory format and batch."""
    lines = []
    for row in rows:
        cells = [row.model, row.layer, f"{row.us[BF16]:.1f}", f"{row.us[NO_BIAS]:.1f}"]
        cells += [f"{row.us[kind]:.1f} ({row.ratio[kind]:.2f}x)" for kind in KINDS]
        cells += [" / ".join(f"{row.mib[name]:.1f}" for name in (BF16, *KINDS)) if row.mib else "-"]
        wrong = [kind for kind, right in row.exact.items() if not right]
        lines.append([*cells, _kernels(row), f"NO: {', '.join(wrong)}" if wrong else "yes"])
    return table(["model", "layer", BF16, "without bias", *KINDS, "MiB", "kernel", "exact"], lines)


def _groups(rows: Sequence[GpuConvRow]) -> dict[tuple[str, int], list[GpuConvRow]]:
    groups: dict[tuple[str, int], list[GpuConvRow]] = {}
    for row in rows:
        groups.setdefault((row.memory, row.batch), []).append(row)
    return groups


def _summary(rows: Sequence[GpuConvRow]) -> str:
    """A line for each memory format, batch and kind."""
    lines = []
    for (memory, batch), some in _groups(rows).items():
        for kind in KINDS:
            ratios = [row.ratio[kind] for row in some]
            worst = min(some, key=lambda row: row.ratio[kind])
            slower = sum(ratio < 1 for ratio in ratios)
            cells = [memory, batch, kind, len(ratios), f"{geometric_mean(ratios):.2f}", slower]
            lines.append([*cells, f"{worst.ratio[kind]:.2f}: {worst.model} {worst.layer}"])
    return table(["memory", "batch", "", "layers", "geometric mean", f"slower than {BF16}", "least"], lines)


def markdown(report: GpuConvReport) -> str:
    """How many times as fast as bf16 over all layers; then a table for each memory format and batch."""
    parts = ["# Convolutions on a GPU", report.environment.line()]
    if report.rows:
        parts += [
            f"How many times as fast as torch's convolution in {BF16} of channels_last images:",
            _summary(report.rows),
            _LEGEND,
        ]
    for (memory, batch), some in _groups(report.rows).items():
        parts.append(section(f"{memory}, batch {batch}", _table(some)))
    parts.append(bullets(f"{what} failed: {why}" for what, why in report.failed.items()))
    return page([*parts, f"Command: `{report.environment.command}`"])


def main(argv: list[str] | None = None) -> int:
    """-> 0; 1 when a layer failed or a bit is wrong; 2 without a GPU, or for wrong words."""
    return exit_code("bench.gpu_conv", _run, argv)


def _run(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_conv", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", nargs="+", choices=[*MODELS], default=[*MODELS], metavar="NAME", help=f"of: {', '.join(MODELS)}")
    add("--layer", nargs="+", metavar="TEXT", help="only layers whose names hold one of these, such as 3x3/2")
    add("--batch", nargs="+", type=int, default=list(BATCHES), metavar="B", help=f"default: {BATCHES}")
    add("--channels-first", action="store_true", help="also images that lie channels first")
    add("--rounds", type=int, default=7, help="interleaved rounds (default: 7)")
    add("--clock", choices=("cuda-graph", FAKED), default="cuda-graph", help="faked: a dry run")
    add("--out", metavar="DIR", help="default: bench/results/<gpu>")
    args = parser.parse_args(argv)
    check_counts(args, "batch", "rounds")
    work = [(model, conv) for model in args.model for conv in MODELS[model]]
    if args.layer:
        work = [(model, conv) for model, conv in work if any(text in conv.name() for text in args.layer)]
    if not work:
        raise ArgumentError("--layer", " ".join(args.layer), "a part of a layer's name, such as 64->64 or 3x3")
    report = GpuConvReport(describe_environment(device_for(args.clock), clock=args.clock))
    out = Path(args.out or Path("bench/results") / folder_name(report.environment))
    memories = (LAST, FIRST) if args.channels_first else (LAST,)
    steps = measure(work, args.batch, memories, args.clock, args.rounds, report)
    follow("bench.gpu_conv", steps, report, markdown, out)
    return 0 if report.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
