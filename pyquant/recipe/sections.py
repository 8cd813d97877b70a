"""The sections of a recipe as frozen records; names and defaults of the first three are those of SuperGradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyquant.core.names import OPEN_CALIBRATOR as OPEN
from pyquant.core.names import OUTPUT_METRICS
from pyquant.core.presets import scheme_from_name
from pyquant.core.registry import SCORERS, SEARCH_ALGORITHMS, data_calibrators
from pyquant.errors import ArgumentError
from pyquant.recipe.fields import checked, choice, flag, integer, listed, number, optional, refuse, text

FORMATS = ("float", "fp32", "fp16", "bf16", "int8", "int4")  # those before the integers: as the model has it


class RecipeNotice(UserWarning):
    """A recipe was read in a shape that is accepted but is not how it should be written."""


# Optimisers that rescale each gradient; a recipe that trains with one gets a notice (docs/qat.md 6).
ADAM: Final = (
    "Adam and RMSProp rescale the gradient of every parameter, which the guides advise against after quantisation: "
    "they take SGD with momentum. docs/accuracy.md has both, measured"
)


def rescales(optimizer: object) -> bool:
    """Whether the optimiser of that name rescales each parameter's gradient: Adam and its kin, RMSProp."""
    return isinstance(optimizer, str) and optimizer.lower().startswith(("adam", "rmsprop", "nadam", "radam"))


@dataclass(frozen=True)
class SelectiveParams:
    """selective_quantizer_params: what layers get that no rule names.

    calibrator_w, calibrator_i  of weights and inputs: 'max', 'percentile', 'entropy', 'mse', or 'histogram', which
                                stands for histogram_calib_method. Of weights also None: the preset's own, 'mse' of
                                symmetric ones of 4 bits, 'max' of others.
    per_channel   weights have one scale an output channel; False: one for all.
    learn_amax    ranges are trained in quantisation-aware training.
    skip_modules  names, globs, 're:...' of layers or blocks that stay in floating point; None: no layer.

    Example:
        >>> SelectiveParams().calibrator_i
        'histogram'
    """

    calibrator_w: str | None = checked(None, optional(choice(data_calibrators, OPEN)))
    calibrator_i: str = checked(OPEN, choice(data_calibrators, OPEN))
    per_channel: bool = checked(True, flag)
    learn_amax: bool = checked(False, flag)
    skip_modules: tuple[str, ...] | None = checked(None, optional(listed(text)))


@dataclass(frozen=True)
class CalibrationParams:
    """calib_params: how ranges are found.

    histogram_calib_method  governs every 'histogram' calibrator; others ignore it.
    percentile              in (0, 100], of 'percentile'.
    num_calib_batches       exactly so many batches are run.
    verbose                 log the ranges.

    Example:
        >>> CalibrationParams().num_calib_batches
        16
    """

    histogram_calib_method: str = checked("percentile", choice(data_calibrators))
    percentile: float = checked(99.99, number(0, 100, above=True))
    num_calib_batches: int = checked(16, integer(1))
    verbose: bool = checked(False, flag)


@dataclass(frozen=True)
class QatModification:
    """Parameters of QATRecipeModificationCallback: the rules of thumb that turn a training recipe into one for QAT.

    Example:
        >>> QatModification().lr_decay_factor
        0.01
    """

    batch_size_divisor: int = checked(2, integer(1))
    max_epochs_divisor: int = checked(10, integer(1))
    lr_decay_factor: float = checked(0.01, number(0, above=True))
    warmup_epochs_divisor: int = checked(10, integer(1))
    cosine_final_lr_ratio: float = checked(0.01, number(0, 1))
    disable_phase_callbacks: bool = checked(True, flag)
    disable_augmentations: bool = checked(False, flag)


def _format(value: object, where: str) -> str:
    """A format as pyquant.search names it: 'float', 'int8', 'int4', or the text of a preset."""
    name = text(value, where)
    if name not in FORMATS:
        try:
            scheme_from_name(name)
        except ArgumentError:
            refuse(where, repr(name), f"{', '.join(FORMATS)}, or a preset such as W8A8Dynamic")
    return name


@dataclass(frozen=True)
class SearchParams:
    """search: how a mixed-precision search is to be run, or was; pyquant keeps it with the recipe.

    formats    names as pyquant.search takes them, presets included.
    metric     label-free loss; sensitivity: the metric behind the first tables, '' for the same one.
    algorithm  'dp' solves the problem exactly and refits it to what was measured.
    max_drop   in the units of the metric; None: no limit.

    Example:
        >>> SearchParams().formats
        ('float', 'int8', 'int4')
    """

    formats: tuple[str, ...] = checked(("float", "int8", "int4"), listed(_format))
    metric: str = checked("kl", choice(*OUTPUT_METRICS))
    sensitivity: str = checked("", choice("", SCORERS.names))
    algorithm: str = checked("dp", choice(SEARCH_ALGORITHMS.names))
    max_drop: float | None = checked(0.01, optional(number(0)))
    never_slower_margin: float = checked(0.01, number(0, 1))


@dataclass(frozen=True)
class QatParams:
    """qat: how pyquant.finetune(recipe=) trains; grad_clip 0 clips nothing, momentum is that of SGD.

    start_from 'float': prepare_qat_ refuses a model that simulates already; 'ptq' takes both.
    Reading a recipe whose optimizer is 'adam' or 'adamw' gives a RecipeNotice: the guides advise SGD with momentum.

    Example:
        >>> QatParams().start_from
        'ptq'
    """

    optimizer: str = checked("sgd", choice("sgd", "adam", "adamw"))
    momentum: float = checked(0.9, number(0, 1))
    grad_clip: float = checked(1.0, number(0))
    amp: str = checked("off", choice("off", "bf16", "fp16"))
    start_from: str = checked("ptq", choice("ptq", "float"))


@dataclass(frozen=True)
class Provenance:
    """provenance: where the decisions of a recipe were made; free text, empty where unknown.

    Example:
        >>> Provenance(gpu="none").gpu
        'none'
    """

    gpu: str = checked("", text)
    driver: str = checked("", text)
    torch: str = checked("", text)
    pyquant: str = checked("", text)
    latency_table_sha256: str = checked("", text)
    model_sha256: str = checked("", text)
