"""doctor(): what runs natively here, what does not and why, and a self-test of every scheme."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from pyquant.core.presets import PRESETS
from pyquant.core.scheme import QScheme
from pyquant.errors import PyquantError
from pyquant.measure.environment import DOT_PRODUCTS, cpu_features, describe_environment, package_version
from pyquant.measure.gpu_runtime import GpuRuntime, gpu_lines, gpu_problems, gpu_runtime
from pyquant.report.records.environment import Environment

_OPTIONAL = {
    "tqdm": "progress bars",
    "yaml": "YAML configuration files",
    "matplotlib": "plots",
    "transformers": "Hugging Face models",
    "torchao": "one more peer in `bench gemm`",
}
_EMBEDDING = "embeddings=True"  # the option of quantize_, in the column of the schemes
_SELF_TEST_SHAPES = ((1, 96, 40), (7, 160, 33))  # M, K, N: tails in M and N; K divides into groups of 32


@dataclass(frozen=True)
class Capability:
    """One scheme on one device. exact: its bits equal the specification's; None: outside the exact contract."""

    scheme: str
    device: str
    runs: bool
    exact: bool | None
    kernel: str
    reason: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What doctor() found. problems: empty when all is well."""

    environment: Environment
    native_library: str
    cuda: list[str]
    optional: dict[str, str]
    capabilities: list[Capability]
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        from pyquant.report.render import table

        machine, isa = self.environment, ", ".join(self.environment.cpu_isa) or "none known"
        header = ["scheme", "device", "runs", "bits equal the specification", "kernel or reason"]
        lines = [
            f"pyquant {machine.pyquant or 'unknown'}, torch {machine.torch}, Python {machine.python}, {machine.system}",
            f"CPU: {machine.cpu}, {machine.cores} cores ({machine.threads} threads), {isa}",
            f"native library: {self.native_library}",
            *[f"CUDA: {line}" for line in self.cuda],
            "optional: " + "; ".join(f"{n} {v or f'not installed ({_OPTIONAL[n]})'}" for n, v in self.optional.items()),
            "",
            table(header, map(_row, self.capabilities)),
            "",
            *[f"remark: {remark}" for remark in self.remarks],
            *[f"problem: {problem}" for problem in self.problems],
            "all is well" if self.ok else f"{len(self.problems)} problem(s) found",
        ]
        return "\n".join(lines)


def doctor() -> Diagnosis:
    """Examine this machine: libraries, instruction sets, GPUs, and a bit-exact self-test of every scheme.

    ->  Diagnosis; str() of it is the report that `pyquant doctor` prints.

    Example:
        >>> doctor().native_library != ""
        True
    """
    from pyquant.ops import why_not_native

    problems: list[str] = []
    why_not = why_not_native()
    native = "compiled library in use" if why_not is None else f"not in use: {why_not}"
    if why_not is not None:
        problems.append(f"native library {native}; the ops run in plain PyTorch: the same bits, much slower")
    gpus = gpu_runtime()
    problems += gpu_problems(gpus)
    devices = ["cpu", *(f"cuda:{i}" for i in range(len(gpus.torch_gpus)))]
    capabilities = [capability for device in devices for capability in _capabilities(device)]
    problems += [
        f"{c.scheme} on {c.device}: bits differ from the specification" for c in capabilities if c.exact is False
    ]
    problems += [f"{c.scheme} on {c.device} does not run: {c.reason}" for c in capabilities if not c.runs]
    return Diagnosis(
        environment=describe_environment("cpu"),
        native_library=native,
        cuda=_cuda_lines(gpus),
        optional={name: _installed(name) for name in _OPTIONAL},
        capabilities=capabilities,
        problems=problems,
        remarks=_remarks(),
    )


def _capabilities(device: str) -> Iterator[Capability]:
    for name, preset in PRESETS.items():
        options = {"group_size": 32} if "group_size" in preset.__code__.co_varnames and name.startswith("W4") else {}
        yield _tried(name, device, partial(_scheme, preset(**options)))
    yield _tried(_EMBEDDING, device, _embedding)


def _tried(name: str, device: str, test: Callable[[str], tuple[bool | None, str]]) -> Capability:
    """test(device) -> whether the bits are right (None: not promised), and the kernel."""
    try:
        exact, kernel = test(device)
    except (PyquantError, RuntimeError) as error:
        return Capability(name, device, False, None, "", str(error).splitlines()[0])
    return Capability(name, device, True, exact, kernel)


def _embedding(device: str) -> tuple[bool, str]:
    """What quantize_(embeddings=True) makes of nn.Embedding, against codes times row scales in plain torch."""
    from pyquant.nn.qembedding import QEmbedding

    layer = QEmbedding.from_float(torch.nn.Embedding(64, 48, device=device))
    rows = torch.arange(64, device=device)
    exact = torch.equal(layer(rows), layer.codes.float() * layer.weight_scale_[:, None])
    return exact, "int8 rows, dequantised at look-up"


def _scheme(scheme: QScheme, device: str) -> tuple[bool | None, str]:
    from pyquant.bench.problem import inputs_of
    from pyquant.measure.exact import is_exact

    dtype = torch.float32 if device == "cpu" else torch.float16
    exact: bool | None = None
    for m, k, n in _SELF_TEST_SHAPES:
        layer, x = inputs_of(m, k, n, device).qlinear(scheme, dtype)
        if scheme.is_integer:
            exact = is_exact(layer, x) and exact is not False
        else:
            with torch.inference_mode():
                layer(x)
    return exact, layer.kernel_info(m).kernel


def _cuda_lines(gpus: GpuRuntime) -> list[str]:
    lines = []
    for i in range(len(gpus.torch_gpus)):
        environment = describe_environment(f"cuda:{i}")
        lines.append(f"cuda:{i}: {environment.gpu}, driver {environment.driver or 'unknown'}")
    lines += gpu_lines(gpus)
    if not gpus.native_error and gpus.build["cuda"]:
        lines += kernel_lines(importlib.import_module("pyquant._native").kernel_table())
    return lines


def kernel_lines(kernels: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the rows of the native kernel table come to: which have machine code in this build, and which do not."""
    compiled = [str(kernel["name"]) for kernel in kernels if kernel["compiled"]]
    if not compiled:
        return [f"none of {len(kernels)} kernels has machine code here"]
    lines = [f"{len(compiled)} of {len(kernels)} kernels have machine code here: {', '.join(compiled)}"]
    missing = [str(kernel["name"]) for kernel in kernels if not kernel["compiled"]]
    return lines + ([f"left out at build time: {', '.join(missing)}"] if missing else [])


def _remarks() -> list[str]:
    from pyquant.ops import tuned

    remarks = [f"measured kernel choices: {line}" for line in tuned.remarks()]
    flags = cpu_features()
    if flags and not flags & DOT_PRODUCTS:
        slow = "this CPU has no int8 dot products (VNNI, AMX, SDOT): integer layers are exact but not much faster"
        remarks.insert(0, slow)
    return remarks


def _installed(module: str) -> str:
    if importlib.util.find_spec(module) is None:
        return ""
    return package_version("pyyaml" if module == "yaml" else module) or "yes"


def _row(c: Capability) -> list[str]:
    exact = {True: "yes", False: "NO", None: "not promised"}[c.exact]
    return [c.scheme, c.device, "yes" if c.runs else "no", exact if c.runs else "-", c.kernel or c.reason]
