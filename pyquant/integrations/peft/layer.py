"""PyquantLoraLinear: what peft puts in the place of a QLinear."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn

from pyquant.errors import ArgumentError, NonFiniteError, QuantizationWarning, UnsupportedError
from pyquant.integrations.peft import merging, refusals
from pyquant.nn.qlinear import QLinear

_TOLD = (
    "merged weights are rounded to the layer's codes again; pyquant.integrations.peft.merge_errors(model) tells the "
    "error of every layer"
)
_LOST = (
    "in some layers rounding the merged weights to codes takes away more than half of what the adapters change "
    "(of_adapter in pyquant.integrations.peft.merge_errors(model)): keep the adapters apart, or merge into float "
    "weights (pyquant.dequantize_) and quantise these in a finer scheme"
)
_STATIC = (
    "a merged layer's static input range clips what the adapters see as well, and it was found without them: calibrate "
    "again after merge_and_unload, or use a dynamic scheme"
)


class PyquantLoraLinear(Linear):  # type: ignore[misc]
    """y = base_layer(x) + lora_B(lora_A(dropout(x))) * scaling, with a QLinear as base_layer.

    Made by peft once enable() or register() was called. The QLinear computes as it does alone and stays frozen;
    gradients flow to A, B and x (straight through the rounding of x). Any scheme; adapters have their own type
    (float32, or the layer's `dtype` with autocast_adapter_dtype=False); the result has that of the QLinear.

    Raises ArgumentError for variants (DoRA ...), for ways to begin that write into the weights (PiSSA, LoftQ ...) and
    for bias other than 'none' where the layer has one; UnsupportedError for a layer that computes an activation (fuse_)
    or gives codes (link_).
    """

    merged_adapters: list[str]
    _codes_before: dict[str, Tensor] | None = None  # while adapters are merged

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> None:
        if kwargs.get("parameter_name") is not None:
            what = kwargs["parameter_name"]
            raise ArgumentError("target_parameters", repr(what), "target_modules: a quantised layer has no parameters")
        super().__init__(base_layer, adapter_name, config, **kwargs)
        self.fan_in_fan_out = False  # also where the float layer was a Conv1D: a QLinear holds [out, in]

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        layer: Any = module
        return layer.in_features, layer.out_features

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """As peft's; refuses what the class does not take, before anything is changed."""
        base = self.get_base_layer()
        refusals.check_config(config)
        if isinstance(base, QLinear):
            refusals.check_bias(config, base)
            refusals.check_layer(base, kwargs.get("target_name") or "")
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer with its active adapters. x  float [..., in_features]. Raises UnsupportedError for codes."""
        if not isinstance(x, Tensor):
            raise UnsupportedError(f"x is a {type(x).__name__}: an adapter takes floats; add adapters before link_")
        result: Tensor = super().forward(x, *args, **kwargs)
        return result

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Round the weights with the changes of adapters to codes of the layer's scheme, and its bias with theirs.

        safe_merge     the numbers are looked at in any case; the argument changes nothing.
        adapter_names  None: those that are active.
        The error of the new weights goes to merge_errors. Several adapters are rounded together, however they are
        merged, and the first codes are kept until unmerge. Warns (QuantizationWarning) that weights are rounded, and
        where that takes away more than half of what the adapters change. Raises NonFiniteError for adapters that hold
        NaN or infinity.
        """
        base = self.get_base_layer()
        if not isinstance(base, QLinear):  # dequantised in the meantime
            super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
            return
        names = [name for name in check_adapters_to_merge(self, adapter_names) or [] if name in self.lora_A]
        if not names:
            return
        before = self._codes_before or merging.state_of(base)
        own = {name: tensor.to(base.storage.device) for name, tensor in before.items()}
        names = [*self.merged_adapters, *names]
        error, state = self._merged(base, own, names)
        base._fill(own | state, in_place=True)
        self._codes_before, self.merged_adapters = before, names
        merging.remember(base, error)
        for told in [
            _TOLD,
            *([_LOST] if error.of_adapter > 0.5 else []),
            *([_STATIC] if base.scheme.is_static else []),
        ]:
            warnings.warn(told, QuantizationWarning, stacklevel=3)  # equal texts: once for all layers

    def _merged(
        self, base: QLinear, own: dict[str, Tensor], names: list[str]
    ) -> tuple[merging.MergeError, dict[str, Tensor]]:
        """The error and the new tensors of a layer that held `own`, with the changes of these adapters."""
        real = merging.real_of(base, own)
        wanted, bias = real.clone(), own.get("bias")
        for name in names:
            wanted += self._change(name)
            if self.lora_bias[name]:
                if bias is None:
                    raise ArgumentError("lora_bias", "True", "False for a layer without a bias, to be merged")
                bias = bias + self.lora_B[name].bias.float() * self.scaling[name]
            if not (bool(wanted.isfinite().all()) and (bias is None or bool(bias.isfinite().all()))):
                raise NonFiniteError("adapter_names", f"'{name}', which holds NaN or infinity", "finite adapters")
        try:
            state = merging.requantised(base, own, wanted)
        except NonFiniteError as error:  # numbers that 16 bits do not hold
            got = f"{names}: too large for {base.scheme} ({error.got})"
            raise NonFiniteError("adapter_names", got, error.allowed) from None
        after = merging.real_of(base, state)
        if not bool(after.isfinite().all()):
            raise NonFiniteError("adapter_names", f"{names}: too large for {base.scheme}", "finite weights")
        return merging.error_of(names, real, wanted, after), state if bias is None else {**state, "bias": bias}

    def _change(self, name: str) -> Tensor:
        """float32 [N, K]: what an adapter adds to the weights."""
        up: Any = self.lora_B[name]
        down: Any = self.lora_A[name]
        change: Tensor = (up.weight.float() @ down.weight.float()) * self.scaling[name]
        return change

    @torch.no_grad()
    def unmerge(self) -> None:
        """Put the codes back that the layer had before the first merge, to the bit."""
        base = self.get_base_layer()
        if not isinstance(base, QLinear) or self._codes_before is None:
            super().unmerge()
            return
        device = base.storage.device
        base._fill({name: tensor.to(device) for name, tensor in self._codes_before.items()}, in_place=True)
        self._codes_before, self.merged_adapters = None, []
        merging.remember(base, None)
