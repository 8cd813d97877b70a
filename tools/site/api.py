"""The pages of the public names: which stand where, and the text that Sphinx fills with their docstrings."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyquant

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Topic:
    """A page: its title, its file, the guide that it belongs to, and the names of `pyquant` on it, in order."""

    title: str
    file: str
    guide: str
    names: str


# Every public name stands on one page: tests/docs/test_site.py.
TOPICS = (
    Topic(
        "Quantise a model",
        "quantise",
        "docs/quickstart.md",
        """quantize_ auto_ fuse_ link_ merge_ fold_batch_norm_ dequantize_ expose_linears_
        quantization_report LayerReport FqnConfig trace_floats FloatMatrix
        compare_speed LayerSpeed LayerChoice CallTime AutoReport chain_report ChainRecord merge_report MergeRecord
        register_linear_form register_fusion register_batch_norm register_link register_experts ExpertsRule
        register_quantized_module set_checks set_strict recommended doctor""",
    ),
    Topic(
        "Layers and tensors",
        "layers",
        "docs/layers.md",
        """QLinear QConv2d QEmbedding QExperts HadamardLinear QSequential Quantize Dequantize Residual QResidualAdd
        QuantBasicBlock QuantBottleneck KernelInfo QTensor PackedQTensor""",
    ),
    Topic(
        "Schemes",
        "schemes",
        "docs/formats.md",
        """QScheme TensorScheme scheme_from_name W8A8 W8A8Dynamic W4A8 W4A8Dynamic W4A8TwoLevel W4A8TwoLevelDynamic
        W4A4 W4A4Dynamic W8A16 W4A16 FP16""",
    ),
    Topic(
        "Calibrate and improve",
        "calibrate",
        "docs/calibration.md",
        """QuantizationCalibrator HistogramCollector MaxCalibrator PercentileCalibrator EntropyCalibrator MSECalibrator
        gptq_ gptq_codes bias_correction_ smooth_ register_smoothing equalize_ rotate_ RotationSpec RotatedHeads
        learn_rotation_ LearnedRotation search_scales_ ScaleSearch insert_fake_quantize_ remove_fake_quantize_ convert_
        torch_fake_quantize error_report""",
    ),
    Topic(
        "Selective quantisation and recipes",
        "selective",
        "docs/selective.md",
        """SelectiveQuantizer SkipQuantization ReplacementAction QuantizedMapping QuantizedMetadata Recipe RecipeNotice
        prepare_ calibrate_recipe_ quantize_recipe_""",
    ),
    Topic(
        "Train",
        "train",
        "docs/qat.md",
        """prepare_qat_ finetune distillation QATRecipe QATRecipeModification QATRecipeModificationCallback QATMonitor
        QATWarning LearnedPrecision""",
    ),
    Topic(
        "Search",
        "search",
        "docs/mixed-precision.md",
        "search Plan sensitivity measure_latency load_latency LatencyTable",
    ),
    Topic(
        "Save and load",
        "files",
        "docs/file_format.md",
        "save_pretrained load_pretrained load_quantized_ quantize_checkpoint_ quantize_files",
    ),
    Topic(
        "Errors and warnings",
        "errors",
        "docs/reliability.md",
        """PyquantError ArgumentError SchemeError UnsupportedError CalibrationError CheckpointError NativeLibraryError
        NonFiniteError QuantizationWarning""",
    ),
)
# Where names stand that nobody has put on a page above yet.
REST = Topic("Further names", "further", "docs/index.md", "")
# Packages of integrations are found; of these not all that they list is for users.
NAMES_OF = {"pyquant.integrations.transformers": ("PyquantConfig", "enable", "disable")}


def modules() -> dict[str, tuple[str, str]]:
    """{module: (file, guide)}: the ops, and every package of integrations that has a guide of its name."""
    found = {"pyquant.ops": ("ops", "docs/numerics.md")}
    for init in sorted((ROOT / "pyquant" / "integrations").glob("*/__init__.py")):
        name = init.parent.name
        if (ROOT / "docs" / f"{name}.md").exists():
            found[f"pyquant.integrations.{name}"] = (name, f"docs/{name}.md")
    return found


def topics() -> list[Topic]:
    """TOPICS, and a page of the names that no one of them has."""
    listed = {name for topic in TOPICS for name in topic.names.split()}
    rest = " ".join(name for name in pyquant.__all__ if name not in listed)
    return [*TOPICS, *([replace(REST, names=rest)] if rest else [])]


def pages() -> dict[str, str]:
    """{file under api/: text}, the index first."""
    made = {}
    for topic in topics():
        made[topic.file] = _page(topic.title, topic.guide, "pyquant", topic.names.split())
    for module, (file, guide) in modules().items():
        found = importlib.import_module(module)
        names = [name for name in NAMES_OF.get(module, found.__all__) if _is_there(found, name)]
        made[file] = _page(module, guide, module, names)
    entries = "\n".join(f"   {file}" for file in made)
    index = f"{_heading('API reference')}\nEvery public name, by topic.\n\n.. toctree::\n   :maxdepth: 1\n\n{entries}\n"
    return {"index.rst": index, **{f"{file}.rst": text for file, text in made.items()}}


def _page(title: str, guide: str, module: str, names: Any) -> str:
    text = [_heading(title), f"Guide: :doc:`/{guide.removesuffix('.md')}`.", "", f".. currentmodule:: {module}", ""]
    for name in names:
        obj = getattr(importlib.import_module(module), name)
        if inspect.isclass(obj):
            is_error = issubclass(obj, BaseException)
            text += [
                f".. auto{'exception' if is_error else 'class'}:: {name}",
                *([] if is_error else ["   :members:", "   :inherited-members: Module, tuple, dict, str, Enum"]),
                "",
            ]
        elif callable(obj):
            text += [f".. autofunction:: {name}", ""]
        else:
            text += [f".. autodata:: {name}", "   :no-value:", ""]
    return "\n".join(text)


def _heading(title: str) -> str:
    return f"{title}\n{'=' * len(title)}\n"


def _is_there(module: Any, name: str) -> bool:
    try:
        getattr(module, name)
    except ImportError:
        return False
    return True
