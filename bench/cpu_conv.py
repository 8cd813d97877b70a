"""QConv2d on a CPU beside F.conv2d in fp32: the convolutions of ResNet, ResNeXt and MobileNetV3, and chains of codes.

`python -m bench.cpu_conv` runs with the machine's threads (`--threads 1`: one thread, CPU time), takes about three
minutes and writes bench/results/cpu-<model>/; exit code 1 when a layer is slower than fp32 or a bit is wrong.
`--schemes W8A8Dynamic W4A8Dynamic` times layers of these schemes instead, without chains and goals.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn

from bench.shared import folder_name, geometric_mean
from pyquant import QConv2d, QScheme, QTensor
from pyquant.cli.progress import ProgressBar
from pyquant.core.presets import W8A8, W8A8Dynamic, scheme_from_name
from pyquant.core.scheme import TensorScheme
from pyquant.errors import PyquantError
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import default_clock, make_clock, time_interleaved, using_threads
from pyquant.nn.indivisible import fitted
from pyquant.report.records.bench import Bar
from pyquant.report.records.environment import Environment
from pyquant.report.records.figures import figures_of
from pyquant.report.records.record import save_record
from pyquant.report.render import write_text

FORMATS: Final = {"channels first": torch.contiguous_format, "channels_last": torch.channels_last}
DYNAMIC, STATIC, CODES, FP32 = "dynamic", "static", "codes", "fp32"
INPUT_SCALE: Final = 0.03
SCHEMES: Final = {
    DYNAMIC: W8A8Dynamic(),
    STATIC: W8A8(),
    CODES: QScheme(W8A8().weights, W8A8().inputs, TensorScheme()),
}


@dataclass(frozen=True)
class Conv:
    """in, out, kernel, stride, height and width of the image, groups."""

    channels: int
    out: int
    kernel: int
    stride: int
    size: int
    groups: int = 1

    def name(self) -> str:
        groups = "" if self.groups == 1 else " depthwise" if self.groups == self.channels else f" in {self.groups}"
        return f"{self.channels}->{self.out} {self.kernel}x{self.kernel}/{self.stride} @{self.size}{groups}"

    def module(self) -> nn.Conv2d:
        """With random weights, and half of its kernel as padding."""
        shape = (self.channels, self.out, self.kernel, self.stride, self.kernel // 2)
        return nn.Conv2d(*shape, groups=self.groups).eval()


def depthwise(channels: int, kernel: int, stride: int, size: int) -> Conv:
    return Conv(channels, channels, kernel, stride, size, channels)


# Every kind of convolution in them once, at 224 x 224; of ResNeXt-50 32x4d those in groups.
RESNET_18: Final = (
    Conv(3, 64, 7, 2, 224),
    Conv(64, 64, 3, 1, 56),
    Conv(64, 128, 3, 2, 56),
    Conv(64, 128, 1, 2, 56),
    Conv(128, 128, 3, 1, 28),
    Conv(128, 256, 3, 2, 28),
    Conv(256, 256, 3, 1, 14),
    Conv(256, 512, 3, 2, 14),
    Conv(512, 512, 3, 1, 7),
)
RESNET_50: Final = (
    Conv(64, 64, 1, 1, 56),
    Conv(64, 256, 1, 1, 56),
    Conv(256, 64, 1, 1, 56),
    Conv(256, 128, 1, 1, 56),
    Conv(128, 128, 3, 2, 56),
    Conv(128, 512, 1, 1, 28),
    Conv(256, 512, 1, 2, 56),
    Conv(512, 128, 1, 1, 28),
    Conv(256, 1024, 1, 1, 14),
    Conv(1024, 256, 1, 1, 14),
    Conv(512, 2048, 1, 1, 7),
    Conv(2048, 512, 1, 1, 7),
)
MOBILENET_V3: Final = (
    Conv(3, 16, 3, 2, 224),
    Conv(16, 16, 1, 1, 112),
    Conv(16, 64, 1, 1, 112),
    Conv(64, 24, 1, 1, 56),
    Conv(24, 72, 1, 1, 56),
    Conv(72, 40, 1, 1, 28),
    Conv(40, 240, 1, 1, 28),
    Conv(240, 80, 1, 1, 14),
    Conv(80, 480, 1, 1, 14),
    Conv(112, 672, 1, 1, 14),
    Conv(672, 160, 1, 1, 7),
    Conv(160, 960, 1, 1, 7),
    depthwise(16, 3, 1, 112),
    depthwise(64, 3, 2, 112),
    depthwise(72, 3, 1, 56),
    depthwise(72, 5, 2, 56),
    depthwise(120, 5, 1, 28),
    depthwise(240, 3, 2, 28),
    depthwise(200, 3, 1, 14),
    depthwise(184, 3, 1, 14),
    depthwise(480, 3, 1, 14),
    depthwise(672, 3, 1, 14),
    depthwise(672, 5, 2, 14),
    depthwise(960, 5, 1, 7),
)
RESNEXT_50: Final = (
    Conv(128, 128, 3, 1, 56, 32),
    Conv(256, 256, 3, 2, 56, 32),
    Conv(256, 256, 3, 1, 28, 32),
    Conv(512, 512, 3, 2, 28, 32),
    Conv(512, 512, 3, 1, 14, 32),
    Conv(1024, 1024, 3, 2, 14, 32),
    Conv(1024, 1024, 3, 1, 7, 32),
)
MODELS: Final = {
    "ResNet-18": RESNET_18,
    "ResNet-50": RESNET_50,
    "ResNeXt-50": RESNEXT_50,
    "MobileNetV3": MOBILENET_V3,
}
# Three layers of a stage, one after another: (channels, size).
CHAINS: Final = ((64, 56), (128, 28), (256, 14))


@dataclass(frozen=True)
class ConvRow:
    """One layer in one memory format: microseconds a call, and how many times as fast as fp32."""

    model: str
    layer: str
    memory: str
    us: dict[str, float]
    ratio: dict[str, float]
    exact: bool


@dataclass(frozen=True)
class ConvReport:
    """All layers and chains of one run."""

    environment: Environment
    rows: list[ConvRow]
    bars: list[Bar] = field(default_factory=list)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_conv", description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: all")
    parser.add_argument(
        "--schemes", nargs="+", metavar="S", help="dynamic presets, such as 'W4A8Dynamic(group_size=32)'"
    )
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds a layer (default: 9)")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds a layer after which rounds end (default: 1)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; 1: CPU time (default: the machine's)")
    parser.add_argument("--out", default=None, metavar="DIR", help="default: bench/results/cpu-<model>")
    args = parser.parse_args(argv)
    if args.threads is not None and args.threads < 1:
        parser.error(f"--threads {args.threads}: at least 1")
    try:
        args.schemes = {name: scheme_from_name(name) for name in args.schemes or ()}
    except PyquantError as error:
        parser.error(f"--schemes: {error}")
    if static := [name for name, scheme in args.schemes.items() if scheme.is_static]:
        parser.error(f"--schemes {', '.join(static)}: static inputs; dynamic ones, which need no data")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with using_threads(args.threads):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    work = [(model, conv) for model in args.model for conv in MODELS[model]]
    chains = () if args.schemes else CHAINS
    rows: list[ConvRow] = []
    with ProgressBar("cpu_conv", len(work) + len(chains)) as shown, torch.inference_mode():
        for model, conv in work:
            shown.step(f"{model} {conv.name()}")
            rows += [row(model, conv, memory, args.rounds, args.budget, args.schemes) for memory in FORMATS]
        for channels, size in chains:
            shown.step(f"chain of {channels} channels")
            rows += [chain(channels, size, memory, args.rounds, args.budget) for memory in FORMATS]
    threads = torch.get_num_threads()
    report = ConvReport(describe_environment(clock=default_clock(threads)), rows, [] if args.schemes else bars_of(rows))
    text = markdown(report)
    print(text)
    out = Path(args.out or Path("bench/results") / folder_name(report.environment))
    name = f"cpu_conv{'_schemes' * bool(args.schemes)}{'_one_thread' * (threads == 1)}"
    print(
        "wrote {}, {}".format(
            write_text(out / f"{name}.md", text), save_record(out / f"{name}.json", figures_of(report))
        )
    )
    return 0 if all(row.exact for row in rows) and all(bar.passed for bar in report.bars) else 1


def row(
    model: str,
    conv: Conv,
    memory: str,
    rounds: int,
    budget_s: float,
    schemes: Mapping[str, QScheme] = MappingProxyType({}),
) -> ConvRow:
    """One layer without activation: floats in and out; `codes`: int8 in and out, as inside a linked chain.

    schemes   times these instead; groups that do not divide the layer's K are one scale a channel, as in quantize_."""
    torch.manual_seed(0)
    floats = conv.module()
    x = torch.randn(1, conv.channels, conv.size, conv.size, device="cpu").to(memory_format=FORMATS[memory])
    if schemes:
        return _of_schemes(model, conv, memory, (floats, x), schemes, rounds, budget_s)
    dynamic, static, linked = quantised(floats).values()
    codes = codes_of(x, linked)
    floats = floats.to(memory_format=FORMATS[memory])
    runs: dict[str, Callable[[], object]] = {
        FP32: lambda: floats(x),
        DYNAMIC: lambda: dynamic(x),
        STATIC: lambda: static(x),
        CODES: lambda: linked(codes),
    }
    exact = torch.equal(dynamic(x), dynamic.reference(x)) and torch.equal(static(x), static.reference(x))
    exact = exact and torch.equal(linked(codes).data, linked.reference(codes).data)
    return _timed(model, conv.name(), memory, runs, rounds, budget_s, exact)


def quantised(floats: nn.Conv2d) -> dict[str, QConv2d]:
    """The layer in every form: dynamic, static, codes."""
    scales = {DYNAMIC: {}, STATIC: {"input_scale": INPUT_SCALE}}
    scales[CODES] = {"input_scale": INPUT_SCALE, "output_scale": INPUT_SCALE}
    return {kind: QConv2d.from_float(floats, scheme, **scales[kind]) for kind, scheme in SCHEMES.items()}


def _of_schemes(
    model: str,
    conv: Conv,
    memory: str,
    layer: tuple[nn.Conv2d, Tensor],
    schemes: Mapping[str, QScheme],
    rounds: int,
    budget_s: float,
) -> ConvRow:
    floats, x = layer
    layers = {}
    for name, scheme in schemes.items():
        fits, _ = fitted(scheme, floats, "per_channel")
        assert fits is not None  # "skip" alone leaves layers
        layers[name] = QConv2d.from_float(floats, fits)
    exact = all(torch.equal(twin(x), twin.reference(x)) for twin in layers.values())
    floats = floats.to(memory_format=FORMATS[memory])
    runs: dict[str, Callable[[], object]] = {FP32: lambda: floats(x)}
    runs |= {name: partial(twin, x) for name, twin in layers.items()}
    return _timed(model, conv.name(), memory, runs, rounds, budget_s, exact)


def chain(channels: int, size: int, memory: str, rounds: int, budget_s: float) -> ConvRow:
    """Three 3 x 3 layers with relu: fused static ones hand on codes, dynamic ones floats."""
    torch.manual_seed(0)
    convs = [nn.Conv2d(channels, channels, 3, padding=1).eval() for _ in range(3)]
    x = torch.randn(1, channels, size, size, device="cpu").to(memory_format=FORMATS[memory])
    dynamic = [QConv2d.from_float(conv, SCHEMES[DYNAMIC], activation="relu") for conv in convs]
    scales = {"input_scale": INPUT_SCALE, "activation": "relu"}
    static = [QConv2d.from_float(conv, SCHEMES[CODES], output_scale=INPUT_SCALE, **scales) for conv in convs[:2]]
    static.append(QConv2d.from_float(convs[2], SCHEMES[STATIC], **scales))
    fp32 = nn.Sequential(*(layer for conv in convs for layer in (conv, nn.ReLU()))).to(memory_format=FORMATS[memory])
    runs: dict[str, Callable[[], object]] = {
        FP32: lambda: fp32(x),
        DYNAMIC: lambda: _through(dynamic, x),
        CODES: lambda: _through(static, x),
    }
    real: Tensor | QTensor = x
    exact = True
    for layer in static:
        wanted, real = layer.reference(real), layer(real)
        exact = exact and torch.equal(data_of(wanted), data_of(real))
    return _timed("chain", f"3 x {channels}->{channels} 3x3 @{size}", memory, runs, rounds, budget_s, exact)


def codes_of(x: Tensor, layer: QConv2d) -> QTensor:
    """Images as the codes that a linked layer takes, in the memory format that they have."""
    data = torch.ops.pyquant.quantize(x.permute(0, 2, 3, 1), layer.input_scale_, None, "per_tensor", 0, -127, 127)
    data = data.permute(0, 3, 1, 2)
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return QTensor(data if last else data.contiguous(), layer.input_scale_)


def _through(layers: Sequence[nn.Module], x: object) -> object:
    for layer in layers:
        x = layer(x)
    return x


def data_of(x: Tensor | QTensor) -> Tensor:
    """The numbers or the codes."""
    return x.data if isinstance(x, QTensor) else x


def _timed(
    model: str,
    layer: str,
    memory: str,
    runs: dict[str, Callable[[], object]],
    rounds: int,
    budget_s: float,
    exact: bool,
) -> ConvRow:
    clock = make_clock(default_clock(torch.get_num_threads()))
    timings = time_interleaved(runs, clock=clock, rounds=rounds, budget_s=budget_s)
    us = {name: timings.median_us(name) for name in runs}
    return ConvRow(model, layer, memory, us, {name: timings.ratio(FP32, name) for name in runs if name != FP32}, exact)


def bars_of(rows: Sequence[ConvRow]) -> list[Bar]:
    """Never slower than fp32, kind by kind and memory by memory; chains of codes never slower than dynamic ones."""
    bars = []
    for memory in FORMATS:
        layers = [row for row in rows if row.model != "chain" and row.memory == memory]
        for kind in (DYNAMIC, STATIC, CODES) if layers else ():
            ratios = [row.ratio[kind] for row in layers]
            mean = f"mean {geometric_mean(ratios):.2f}x"
            bars.append(Bar(f"{kind}, {memory}: smallest ratio to fp32 of {len(ratios)} ({mean})", 1.0, min(ratios)))
    chains = [row.us[DYNAMIC] / row.us[CODES] for row in rows if row.model == "chain"]
    if chains:
        bars.append(Bar(f"chains of codes against dynamic ones, smallest of {len(chains)}", 1.0, min(chains)))
    return bars


def markdown(report: ConvReport) -> str:
    """The table, with the machine and the bars."""
    kinds = list(dict.fromkeys(kind for row in report.rows for kind in row.ratio))
    lines = ["# Convolutions", "", report.environment.line(), ""]
    lines += ["| model | layer | memory | fp32 us | " + " | ".join(kinds) + " | exact |"]
    lines += ["|---" * (len(kinds) + 5) + "|"]
    for row in report.rows:
        cells = [row.model, row.layer, row.memory, f"{row.us[FP32]:.0f}"]
        cells += [f"{row.us[k]:.0f} ({row.ratio[k]:.2f}x)" if k in row.us else "" for k in kinds]
        lines.append("| " + " | ".join([*cells, "yes" if row.exact else "NO"]) + " |")
    lines += [
        "",
        "Microseconds a call, one image; in brackets how many times as fast as fp32.",
        "",
        *means(report.rows),
        *([""] if report.bars else []),
    ]
    for bar in report.bars:
        verdict = "PASS" if bar.passed else "MISS"
        lines.append(f"- {verdict}: {bar.name}: {bar.measured:.2f} (goal {bar.direction} {bar.goal:g})")
    return "\n".join([*lines, "", f"Command: `{report.environment.command}`", ""])


def means(rows: Sequence[ConvRow]) -> list[str]:
    """Geometric means, a line for each model, memory format and kind of layer: depthwise ones apart from others."""
    found: dict[tuple[str, str], list[ConvRow]] = {}
    for row in rows:
        model = f"{row.model}, depthwise" if row.layer.endswith("depthwise") else row.model
        found.setdefault((model, row.memory), []).append(row)
    told = []
    for (model, memory), members in found.items():
        ratios = {kind: geometric_mean([row.ratio[kind] for row in members]) for kind in members[0].ratio}
        told.append(f"- {model}, {memory}: " + ", ".join(f"{kind} {ratio:.2f}x" for kind, ratio in ratios.items()))
    return told


if __name__ == "__main__":
    sys.exit(main())
