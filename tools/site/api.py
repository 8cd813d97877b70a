"""The pages of the public names: which stand where, and the text that Sphinx fills with their docstrings."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any


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
        register_quantized_module set_checks set_strict doctor""",
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
        gptq_ gptq_codes bias_correction_ smooth_ register_smoothing rotate_ RotationSpec RotatedHeads search_scales_
        ScaleSearch insert_fake_quantize_ remove_fake_quantize_ convert_ torch_fake_quantize error_report""",
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
    Topic("Save and load", "files", "docs/file_format.md", "save_pretrained load_pretrained load_quantized_"),
    Topic(
        "Errors and warnings",
        "errors",
        "docs/reliability.md",
        """PyquantError ArgumentError SchemeError UnsupportedError CalibrationError CheckpointError NativeLibraryError
        NonFiniteError QuantizationWarning""",
    ),
)
# module -> (file, the guide, its names; None: what it lists in __all__). Names that need a package which is not
# installed where the site is built are left out.
MODULES: dict[str, tuple[str, str, tuple[str, ...] | None]] = {
    "pyquant.ops": ("ops", "docs/numerics.md", None),
    "pyquant.integrations.transformers": (
        "transformers",
        "docs/transformers.md",
        ("PyquantConfig", "enable", "disable"),
    ),
    "pyquant.integrations.peft": ("peft", "docs/peft.md", None),
    "pyquant.integrations.diffusers": ("diffusers", "docs/diffusers.md", None),
    "pyquant.integrations.distributed": ("distributed", "docs/distributed.md", None),
    "pyquant.integrations.onnx": ("onnx", "docs/onnx.md", None),
    "pyquant.integrations.compile": ("compile", "docs/compile.md", None),
    "pyquant.integrations.vllm": ("vllm", "docs/vllm.md", None),
    "pyquant.integrations.sglang": ("sglang", "docs/sglang.md", None),
}


def pages() -> dict[str, str]:
    """{file under api/: text}, the index first."""
    made = {}
    for topic in TOPICS:
        made[topic.file] = _page(topic.title, topic.guide, "pyquant", topic.names.split())
    for module, (file, guide, names) in MODULES.items():
        found = importlib.import_module(module)
        made[file] = _page(module, guide, module, [n for n in names or found.__all__ if _is_there(found, n)])
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
