"""One legal call of every public method of pyquant's public classes: what test_misuse.py spoils one argument at a time.

Methods are those that pyquant defines and whose name has no leading underscore. Each call makes its object anew.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from expert_banks import Bank
from hostile.valid_calls import CALLS, RECIPE, SCHEME, Block, batches, latency_table, net, simulated, with_defaults
from torch import nn

import pyquant
from pyquant import ops
from pyquant.core.patches import Patches

Make = Callable[[Path], Any]
PUBLIC = {**{name: getattr(pyquant, name) for name in pyquant.__all__}, "ops.LinearSpec": ops.LinearSpec}
ROWS, IMAGE = torch.ones(2, 4), torch.ones(1, 4, 3, 3)
CODES = pyquant.QTensor(torch.ones(2, 4, dtype=torch.int8), torch.ones(1))
STATIC = pyquant.TensorScheme()


def methods() -> Iterator[tuple[str, Any]]:
    """'Class.method' and what the class has under that name, as it stands in the class."""
    for name, kind in PUBLIC.items():
        if not isinstance(kind, type) or issubclass(kind, (BaseException, Warning)):
            continue
        for method in dir(kind):
            home = next((base for base in kind.__mro__ if method in base.__dict__), kind)
            raw = home.__dict__.get(method)
            is_method = isinstance(raw, (staticmethod, classmethod)) or inspect.isfunction(raw)
            if is_method and not method.startswith("_") and home.__module__.startswith("pyquant"):
                yield f"{name}.{method}", raw


def _made(name: str) -> Make:
    """A constructor with the legal call of its class."""
    return lambda folder: PUBLIC[name](**CALLS[name](folder)) if name in CALLS else PUBLIC[name]()


def _seen(name: str) -> Make:
    """A collector that has seen numbers."""

    def make(_: Path) -> Any:
        collector = PUBLIC[name]()
        collector.collect(ROWS)
        return collector

    return make


def _learning(_: Path) -> Any:
    torch.manual_seed(0)
    model = net()
    learned = pyquant.LearnedPrecision(model, target=0.5, steps=10)
    model(torch.randn(2, 8))
    return learned


_found: Any = None


def _plan(folder: Path) -> Any:
    global _found
    _found = _found or pyquant.search(**CALLS["search"](folder))  # its methods change nothing in it
    return _found


def _bank() -> nn.Module:
    pyquant.register_experts(Bank, pyquant.ExpertsRule())
    return Bank(2, 4, 4)


# How the object of a method is made, where the class's own legal call does not do.
OBJECTS: dict[str, Make] = {
    **{
        n: _seen(n)
        for n in ("EntropyCalibrator", "HistogramCollector", "MSECalibrator", "MaxCalibrator", "PercentileCalibrator")
    },
    "Dequantize": lambda _: pyquant.Dequantize(),
    "QExperts": lambda _: pyquant.QExperts.from_float(_bank()),
    "FqnConfig": lambda _: pyquant.FqnConfig({"a": SCHEME}),
    "LatencyTable": lambda folder: pyquant.LatencyTable.load(latency_table(folder)),
    "LearnedPrecision": _learning,
    "Plan": _plan,
    "QATMonitor": lambda folder: pyquant.QATMonitor(**CALLS["QATMonitor"](folder)),
    "QResidualAdd": lambda _: pyquant.QResidualAdd(pyquant.QLinear(4, 4)),
    "QuantBasicBlock": lambda _: pyquant.QuantBasicBlock(Block(2)),
    "QuantBottleneck": lambda _: pyquant.QuantBottleneck(Block(3)),
    "QuantizedMetadata": lambda _: pyquant.QuantizedMetadata(nn.Linear, pyquant.QLinear),
    "Recipe": lambda _: RECIPE,
    "ops.LinearSpec": lambda _: ops.LinearSpec(4, 4),
}
_CALIBRATION: dict[str, Any] = {"model": simulated, "calib_data_loader": batches, "num_calib_batches": 1}
# Arguments without a default, and those whose default is no legal call; functions are called for each use.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "Dequantize.forward": {"x": CODES},
    **{f"{n}.collect": {"x": ROWS} for n in OBJECTS if n.endswith(("Calibrator", "Collector"))},
    "FqnConfig.check_used": {"layers": lambda: [("a", nn.Linear(2, 2))], "others": []},
    "FqnConfig.decide": {"name": "a", "module": nn.Linear(2, 2)},
    "FqnConfig.of_model": {"model": lambda: nn.Sequential(nn.Linear(2, 2))},
    "FqnConfig.matches": {"key": "a", "name": "a", "module": nn.Linear(2, 2)},
    "HadamardLinear.forward": {"x": torch.ones(2, 8)},
    "HadamardLinear.from_linear": {"linear": lambda: nn.Linear(8, 4)},
    "LatencyTable.check": {"config": (0, 0)},
    "LatencyTable.load": {"path": lambda: latency_table(Path())},
    "LatencyTable.require": {"fingerprint": lambda: dict(OBJECTS["LatencyTable"](Path()).fingerprint)},
    "LatencyTable.predict": {"config": (0, 0)},
    "LatencyTable.us": {"group": "0", "format": "W8A8Dynamic"},
    "LearnedPrecision.load_state_dict": {"state": lambda: _learning(Path()).state_dict()},
    "Plan.apply_": {"model": net},
    "Plan.report": {"path": "page.html"},
    "Plan.save": {"path": "plan.json"},
    "Plan.save_ranges": {"path": "ranges.json"},
    "LatencyTable.save": {"path": "new.json"},
    "QATRecipe.lr_factor": {"step": 1, "steps": 10},
    "QATRecipe.peak_lr": {"training_lr": 0.1},
    "QConv2d.forward": {"x": IMAGE},
    "QConv2d.reference": {"x": IMAGE},
    "QConv2d.from_codes": {
        "codes": torch.ones(4, 4, dtype=torch.int8),
        "weight_scale": torch.ones(4),
        "scheme": SCHEME,
        "patches": Patches.of(nn.Conv2d(4, 4, 1)),
    },
    "QConv2d.from_float": {"conv": lambda: nn.Conv2d(4, 4, 1), "scheme": SCHEME},
    "QEmbedding.forward": {"input": torch.tensor([0, 2])},
    "QEmbedding.from_codes": {"codes": torch.ones(4, 4, dtype=torch.int8), "weight_scale": torch.ones(4)},
    "QEmbedding.from_float": {"embedding": lambda: nn.Embedding(3, 4)},
    "QExperts.forward": {
        "hidden_states": ROWS,
        "top_k_index": torch.tensor([[0, 1], [1, 0]]),
        "top_k_weights": torch.ones(2, 2),
    },
    "QExperts.expert": {"index": 1},
    "QExperts.from_float": {"module": _bank},
    "QLinear.forward": {"x": ROWS},
    "QLinear.reference": {"x": ROWS},
    "QLinear.from_codes": {
        "codes": torch.ones(4, 4, dtype=torch.int8),
        "weight_scale": torch.ones(4),
        "scheme": SCHEME,
    },
    "QLinear.from_float": {"linear": lambda: nn.Linear(4, 4), "scheme": SCHEME},
    **{f"{n}.packs_codes": {"scheme": STATIC, "device": torch.device("cpu")} for n in ("QLinear", "QConv2d")},
    **{f"{n}.with_activation": {"activation": "relu"} for n in ("QLinear", "QConv2d")},
    **{f"{n}.with_outputs": {"outputs": STATIC, "scale": torch.ones(1)} for n in ("QLinear", "QConv2d")},
    "QResidualAdd.forward": {"x": ROWS, "residual": ROWS},
    "Residual.forward": {"x": ROWS},
    "QScheme.from_dict": {"data": SCHEME.to_dict},
    "TensorScheme.from_dict": {"data": STATIC.to_dict},
    "TensorScheme.scale_shape": {"shape": lambda: (4, 8)},
    **{f"Quant{n}.forward": {"x": IMAGE} for n in ("BasicBlock", "Bottleneck")},
    **{f"QuantizationCalibrator.{n}": _CALIBRATION for n in ("calibrate_model", "compare", "histograms")},
    "Quantize.forward": {"x": ROWS},
    "QuantizedMetadata.build": {"module": lambda: nn.Linear(4, 4), "scheme": SCHEME, "name": "a"},
    "Recipe.from_dict": {"data": RECIPE.to_dict},
    "Recipe.load": {"path": "recipe.yaml"},
    "Recipe.load_config": {"path": "recipe.yaml"},
    **{f"QATRecipeModification{n}.from_recipe": {"recipe": RECIPE} for n in ("", "Callback")},
    "Recipe.loads": {"content": "{}"},
    "SelectiveQuantizer.fates": {"model": net},
    "SelectiveQuantizer.from_recipe": {"recipe": RECIPE},
    "SelectiveQuantizer.quantize_module": {"model": net},
    "SelectiveQuantizer.quantize_reversibly": {"model": net},
    "SelectiveQuantizer.register_layer_scheme": {"layer_names": "0", "scheme": SCHEME},
    "SelectiveQuantizer.register_quantization_mapping": {
        "layer_names": {"0"},
        "quantized_target_class": pyquant.QLinear,
    },
    "SelectiveQuantizer.register_skip_quantization": {"layer_names": {"0"}},
    "ops.LinearSpec.from_ints": {"values": ops.LinearSpec(4, 4).to_ints()},
}


def all_methods() -> dict[str, tuple[Any, Make]]:
    """'Class.method' -> (what is called, its legal arguments), of those that take any."""
    found: dict[str, tuple[Any, Make]] = {}
    for name, raw in methods():
        kind, _, method = name.rpartition(".")
        bound = isinstance(raw, (staticmethod, classmethod))
        function = getattr(PUBLIC[kind], method)
        wanted = with_defaults(function, **ARGUMENTS.get(name, {}))
        if wanted:
            found[name] = (function if bound else _on_object(kind, method), _arguments(wanted))
    return found


def _arguments(wanted: dict[str, Any]) -> Make:
    return lambda _: {k: v() if inspect.isroutine(v) else v for k, v in wanted.items()}


def _on_object(kind: str, method: str) -> Any:
    def call(**given: Any) -> Any:
        return getattr(OBJECTS.get(kind, _made(kind))(Path()), method)(**given)

    return call
