"""One legal call of every public name, by keyword: what test_misuse.py spoils one argument at a time.

A call is made anew for every use, because many of them change what they are given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import foreign
import torch
from op_samples import samples
from safetensors.torch import save_file
from torch import nn

import pyquant
from pyquant import ops
from pyquant.mixed_precision.choices.switchable import SwitchableModel
from pyquant.ops.schema import SCHEMAS

Call = Callable[[Path], dict[str, Any]]
POSITIONAL = "*"  # the key of what a name takes as *args


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def quantised() -> nn.Module:
    return pyquant.quantize_(net(), pyquant.W8A8Dynamic())


def simulated() -> nn.Module:
    return pyquant.insert_fake_quantize_(net(), pyquant.W8A8Dynamic())


def ready() -> nn.Module:
    return simulated().eval()


def batches() -> list[torch.Tensor]:
    return [torch.ones(2, 8) * (i + 1) for i in range(2)]


def scored(model: nn.Module) -> float:
    return float(model(torch.ones(1, 8)).sum())


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def logits(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)


class Block(nn.Module):
    """Attributes as torchvision's BasicBlock and Bottleneck have them."""

    def __init__(self, convolutions: int) -> None:
        super().__init__()
        for i in range(1, convolutions + 1):
            setattr(self, f"conv{i}", nn.Conv2d(4, 4, 1))
            setattr(self, f"bn{i}", nn.Identity())
        self.relu, self.downsample, self.stride = nn.ReLU(), None, 1


class Own(nn.Module):
    """A class that no registry knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.act = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU()


def mixed() -> dict[str, Any]:
    return {"model": net(), "data": batches(), "num_batches": 2, "batch_to_inputs": None}


def floats_of(folder: Path, model: nn.Module | None = None) -> Path:
    path = folder / "floats"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    save_file(
        {name: tensor.clone() for name, tensor in (model or net()).state_dict().items()}, path / "model.safetensors"
    )
    return path


def in_blocks() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))


def written_by_others(folder: Path) -> Path:
    weights = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
    tensors = foreign.floats()
    for name, (n, k) in foreign.LAYERS.items():
        codes = torch.ones(n, k, dtype=torch.int8)
        tensors |= foreign.of_layer(name, {"weight": codes, "weight_scale": torch.ones(n, 1)})
    return foreign.write(folder / "others", foreign.group_config("int-quantized", weights), tensors)


def saved(folder: Path) -> Path:
    path = folder / "saved"
    if not path.exists():
        pyquant.save_pretrained(quantised(), path)
    return path


@cache
def switchable() -> SwitchableModel:
    return SwitchableModel(net().eval(), ("float", "W8A8Dynamic"))


def latency_table(folder: Path) -> Path:
    path = folder / "latency.json"
    if not path.exists():
        pyquant.measure_latency(switchable(), torch.ones(2, 8), rounds=1, min_rounds=1, held_out=0).save(path)
    return path


def with_defaults(function: Any, **given: Any) -> dict[str, Any]:
    """The given arguments and the defaults of the others."""
    parameters = inspect.signature(function).parameters.values()
    others = {p.name: p.default for p in parameters if p.default is not p.empty}
    return others | given


@cache
def _operands() -> dict[str, tuple[Any, ...]]:
    return samples(2, 3, 4)


def of_op(name: str, _: Path) -> dict[str, Any]:
    """A legal call of an op; the wrapper's names, in the wrapper's order."""
    arguments = [a.name for a in getattr(torch.ops.pyquant, name).default._schema.arguments]
    given = dict(zip(arguments, _operands()[name], strict=False))
    given = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    return with_defaults(getattr(ops, name), **given)


def _public(name: str, **given: Any) -> dict[str, Any]:
    return with_defaults(getattr(pyquant, name), **given)


SCHEME = pyquant.W8A8Dynamic()
RECIPE = pyquant.Recipe.loads("calib_params: {num_calib_batches: 1}")

# Names whose arguments have defaults that make a legal call come by themselves; these need more.
CALLS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "ExpertsRule": lambda _: _public("ExpertsRule"),
    "FqnConfig": lambda _: {"entries": {"a": SCHEME}},
    "HadamardLinear": lambda _: _public("HadamardLinear", linear=nn.Linear(8, 4), block=4),
    "LearnedPrecision": lambda _: _public("LearnedPrecision", model=net(), target=0.5, steps=10),
    "PackedQTensor": lambda _: _public("PackedQTensor", data=torch.zeros(2, 2, dtype=torch.uint8), scale=torch.ones(1)),
    "QATMonitor": lambda folder: _public("QATMonitor", model=simulated(), path=folder / "monitor.csv"),
    "QConv2d": lambda _: _public("QConv2d", in_channels=4, out_channels=4, kernel_size=1),
    "QEmbedding": lambda _: _public("QEmbedding", num_embeddings=3, embedding_dim=4),
    "QLinear": lambda _: _public("QLinear", in_features=4, out_features=4),
    "Quantize": lambda _: _public("Quantize", scale=0.5),
    "QResidualAdd": lambda _: _public("QResidualAdd", layer=quantised()[0]),
    "QScheme": lambda _: _public("QScheme", weights=pyquant.TensorScheme(granularity="per_channel")),
    "QSequential": lambda _: {POSITIONAL: [nn.Linear(4, 4)]},
    "QTensor": lambda _: _public("QTensor", data=torch.zeros(2, 2, dtype=torch.int8), scale=torch.ones(1)),
    "QuantBasicBlock": lambda _: {"block": Block(2)},
    "QuantBottleneck": lambda _: {"block": Block(3)},
    "QuantizedMapping": lambda _: _public(
        "QuantizedMapping", float_module=nn.Linear(4, 4), quantized_target_class=pyquant.QLinear
    ),
    "QuantizedMetadata": lambda _: _public(
        "QuantizedMetadata", float_source=nn.Linear, quantized_target_class=pyquant.QLinear
    ),
    "SkipQuantization": lambda _: {"module": nn.Linear(4, 4)},
    "bias_correction_": lambda _: _public("bias_correction_", **mixed() | {"model": ready()}),
    "calibrate_recipe_": lambda _: {"model": pyquant.prepare_(net(), RECIPE), "recipe": RECIPE, "data": batches()},
    "chain_report": lambda _: {"model": quantised().eval(), "example_inputs": torch.ones(2, 8)},
    "auto_": lambda _: {
        "model": net(),
        "example_inputs": torch.ones(2, 8),
        "config": pyquant.W8A8Dynamic(),
        "device": pyquant.ops.plan.Device(sm=90, sm_count=132, shared_bytes=232448, l2_bytes=62914560),
        "measure": False,
        "tolerance": 0.03,
        "spare_bytes": 0,
        "seconds": 0.001,
    },
    "compare_speed": lambda _: {"model": quantised(), "example_inputs": torch.ones(2, 8), "seconds": 0.001},
    "convert_": lambda _: {"model": simulated()},
    "dequantize_": lambda _: {"model": quantised()},
    "distillation": lambda _: _public("distillation", teacher=net(), outputs=logits, loss=logits),
    "error_report": lambda _: _public(
        "error_report", model=quantised(), reference=net(), data=batches(), num_batches=1
    ),
    "expose_linears_": lambda _: _public("expose_linears_", model=net()),
    "finetune": lambda _: _public(
        "finetune", model=pyquant.prepare_qat_(net(), SCHEME), loss_fn=loss, loader=batches(), lr=0.1, steps=1
    ),
    "fold_batch_norm_": lambda _: {"model": nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).eval()},
    "fuse_": lambda _: {"model": quantised()},
    "gptq_": lambda _: _public("gptq_", **mixed() | {"model": ready()}),
    "gptq_codes": lambda _: _public(
        "gptq_codes", weight=torch.randn(4, 8), scheme=pyquant.W4A16(None), inputs=torch.randn(20, 8)
    ),
    "insert_fake_quantize_": lambda _: _public("insert_fake_quantize_", model=net(), config=SCHEME),
    **dict.fromkeys(
        ("merge_", "merge_report"), lambda _: {"model": quantised().eval(), "example_inputs": torch.ones(2, 8)}
    ),
    "learn_rounding_": lambda _: _public("learn_rounding_", **mixed() | {"model": ready(), "steps": 2}),
    "link_": lambda _: _public("link_", model=quantised().eval(), example_inputs=torch.ones(2, 8)),
    "load_pretrained": lambda folder: _public("load_pretrained", directory=saved(folder), model=net),
    "load_quantized_": lambda folder: _public("load_quantized_", model=foreign.Net(), path=written_by_others(folder)),
    "prepare_": lambda _: {"model": net(), "recipe": RECIPE},
    "prepare_qat_": lambda _: _public("prepare_qat_", model=net(), config=SCHEME),
    "load_latency": lambda folder: _public(
        "load_latency", path=latency_table(folder), switchable=switchable(), example_inputs=torch.ones(2, 8)
    ),
    "quantization_report": lambda _: {"model": quantised()},
    "quantize_": lambda _: _public("quantize_", model=net(), config=SCHEME),
    "quantize_checkpoint_": lambda folder: _public(
        "quantize_checkpoint_", model=net(), path=floats_of(folder), config=SCHEME
    ),
    "quantize_files": lambda folder: _public(
        "quantize_files",
        model=in_blocks(),
        path=floats_of(folder, in_blocks()),
        out=folder / "out",
        config=SCHEME,
        save_to=folder / "blocks",
        cache=folder / "cache",
        data=batches(),
    ),
    "quantize_recipe_": lambda _: _public("quantize_recipe_", model=net(), recipe=RECIPE, data=batches()),
    "recommended": lambda _: {"name": "llm-w4a8", "num_batches": 4},
    "register_batch_norm": lambda _: {"parent_class": type("P", (Own,), {}), "layer": "first", "batch_norm": "norm"},
    "register_experts": lambda _: {"layer": type("P", (Own,), {}), "rule": pyquant.ExpertsRule()},
    "register_fusion": lambda _: {"parent_class": type("P", (Own,), {}), "linear": "first", "activation": "act"},
    "register_linear_form": lambda _: _public("register_linear_form", layer=type("P", (Own,), {}), make=logits),
    "register_link": lambda _: {"parent_class": type("P", (Own,), {}), "producer": "first", "consumer": "last"},
    "register_quantized_module": lambda _: _public("register_quantized_module", float_source=type("P", (Own,), {})),
    "register_rotation": lambda _: {
        "model_class": type("P", (Own,), {}),
        "spec": pyquant.RotationSpec(["0"], {"1": ["2"]}),
    },
    "register_smoothing": lambda _: {"parent_class": type("P", (Own,), {}), "producer": "norm", "consumers": ["last"]},
    "remove_fake_quantize_": lambda _: {"model": simulated()},
    "RotatedHeads": lambda _: _public("RotatedHeads", values="v", output="o", size=4),
    "RotationSpec": lambda _: _public("RotationSpec"),
    "rotate_": lambda _: _public(
        "rotate_",
        model=nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8), nn.Linear(8, 4)).eval(),
        example_inputs=torch.ones(2, 4),
        spec=pyquant.RotationSpec(["0"], {"1": ["2"]}),
    ),
    "save_pretrained": lambda folder: _public("save_pretrained", model=quantised(), directory=folder / "new"),
    "scheme_from_name": lambda _: {"text": "W8A8"},
    "set_checks": lambda _: {"enabled": False},
    "set_strict": lambda _: {"enabled": False},
    "search_scales_": lambda _: _public(
        "search_scales_", **mixed() | {"config": pyquant.W4A8(None), "pairs": [("0", ["2"])]}
    ),
    "ScaleSearch": lambda _: {"chosen": "none", "errors": {}, "found": {}},
    "learn_rotation_": lambda _: _public(
        "learn_rotation_",
        model=nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8), nn.Linear(8, 4)).eval(),
        config=pyquant.W4A4Dynamic(),
        data=[torch.ones(2, 4)] * 2,
        num_batches=2,
        spec=pyquant.RotationSpec(["0"], {"1": ["2"]}),
        steps=1,
    ),
    "LearnedRotation": lambda _: {"error_before": 1.0, "error_after": 1.0, "accepted": False, "spread": {}},
    "equalize_": lambda _: _public(
        "equalize_",
        model=nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)),
        pairs=[("0", ["1"])],
        example_inputs=torch.ones(2, 4),
    ),
    "smooth_": lambda _: _public("smooth_", **mixed() | {"pairs": [("0", ["2"])]}),
    "trace_floats": lambda _: {"model": quantised().eval(), "example_inputs": torch.ones(2, 8)},
    "measure_latency": lambda _: _public(
        "measure_latency",
        model=net(),
        example_inputs=torch.ones(2, 8),
        formats=["float", "W8A8Dynamic"],
        data=batches(),
        num_batches=1,
        rounds=1,
        min_rounds=1,
        max_seconds=0.01,
        held_out=0,
        borders=False,
    ),
    "sensitivity": lambda _: _public(
        "sensitivity",
        model=net(),
        data=batches(),
        formats=["float", "W8A8Dynamic"],
        batches=batches(),
        num_batches=1,
    ),
    "search": lambda _: _public(
        "search",
        model=net(),
        example_inputs=torch.ones(2, 8),
        calib_data_loader=batches(),
        formats=["float", "W8A8Dynamic"],
        eval_fn=scored,
        objective="size",
    ),
}

OTHERS_OF_OPS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "LinearSpec": lambda _: with_defaults(ops.LinearSpec, n=4, k=4),
    "kernels": lambda _: {"pattern": ""},
    "layout_for": lambda _: {"device": torch.device("cpu"), "spec": None},
    "holds_row": lambda _: {"device": torch.device("cpu"), "columns": 32},
    "packs_int4": lambda _: {"device": torch.device("cpu"), "columns": 32},
}


def all_calls() -> dict[str, tuple[Any, Call]]:
    """name -> (what is called, its legal arguments)."""
    found: dict[str, tuple[Any, Call]] = {f"ops.{n}": (getattr(ops, n), partial(of_op, n)) for n in SCHEMAS}
    found |= {f"ops.{n}": (getattr(ops, n), call) for n, call in OTHERS_OF_OPS.items()}
    for name in pyquant.__all__:
        value = getattr(pyquant, name)
        if not callable(value) or (isinstance(value, type) and issubclass(value, (BaseException, Warning))):
            continue
        if name in CALLS:
            found[name] = (value, CALLS[name])
        elif all(p.default is not p.empty for p in inspect.signature(value).parameters.values()):
            found[name] = (value, lambda _, value=value: with_defaults(value))
    return found
