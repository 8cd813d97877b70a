"""Whole blocks with a quantised counterpart: the actions, the table of registered classes, and wrappers in a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from torch import nn

from pyquant.core import arguments
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, PyquantError

Class = TypeVar("Class", bound=type[nn.Module])


class ReplacementAction(Enum):
    """What happens to a module that a mapping names.

    REPLACE             the target takes its place as it is made; nothing inside is looked at.
    REPLACE_AND_RECURE  the target takes its place, then the layers inside the target are quantised.
    RECURE_AND_REPLACE  the layers inside are quantised, then the target is made of the result.
    UNWRAP              the module's `float_module` takes its place and stays in floating point.
    SKIP                the module stays as it is, with all that is inside.

    Example:
        >>> ReplacementAction("skip").name
        'SKIP'
    """

    REPLACE = "replace"
    REPLACE_AND_RECURE = "replace_and_recure"
    RECURE_AND_REPLACE = "recure_and_replace"
    UNWRAP = "unwrap"
    SKIP = "skip"


@dataclass(frozen=True)
class QuantizedMetadata:
    """One mapping: what is replaced, by what, how.

    float_source            class of the float module, or None where names alone say what is replaced.
    quantized_target_class  class of its counterpart; made by `from_float(module)` or, without one, by its
                            constructor with the float module as the only argument. A keyword `scheme` is filled with
                            the QScheme of that place where the function has one.
    action                  ReplacementAction.
    input_quant_descriptor, weights_quant_descriptor   TensorScheme (or QuantDescriptor) of the layers inside, instead
                            of the default scheme's.

    Raises ArgumentError for a target that is no module class.

    Example:
        >>> QuantizedMetadata(nn.Linear, nn.Identity, ReplacementAction.REPLACE).build(nn.Linear(2, 2), None, "fc")
        Identity()
    """

    float_source: type[nn.Module] | None
    quantized_target_class: type[nn.Module] | None
    action: ReplacementAction = ReplacementAction.REPLACE_AND_RECURE
    input_quant_descriptor: Any = None
    weights_quant_descriptor: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.action, ReplacementAction):
            allowed = ", ".join(f"ReplacementAction.{a.name}" for a in ReplacementAction)
            raise ArgumentError("action", repr(self.action), allowed)
        needs = self.action not in (ReplacementAction.SKIP, ReplacementAction.UNWRAP)
        _check_class("quantized_target_class", self.quantized_target_class, may_be_none=not needs)
        _check_class("float_source", self.float_source, may_be_none=True)

    def build(self, module: nn.Module, scheme: QScheme | None, name: str) -> nn.Module:
        """The counterpart of one module. Raises ArgumentError naming the place where the class cannot be made of it."""
        target = self.quantized_target_class
        if target is None:
            raise ArgumentError("quantized_target_class", "None", "a class")
        make: Callable[..., Any] = getattr(target, "from_float", target)
        try:
            parameters = inspect.signature(make).parameters
            block = make(module, scheme=scheme) if "scheme" in parameters else make(module)
        except (PyquantError, TypeError, AttributeError) as error:
            raise ArgumentError(
                f"{name}: quantized_target_class",
                f"{target.__name__} cannot be made of a {type(module).__name__}: {error}"[:300],
                "a class with from_float(module), or a constructor that takes the float module",
            ) from error
        if not isinstance(block, nn.Module):
            got = f"from_float gave a {type(block).__name__}"
            raise ArgumentError(f"{name}: quantized_target_class", got, "an nn.Module")
        return block.train(module.training)


REGISTERED: Final[dict[type[nn.Module], QuantizedMetadata]] = {}


def register_quantized_module(
    float_source: type[nn.Module] | tuple[type[nn.Module], ...] | list[type[nn.Module]],
    action: ReplacementAction = ReplacementAction.REPLACE_AND_RECURE,
    input_quant_descriptor: Any = None,
    weights_quant_descriptor: Any = None,
) -> Callable[[Class], Class]:
    """Decorator: the class is the quantised counterpart of `float_source`, wherever SelectiveQuantizer meets one.

    float_source  class or classes; subclasses are not meant (they may compute something else).
    action, input_quant_descriptor, weights_quant_descriptor   as in QuantizedMetadata.
    Raises ArgumentError for what is no module class, and for a class that has a counterpart already.

    Example:
        >>> class Block(nn.Module): ...
        >>> @register_quantized_module(float_source=Block)
        ... class QuantBlock(nn.Module):
        ...     @classmethod
        ...     def from_float(cls, block): return cls()
        >>> REGISTERED.pop(Block).quantized_target_class.__name__
        'QuantBlock'
    """
    sources = tuple(float_source) if isinstance(float_source, (tuple, list)) else (float_source,)

    def register(target: Class) -> Class:
        mappings = {
            source: QuantizedMetadata(source, target, action, input_quant_descriptor, weights_quant_descriptor)
            for source in sources
        }
        for source in mappings:
            _check_class("float_source", source)
            if source in REGISTERED:
                known = REGISTERED[source].quantized_target_class
                got = f"{source.__name__}, which has {getattr(known, '__name__', known)}"
                raise ArgumentError("float_source", got, "one counterpart for a class")
        REGISTERED.update(mappings)
        return target

    return register


class Wrapper(nn.Module):
    """A word about a module in the model itself; forward passes through. quantize_module takes the wrapper off."""

    def __init__(self, argument: str, module: nn.Module) -> None:
        super().__init__()
        self.float_module = arguments.module(argument, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module inside."""
        return self.float_module(*args, **kwargs)


class SkipQuantization(Wrapper):
    """A wrapper that says in the model itself: this module stays in floating point.

    module  any nn.Module; forward passes through. SelectiveQuantizer.quantize_module takes the wrapper off.

    Example:
        >>> SkipQuantization(nn.Linear(4, 2)).float_module.out_features
        2
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__("module", module)


class QuantizedMapping(Wrapper):
    """A wrapper that says in the model itself what takes a module's place; forward passes through until then.

    float_module            any nn.Module.
    quantized_target_class, action, input_quant_descriptor, weights_quant_descriptor   as in QuantizedMetadata.

    Example:
        >>> QuantizedMapping(float_module=nn.Linear(4, 2), quantized_target_class=nn.Identity).mapping.action.name
        'REPLACE_AND_RECURE'
    """

    def __init__(
        self,
        *,
        float_module: nn.Module,
        quantized_target_class: type[nn.Module],
        action: ReplacementAction = ReplacementAction.REPLACE_AND_RECURE,
        input_quant_descriptor: Any = None,
        weights_quant_descriptor: Any = None,
    ) -> None:
        super().__init__("float_module", float_module)
        descriptors = (input_quant_descriptor, weights_quant_descriptor)
        self.mapping = QuantizedMetadata(None, quantized_target_class, action, *descriptors)


def _check_class(argument: str, value: object, *, may_be_none: bool = False) -> None:
    if value is None and may_be_none:
        return
    if not isinstance(value, type) or not issubclass(value, nn.Module):
        raise ArgumentError(argument, repr(value)[:120], "a class of torch.nn.Module")
