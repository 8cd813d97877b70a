"""SelectiveQuantizer: which layers are simulated in integers, how, which blocks are replaced; then all at once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import nn

from pyquant.core import arguments
from pyquant.core.names import HALF_DTYPES
from pyquant.core.presets import FP16, W8A8
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.nn.chain import Residual
from pyquant.nn.convert import Prepare
from pyquant.nn.fates import Fate, LayerScheme
from pyquant.nn.indivisible import CHOICES
from pyquant.nn.match import Key
from pyquant.nn.undo import Undo
from pyquant.ptq.layer_scheme import Defaults, check_calibrator
from pyquant.ptq.mapping import REGISTERED, QuantizedMetadata, ReplacementAction
from pyquant.ptq.replace import Like, Outcome, Replacement
from pyquant.ptq.rules import Rule
from pyquant.recipe import Recipe
from pyquant.simulate.layer import SimulatedLayer

_ALLOWED: Final = {"naive": (), "hybrid": ("skip",), "selective": ("skip", "mapping", "layer scheme")}
log = logging.getLogger("pyquant.ptq")

Keys = Iterable[Key] | Key


class SelectiveQuantizer:
    """Holds rules for the layers of a model, then inserts simulated quantisation as they say.

    default_quant_modules_calibrator_weights  'max', 'percentile', 'entropy', 'mse', or 'histogram': the method that
                     QuantizationCalibrator.calibrate_model names. None: what the scheme says; presets say 'mse' for
                     symmetric weights of 4 bits and 'max' for others, so for W8A8, the default here.
    default_quant_modules_calibrator_inputs   the same for the inputs of layers. It stands before the 'mse' that W4A4
                     says for its inputs: say 'mse' here to have it.
    default_per_channel_quant_weights   one scale an output channel; False: one for all weights of a layer.
    default_learn_amax   prepare_qat_ makes the ranges of weights and static inputs parameters, which training moves.
    verbose          log (INFO, logger 'pyquant.ptq') what became of every layer.
    scheme           QScheme of layers that nothing else names; None: W8A8().
    mode             'naive': every Linear and Conv2d, one calibrator (that of the weights) for all; no exceptions
                     but those that have no integer twin. A QuantizationWarning names these, and what other classes
                     multiply by (expose_linears_ makes Linears of attention, recurrences and Conv1D).
                     'hybrid': as the defaults say, but layers may be skipped. 'selective': everything below.
    custom_mappings  {float class: quantised class or QuantizedMetadata}, as register_quantized_module, for this
                     quantizer only. skip_last: so many layers at the end of the model stay in floating point.
    on_indivisible   layers whose K a group size does not divide: 'per_channel', 'skip' or 'error', as in quantize_.

    Keys of layers and blocks are exact names, 're:...', globs, module classes; a name wins over a pattern, a pattern
    over a class, then the innermost module that is named, then the first registration. A key of a block holds for all
    layers in it. A key that does nothing in the model is an error.
    Raises ArgumentError naming argument, value and what is allowed.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> quantizer = SelectiveQuantizer()
        >>> quantizer.register_skip_quantization(layer_names={"2"})
        >>> [type(layer).__name__ for layer in quantizer.quantize_module(model)]
        ['FakeQuantLinear', 'ReLU', 'Linear']
    """

    def __init__(
        self,
        default_quant_modules_calibrator_weights: str | None = None,
        default_quant_modules_calibrator_inputs: str = "histogram",
        default_per_channel_quant_weights: bool = True,
        default_learn_amax: bool = False,
        verbose: bool = True,
        *,
        scheme: QScheme | None = None,
        mode: str = "selective",
        custom_mappings: Mapping[type[nn.Module], type[nn.Module] | QuantizedMetadata] | None = None,
        skip_last: int = 0,
        on_indivisible: str = "per_channel",
    ) -> None:
        weights, inputs = default_quant_modules_calibrator_weights, default_quant_modules_calibrator_inputs
        if weights is not None:
            check_calibrator("default_quant_modules_calibrator_weights", weights)
        check_calibrator("default_quant_modules_calibrator_inputs", inputs)
        flags = {
            "default_per_channel_quant_weights": default_per_channel_quant_weights,
            "default_learn_amax": default_learn_amax,
            "verbose": verbose,
        }
        for name, value in flags.items():
            arguments.flag(name, value)
        arguments.one_of("mode", mode, _ALLOWED)
        if scheme is not None and not isinstance(scheme, QScheme):
            raise ArgumentError("scheme", type(scheme).__name__, "a QScheme such as W8A8(), or None")
        arguments.whole("skip_last", skip_last, 0)
        if mode == "naive":
            if weights is None:
                weights = (scheme or W8A8()).weights.calibrator
            if inputs not in ("histogram", weights):
                allowed = f"{weights!r}: naive quantisation has one calibrator, that of the weights"
                raise ArgumentError("default_quant_modules_calibrator_inputs", repr(inputs), allowed)
            if skip_last or custom_mappings:
                raise ArgumentError("skip_last" if skip_last else "custom_mappings", "exceptions", _hint("naive"))
            inputs = weights
        if mode == "hybrid" and custom_mappings:
            raise ArgumentError("custom_mappings", "mappings", _hint("hybrid"))
        what = "classes of modules to their quantised ones"
        mappings = arguments.mapping("custom_mappings", {} if custom_mappings is None else custom_mappings, what)
        self.mode, self.verbose, self.learn_amax, self.skip_last = mode, verbose, default_learn_amax, skip_last
        self.scheme = scheme or W8A8()
        self.defaults = Defaults(weights, inputs, default_per_channel_quant_weights, default_learn_amax)
        self.default: LayerScheme | None = self.defaults.apply(self.scheme)
        self.rules: dict[Key, Rule] = {}
        self.custom_mappings = {
            source: given if isinstance(given, QuantizedMetadata) else QuantizedMetadata(source, given)
            for source, given in mappings.items()
        }
        self.skip_residuals = self.ptq_only = False
        self.on_indivisible = arguments.one_of("on_indivisible", on_indivisible, CHOICES)
        self.report: list[Outcome] = []
        self.like: Like | None = None  # of a recipe
        self.lookups: list[Fate] = []  # embeddings that the recipe means, found by quantize_module
        self.prepare: Prepare | None = None
        self.made: Mapping[int, nn.Module] = {}  # what it made

    @staticmethod
    def from_recipe(recipe: Recipe, *, verbose: bool | None = None) -> SelectiveQuantizer:
        """The quantizer that a recipe describes: its defaults, skip_modules, and the rules of `layers`.

        verbose  None: as calib_params says.
        """
        if not isinstance(recipe, Recipe):
            raise ArgumentError("recipe", arguments.shown(recipe), "a Recipe")
        params, calibration = recipe.selective_quantizer_params, recipe.calib_params
        quantizer = SelectiveQuantizer(
            params.calibrator_w,
            params.calibrator_i,
            params.per_channel,
            params.learn_amax,
            calibration.verbose if verbose is None else verbose,
            scheme=W8A8(),
            on_indivisible=recipe.on_indivisible,
        )
        default = recipe.default_scheme()
        learns = quantizer.defaults.learns
        quantizer.default = None if default is None else LayerScheme(default, learns=learns)
        for key, scheme in recipe.rules().items():
            source = "selective_quantizer_params.skip_modules" if key in (params.skip_modules or ()) else "layers"
            what = None if scheme is None else LayerScheme(scheme, learns=learns)
            quantizer.rules[key] = Rule.of(key, what, f"recipe.{source}")
        quantizer.ptq_only, quantizer.skip_residuals = recipe.ptq_only, recipe.residuals == "float"
        quantizer.like = Like(recipe.embeddings, recipe.heads)
        return quantizer

    def register_skip_quantization(self, layer_names: Keys, *, float_dtype: str | None = None) -> None:
        """Leave layers, and all layers inside of blocks, in floating point.

        layer_names  a set of keys: names, globs, 're:...', module classes.
        float_dtype  None: as they are. 'float16' or 'bfloat16': Linear layers become 16-bit layers (FP16), which
                     cannot be trained further.
        """
        self._allow("skip")
        if float_dtype not in (None, *HALF_DTYPES):
            raise ArgumentError("float_dtype", repr(float_dtype), f"None, {', '.join(map(repr, HALF_DTYPES))}")
        what = None if float_dtype is None else self.defaults.apply(FP16(float_dtype))
        self._register("register_skip_quantization", layer_names, what)

    def register_quantization_mapping(
        self,
        layer_names: Keys,
        quantized_target_class: type[nn.Module],
        input_quant_descriptor: Any = None,
        weights_quant_descriptor: Any = None,
        *,
        action: ReplacementAction = ReplacementAction.REPLACE_AND_RECURE,
        float_source: type[nn.Module] | None = None,
    ) -> None:
        """Replace blocks by a quantised class, such as BasicBlock by QuantBasicBlock.

        layer_names             keys of the blocks, or of containers of them.
        quantized_target_class  made by its from_float(block) (or constructor); see QuantizedMetadata.
        input_quant_descriptor, weights_quant_descriptor   TensorScheme or QuantDescriptor of the layers inside.
        action                  ReplacementAction.
        float_source            class of the blocks that are meant inside of a container; None: the class that
                                @register_quantized_module names for the target, or its attribute `float_source`.
                                Without either, the keys name the blocks themselves.
        """
        self._allow("mapping")
        if float_source is not None and not isinstance(float_source, type):
            raise ArgumentError("float_source", arguments.shown(float_source), "a class of modules, or None")
        source = float_source or _source_of(quantized_target_class)
        descriptors = (input_quant_descriptor, weights_quant_descriptor)
        mapping = QuantizedMetadata(source, quantized_target_class, action, *descriptors)
        self._register("register_quantization_mapping", layer_names, mapping)

    def register_layer_scheme(
        self,
        layer_names: Keys,
        scheme: QScheme | None = None,
        *,
        calibrator_weights: str | None = None,
        calibrator_inputs: str | None = None,
    ) -> None:
        """Another scheme, or only other calibrators, for some layers.

        layer_names  keys of layers, or of blocks for all layers in them.
        scheme       QScheme; None: the default scheme. A calibrator in it counts, unless it is 'max' or the one that a
                     preset of those bits has ('mse' at 4).
        calibrator_weights, calibrator_inputs   'max', 'percentile', 'entropy', 'mse', 'histogram'; None: the scheme's,
                     or the quantizer's default.
        """
        self._allow("layer scheme")
        if scheme is not None and not isinstance(scheme, QScheme):
            raise ArgumentError("scheme", type(scheme).__name__, "a QScheme such as W4A8(), or None")
        for name, value in (("calibrator_weights", calibrator_weights), ("calibrator_inputs", calibrator_inputs)):
            if value is not None:
                check_calibrator(name, value)
        applied = self.defaults.apply(scheme or self.scheme, calibrator_weights, calibrator_inputs)
        self._register("register_layer_scheme", layer_names, applied)

    def quantize_module(self, model: nn.Module) -> nn.Module:
        """Put simulated quantisation into a model, in place, as everything registered says.

        model  nn.Module with layers that can be quantised. Layers that are simulated already are rebuilt from
               its float weights (their ranges are lost; calibrate again).
        ->     the model; `report` has an Outcome for every layer. Next: QuantizationCalibrator, then convert_.
        Transactional: on any exception the model is as before. Raises ArgumentError naming keys that do nothing, and
        layers that cannot be converted.
        """
        self.quantize_reversibly(model)
        return model

    def quantize_reversibly(self, model: nn.Module) -> list[Undo]:
        """quantize_module for a caller that may still fail. -> the steps that take it back, to be run in reverse."""
        done = self._replacement(model)
        self.report, self.lookups, self.made = done.run(self.skip_last), done.lookups, done.made
        for layer in model.modules():
            if isinstance(layer, SimulatedLayer):
                layer.ptq_only = self.ptq_only
        if self.verbose:
            for outcome in self.report:
                log.info("%s", outcome)
        return done.undo

    def fates(self, model: nn.Module) -> list[Fate]:
        """What quantize_module would make of every layer. Raises as that, and UnsupportedError where blocks are
        replaced first."""
        return self._replacement(arguments.module("model", model)).fates(self.skip_last)

    def _replacement(self, model: nn.Module) -> Replacement:
        kinds = (Residual,) if self.skip_residuals else ()
        rules, mappings = [rule.of_model(model) for rule in self.rules.values()], {**REGISTERED, **self.custom_mappings}
        return Replacement(model, self.default, rules, mappings, kinds, self.on_indivisible, self.like, self.prepare)

    def _register(self, source: str, layer_names: Keys, what: Any) -> None:
        given = [layer_names] if isinstance(layer_names, (str, type)) else layer_names
        keys = sorted(arguments.iterable("layer_names", given, "names and classes"), key=str)
        if not keys:
            raise ArgumentError("layer_names", repr(layer_names), "at least one name, glob, 're:...' or module class")
        self.rules |= {key: Rule.of(key, what, source) for key in keys}

    def _allow(self, what: str) -> None:
        if what not in _ALLOWED[self.mode]:
            raise ArgumentError("mode", f"{self.mode!r} with a {what}", _hint(self.mode))


def _hint(mode: str) -> str:
    return {"naive": "mode='hybrid' to skip layers, mode='selective' for everything"}.get(mode, "mode='selective'")


def _source_of(target: Any) -> type[nn.Module] | None:
    for source, mapping in REGISTERED.items():
        if mapping.quantized_target_class is target:
            return source
    found = getattr(target, "float_source", None)
    return found if isinstance(found, type) else None
