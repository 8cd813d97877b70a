"""Measures the variants: fidelity over sentences, latency interleaved, save and reload in a second process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import pyquant
from bench.minilm.model import Embedder, Variant, tokenise
from bench.minilm.report import ModelRow
from pyquant.measure.timing import Clock, Timings, time_interleaved

Inputs = Mapping[str, tuple[Tensor, Tensor]]


def latency_inputs(texts: list[str], device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
    """The two timed inputs, filled with real text to the last token: batch 1 of 24 tokens, batch 32 of 32 tokens."""
    one = tokenise([" ".join(texts)], tokens=24)
    many = tokenise([" ".join(texts[i : i + 6]) for i in range(32)], tokens=32)
    return {
        "batch 1, 24 tokens": (one[0].to(device), one[1].to(device)),
        "batch 32, 32 tokens": (many[0].to(device), many[1].to(device)),
    }


@torch.inference_mode()
def embed(model: Embedder, texts: list[str], device: torch.device, batch: int = 20) -> Tensor:
    """float64 [sentences, 384] on the CPU."""
    parts = []
    for start in range(0, len(texts), batch):
        ids, mask = tokenise(texts[start : start + batch])
        parts.append(model(ids.to(device), mask.to(device)).double().cpu())
    return torch.cat(parts)


def measure_latency(
    models: Mapping[str, Embedder], inputs: Inputs, clock: Clock, rounds: int, tick: Callable[[str], None]
) -> dict[str, Timings]:
    """Every variant at every input, interleaved."""
    timings = {}
    for name, (ids, mask) in inputs.items():
        tick(f"latency, {name}")
        calls = {variant: _call(model, ids, mask) for variant, model in models.items()}
        timings[name] = time_interleaved(calls, clock=clock, rounds=rounds, min_sample_s=0.02, warm_calls=2)
    return timings


def model_row(
    variant: Variant,
    model: Embedder,
    embedded: Tensor,
    reference: Tensor,
    texts: list[str],
    timings: Mapping[str, Timings],
    baseline: str,
) -> ModelRow:
    """One row of the report; fidelity against `reference`, the baseline's embeddings of the same texts."""
    cosine = (embedded * reference).sum(1)
    worst = int(cosine.argmin())
    return ModelRow(
        variant=variant.name,
        state_bytes=state_bytes(model),
        latency_ms={name: t.median_us(variant.name) / 1e3 for name, t in timings.items()},
        speedup={name: t.ratio(baseline, variant.name) for name, t in timings.items()},
        cosine_mean=float(cosine.mean()),
        cosine_min=float(cosine[worst]),
        nearest_same=float((_nearest(embedded) == _nearest(reference)).double().mean()),
        worst_text="" if variant.name == baseline else texts[worst],
        ours=variant.ours,
    )


def state_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers that a checkpoint would hold, packed torch.ao weights included."""
    total = sum(t.nbytes for t in model.state_dict().values() if isinstance(t, Tensor))
    for module in model.modules():
        packed = getattr(module, "_packed_params", None)
        if packed is not None and hasattr(packed, "_weight_bias"):
            weight, bias = packed._weight_bias()
            total += weight.numel() + (0 if bias is None else bias.nbytes)
    return total


def scale_and_vector_bytes(model: torch.nn.Module) -> int:
    """Bytes of what is not a matrix of codes: scales, zero points, biases, norms."""
    return sum(
        t.nbytes
        for name, t in model.state_dict().items()
        if isinstance(t, Tensor) and (t.dim() < 2 or name.endswith(("_scale", "_zero_point")))
    )


def save(model: Embedder, folder: Path) -> int:
    """Save the model, in place of an earlier run's. -> bytes on disk."""
    shutil.rmtree(folder, ignore_errors=True)
    pyquant.save_pretrained(model, folder)
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def reload_elsewhere(saved: Mapping[Path, tuple[Variant, Embedder]], inputs: Inputs, probe: Path) -> dict[str, bool]:
    """Load every saved model in one second Python process and compare all output bits there.

    saved  folder -> (its variant, the model that was saved).    probe  a scratch file for inputs and expected outputs.
    ->     {variant's name: every bit equal}. Raises RuntimeError when the process fails.
    """
    tensors: dict[str, Tensor] = {}
    with torch.inference_mode():
        for i, (ids, mask) in enumerate(inputs.values()):
            tensors |= {f"ids.{i}": ids.cpu(), f"mask.{i}": mask.cpu()}
            tensors |= {f"out.{i}.{name}": model(ids, mask).cpu() for name, (_, model) in _by_index(saved)}
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, str(probe))
    device = str(next(iter(inputs.values()))[0].device)
    words = [str(folder.resolve()) for folder in saved]
    program = [sys.executable, "-m", "bench.minilm.reload", str(probe.resolve()), device, str(torch.get_num_threads())]
    root = Path(__file__).resolve().parents[2]  # where `bench` is found, whatever folder this process was started in
    result = subprocess.run([*program, *words], cwd=root, capture_output=True, text=True, check=False)
    probe.unlink()
    if result.returncode != 0:
        raise RuntimeError(f"the second process failed:\n{result.stderr}")
    verdicts = json.loads(result.stdout.splitlines()[-1])
    return {variant.name: bool(equal) for (variant, _), equal in zip(saved.values(), verdicts, strict=True)}


def _by_index(saved: Mapping[Path, tuple[Variant, Embedder]]) -> list[tuple[int, tuple[Variant, Embedder]]]:
    return list(enumerate(saved.values()))


def _call(model: Embedder, ids: Tensor, mask: Tensor) -> Callable[[], object]:
    return lambda: model(ids, mask)


def _nearest(embedded: Tensor) -> Tensor:
    similarity = embedded @ embedded.t()
    similarity.fill_diagonal_(-2)
    return similarity.argmax(1)
