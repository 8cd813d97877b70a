"""What every layer of a model of vLLM runs by: pyquant's integers, vLLM's own kernels, or floating point, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from pyquant.integrations.vllm.embedding import PyquantEmbeddingMethod
from pyquant.integrations.vllm.experts import PyquantExpertsMethod
from pyquant.integrations.vllm.kernels import PyquantInt8LinearKernel, PyquantMixedLinearKernel
from pyquant.integrations.vllm.layer import name_of
from pyquant.integrations.vllm.product import Product
from pyquant.integrations.vllm.scheme import PyquantScheme

INTEGERS: Final = "integers"
WEIGHT_ONLY: Final = "weight-only"
ROWS: Final = "rows of codes"
VLLM: Final = "vLLM's kernel"
FLOAT: Final = "floating point"
_WORDS: Final = {
    INTEGERS: "in integers",
    WEIGHT_ONLY: "weight-only",
    ROWS: "as rows of codes",
    VLLM: "by vLLM's kernels",
    FLOAT: "in floating point",
}
# Layers that vLLM asks its quantisation method about.
ASKED: Final = (LinearBase, VocabParallelEmbedding, RoutedExperts)
_PARTS: Final = (PyquantScheme, PyquantInt8LinearKernel, PyquantMixedLinearKernel)
_FLOATS: Final = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)


@dataclass(frozen=True)
class ServedLayer:
    """One layer of a model that vLLM loaded, in one process.

    name      fully qualified, vLLM's: matrices that it joins are one layer (qkv_proj, gate_up_proj).
    kind      class name of the layer.
    runs      'integers' (integer products), 'weight-only' (products of codes with floating-point inputs) and 'rows of
              codes' (embeddings) are pyquant's; "vLLM's kernel" is quantised, by vLLM's own; 'floating point'.
    scheme    pyquant's scheme as text; of others the class that vLLM runs.
    products  how many products of pyquant a call takes; rows of an embedding count as one,
              a bank of experts as two.
    kernel    of pyquant, for one row of inputs; empty for embeddings.
    reason    why pyquant does not run it; empty where it does.
    """

    name: str
    kind: str
    runs: str
    scheme: str
    products: int = 0
    kernel: str = ""
    reason: str = ""


def serving_report(model: nn.Module) -> list[ServedLayer]:
    """One record for every layer of a model of vLLM that holds matrices, in the order of named_modules.

    model  as vLLM hands it to `llm.apply_model(serving_report)`; other processes than the caller's: WorkerExtension.

    Example:
        >>> from vllm import LLM  # doctest: +SKIP
        >>> llm = LLM("checkpoint", quantization="pyquant")  # doctest: +SKIP
        >>> for layer in llm.apply_model(serving_report)[0]:  # doctest: +SKIP
        ...     print(layer.name, layer.runs, layer.reason)
    """
    return list(_records(model))


class WorkerExtension:
    """Adds `pyquant_report` to the workers of vLLM, which live in other processes.

    Example:
        >>> from vllm import LLM  # doctest: +SKIP
        >>> extension = "pyquant.integrations.vllm.WorkerExtension"  # doctest: +SKIP
        >>> llm = LLM("checkpoint", quantization="pyquant", worker_extension_cls=extension)  # doctest: +SKIP
        >>> llm.collective_rpc("pyquant_report")[0]  # of the first rank # doctest: +SKIP
    """

    def pyquant_report(self) -> list[dict[str, Any]]:
        """serving_report of this worker's model; each record as a dictionary, which vLLM can send."""
        worker: Any = self
        return [asdict(record) for record in serving_report(worker.get_model())]


def record_of(name: str, layer: nn.Module) -> ServedLayer:
    """The record of a layer that vLLM asked a quantisation method about, after loading."""
    held: Any = layer
    kind, method = type(layer).__name__, held.quant_method
    if isinstance(method, PyquantEmbeddingMethod):
        return ServedLayer(name, kind, ROWS, "int8 per row", 1)
    if isinstance(method, PyquantExpertsMethod):
        bank: Any = held.pyquant
        first: Any = bank.expert(0)[0]
        runs = INTEGERS if first.scheme.is_integer else WEIGHT_ONLY
        kernels = {info.kernel for info in bank.kernel_info(1).values()}
        return ServedLayer(name, kind, runs, str(first.scheme), 2, ", ".join(sorted(kernels)))
    if _runs_by_pyquant(layer):
        product: Any = held.pyquant
        runs = INTEGERS if product.scheme.is_integer else WEIGHT_ONLY
        kernels = {part.kernel_info(1).kernel for part in product.parts}
        return ServedLayer(name, kind, runs, str(product.scheme), len(product.parts), ", ".join(sorted(kernels)))
    if isinstance(method, _FLOATS):
        return ServedLayer(name, kind, FLOAT, type(method).__name__, reason=_why_float(name, layer))
    names = [type(part).__name__ for part in _acting(layer)]
    reason = "vLLM's reader and choice: quantization='pyquant', or PYQUANT_VLLM=prefer, puts pyquant before it"
    if isinstance(layer, RoutedExperts):
        reason = "vLLM's log says why its own code runs these experts"
    return ServedLayer(name, kind, VLLM, " ".join(names), reason=reason)


def summary(records: Iterable[ServedLayer]) -> str:
    """How many layers run by what, and the names of those that pyquant does not run."""
    found = list(records)
    counts = Counter(record.runs for record in found)
    told = [f"{counts[runs]} {words}" for runs, words in _WORDS.items() if counts[runs]]
    left = [f"'{record.name or record.kind}' ({record.runs}: {record.reason})" for record in found if record.reason]
    text = f"{len(found)} layers, of which run {', '.join(told)}"
    return text + (f"; not by pyquant: {', '.join(left)}" if left else "")


def _records(model: nn.Module) -> Iterator[ServedLayer]:
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, ASKED):
            inside = list(module.modules())
            yield record_of(name or name_of(module), module)
        elif id(module) not in seen and _has_matrices(module):
            inside = [module]
            yield ServedLayer(
                name, type(module).__name__, FLOAT, type(module).__name__, reason="vLLM has no quantised form of it"
            )
        else:
            continue
        seen |= {id(one) for one in inside}


def _has_matrices(module: nn.Module) -> bool:
    held = [p for p in module._parameters.values() if p is not None]
    return any(p.dim() > 1 and p.is_floating_point() for p in held)


def _acting(layer: nn.Module) -> list[Any]:
    """The objects that vLLM hands a call on to: the method, its scheme, their kernel."""
    held: Any = layer
    parts = [held.quant_method]
    if isinstance(held.quant_method, CompressedTensorsLinearMethod):
        parts.append(getattr(layer, "scheme", None))
    return [*filter(None, parts), *(part.kernel for part in parts if getattr(part, "kernel", None) is not None)]


def _runs_by_pyquant(layer: nn.Module) -> bool:
    return isinstance(_acting(layer)[-1], _PARTS) and isinstance(getattr(layer, "pyquant", None), Product)


def _why_float(name: str, layer: nn.Module) -> str:
    config: Any = getattr(layer, "quant_config", None)
    if config is None:
        given = "vLLM's model builds it without a quantisation"
        return given if isinstance(layer, LinearBase) else f"the checkpoint leaves it so, or {given}"
    if isinstance(config, CompressedTensorsConfig):
        said = config.get_scheme_dict(layer, getattr(layer, "prefix", "") or name)
        if said is not None and said.get("weights") is not None:
            return "it is quantised in the checkpoint, and another method was put in its place"
    return "the checkpoint leaves it so"
