"""`pyquant inspect DIR`: what a saved model consists of, without reading its tensors."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from pyquant.core.scheme import QScheme
from pyquant.io.checkpoint import read_manifest
from pyquant.io.manifest import Manifest
from pyquant.nn.qlinear import QLinear
from pyquant.report.render import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists the layers of a saved model with their schemes, sizes and the kernels that would run them "
        "on this machine's CPU. Reads the manifest alone; `pyquant verify` checks every byte."
    )
    parser.epilog = "examples:\n  pyquant inspect quantised\n  pyquant inspect quantised --json"
    add = parser.add_argument
    add("directory", metavar="DIR", help="a folder that `pyquant quantize` or save_pretrained wrote")
    add("--all", action="store_true", help="a row for every layer, not one for equal layers")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Prints the table. -> 0. Raises CheckpointError."""
    summary = summarise(read_manifest(args.directory))
    print(json.dumps(summary, indent=1) if args.json else _text(summary, every=args.all))
    return 0


def summarise(manifest: Manifest) -> dict[str, Any]:
    """The manifest as plain data: one entry a layer, and totals in bytes."""
    layers = []
    in_layers = 0
    for name, entry in sorted(manifest.layers.items()):
        size = sum(t.size for key, t in manifest.tensors.items() if key.rpartition(".")[0] == name)
        in_layers += size
        layers.append(
            {
                "name": name,
                "kind": entry.kind,
                "out_features": entry.out_features,
                "scheme": "int8 per row" if entry.kind == "embedding" else str(entry.scheme),
                "in_features": entry.in_features,
                "bias": entry.bias is not None,
                "activation": entry.activation,
                "gives": "codes" if entry.scheme.outputs is not None else "real numbers",
                "geometry": None
                if entry.geometry is None
                else {k: v if isinstance(v, int) else list(v) for k, v in entry.geometry.items()},
                "bytes": size,
                "kernel": "row lookup" if entry.kind == "embedding" else kernel_name(entry.scheme),
            }
        )
    total = sum(t.size for t in manifest.tensors.values())
    return {
        "layers": layers,
        "files": {name: file.size for name, file in sorted(manifest.files.items())},
        "bytes": {"quantised layers": in_layers, "other tensors": total - in_layers, "total": total},
    }


@lru_cache(maxsize=64)
def kernel_name(scheme: QScheme) -> str:
    """The kernel that a layer of this scheme uses on this CPU, read from a small layer of that scheme."""
    k, n = scheme.weights.group_size or 32, 8
    shape = (n, 1) if scheme.weights.granularity == "per_group" else (n,)  # a scale of the tensor is held for each row
    quantised = not scheme.is_float
    codes = torch.zeros(n, k, dtype=torch.int8 if quantised else getattr(torch, scheme.float_dtype or ""), device="cpu")
    layer = QLinear.from_codes(
        codes,
        torch.ones(shape, dtype=torch.float32, device="cpu") if quantised else None,
        scheme=scheme,
        weight_zero_point=None if scheme.weights.symmetric else torch.zeros(shape, dtype=torch.int32, device="cpu"),
        input_scale=1.0 if scheme.is_static else None,
        input_zero_point=0 if scheme.is_static and scheme.inputs and not scheme.inputs.symmetric else None,
        output_scale=1.0 if scheme.outputs else None,
        output_zero_point=0 if scheme.outputs and not scheme.outputs.symmetric else None,
    )
    return layer.kernel_info(1).kernel


def _text(summary: dict[str, Any], *, every: bool) -> str:
    rows = []
    for name, layers in _groups(summary["layers"], every=every):
        one, size = layers[0], sum(layer["bytes"] for layer in layers)
        shape = f"{one['out_features']}x{one['in_features']}"
        words = (_kind(one), shape, one["scheme"], one["activation"], one["gives"], _size(size), one["kernel"])
        rows.append([name or "(the model itself)", *([] if every else [str(len(layers))]), *words])
    header = ["layer", "kind", "N x K", "scheme", "activation", "gives", "size", "kernel on this CPU"]
    if not every:
        header.insert(1, "count")
    lines = [table(header, rows), ""]
    lines += [f"{name}: {_size(size)}" for name, size in summary["bytes"].items()]
    lines += [f"file {name}: {_size(size)}" for name, size in summary["files"].items()]
    return "\n".join(lines)


def _groups(layers: list[dict[str, Any]], *, every: bool) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(name, its layers): layers that differ in the numbers of their names alone are one, with * for what differs."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for layer in layers:
        facts = {key: value for key, value in layer.items() if key not in ("name", "bytes")}
        pattern = layer["name"] if every else re.sub(r"(?<![^.])\d+(?![^.])", "*", layer["name"])
        groups.setdefault(f"{pattern} {json.dumps(facts)}", []).append(layer)
    for same in groups.values():
        parts = [set(column) for column in zip(*(layer["name"].split(".") for layer in same))]
        yield ".".join(next(iter(words)) if len(words) == 1 else "*" for words in parts), same


def _kind(layer: dict[str, Any]) -> str:
    geometry = layer["geometry"]
    if geometry is None:
        return str(layer["kind"])
    groups = f", {geometry['groups']} groups" if "groups" in geometry else ""
    return f"{layer['kind']} {'x'.join(map(str, geometry['kernel_size']))}{groups}"


def _size(size: int) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size} B"
