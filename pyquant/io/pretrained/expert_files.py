"""Experts as files of transformers name them, one by one, gate and up apart, for models that hold banks of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, cast

from torch import Tensor, nn

from pyquant.errors import UnsupportedError
from pyquant.io.pretrained.expert_names import ExpertNames
from pyquant.io.record import LayerRecord
from pyquant.nn.experts import QExperts
from pyquant.nn.qlinear import QLinear

_OWN: Final = "pyquant.save_pretrained(model, directory) writes them"


@dataclass(frozen=True)
class Matrix:
    """A matrix of an expert in a file.

    name     of it there.
    pattern  expression for the name and those of the other experts of the bank.
    rows     which output channels of the layer it has, int64.
    """

    name: str
    pattern: str
    rows: Tensor

    def of(self, layer: LayerRecord) -> LayerRecord:
        """Its share of the layer's tensors, each in memory of its own: savers refuse what is shared."""

        def mine(tensor: Tensor | None) -> Tensor | None:
            is_by_row = tensor is not None and len(tensor) == layer.out_features
            return tensor[self.rows.to(tensor.device)] if tensor is not None and is_by_row else _copy(tensor)

        return replace(
            layer,
            name=self.name,
            out_features=len(self.rows),
            codes=cast(Tensor, mine(layer.codes)),
            weight_scale=mine(layer.weight_scale),
            input_scale=_copy(layer.input_scale),
            input_zero_point=_copy(layer.input_zero_point),
        )


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def matrices_of(model: nn.Module) -> dict[str, list[Matrix]]:
    """{layer of a bank of experts: the matrices that files hold of it}; {} for a model without quantised experts.

    model  of transformers, which knows the names.
    Raises UnsupportedError for experts that no reader of compressed-tensors takes as they are.
    """
    banks = {name: module for name, module in model.named_modules() if isinstance(module, QExperts)}
    if not banks:
        return {}
    _check_alike(banks)
    names = ExpertNames(model)
    found: dict[str, list[Matrix]] = {}
    for path, bank in banks.items():
        for layer, one in _matrices(model, path, bank):
            if names.place(one.name).module != layer:
                raise _refused(path, f"files of transformers call a matrix '{one.name}'", "names that pyquant reads")
            found.setdefault(layer, []).append(one)
    return found


def _matrices(model: nn.Module, path: str, bank: QExperts) -> Iterator[tuple[str, Matrix]]:
    """(layer, matrix) of a bank, by what transformers would make of the parameters that the bank had."""
    from pyquant.integrations import transformers  # never at import: it is another library's business

    for place, parameter in enumerate((bank.rule.up, bank.rule.down)):
        n = cast(QLinear, bank.expert(0)[place]).out_features
        told = transformers.rows_in_files(model, f"{path}.{parameter}", bank.num_experts, n)
        if told is None:
            allowed = "a class whose experts files hold one by one, in Linears"
            raise _refused(path, f"files of transformers hold '{parameter}' of all experts as one", allowed)
        for expert, name, pattern, rows in told:
            yield f"{path}.{expert}.{parameter}", Matrix(name, pattern, rows)


def _check_alike(banks: Mapping[str, QExperts]) -> None:
    """Readers take one scheme for all experts of a model, and symmetric weights without bias."""
    layers = [(path, layer) for path, bank in banks.items() for pair in bank.experts() for layer in pair]
    path, first = layers[0]
    schemes = {
        _in_words(layer): layer.scheme if isinstance(layer, QLinear) else "floating point" for _, layer in layers
    }
    if len(schemes) > 1 or not isinstance(first, QLinear):
        told = ", ".join(sorted(map(str, schemes.values())))
        raise _refused(path, f"experts in {told}", "one integer scheme for all experts of the model")
    weights = first.scheme.weights
    if first.scheme.is_float or not weights.symmetric or weights.two_level:
        raise _refused(path, f"experts in {first.scheme}", "symmetric integer weights, one level of scales")
    biased = [path for path, layer in layers if cast(QLinear, layer).bias_ is not None]
    if biased:
        raise _refused(biased[0], "experts with biases", "experts without")


def _in_words(layer: nn.Module) -> tuple[object, ...]:
    """What a reader is told of a layer's scheme."""
    if not isinstance(layer, QLinear):
        return ()
    tensors = (layer.scheme.weights, layer.scheme.inputs)
    return tuple(t and (t.bits, t.symmetric, t.granularity, t.group_size, t.dynamic, t.two_level) for t in tensors)


def _refused(path: str, got: str, allowed: str) -> UnsupportedError:
    return UnsupportedError(f"experts '{path}': got {got}; compressed-tensors readers take: {allowed}; {_OWN}")
