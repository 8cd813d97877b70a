"""quantization='pyquant': compressed-tensors checkpoints by pyquant's schemes. All else is vLLM's own reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from compressed_tensors.quantization import QuantizationArgs
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from pyquant.core.names import GIVEN_CALIBRATOR
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import CheckpointError
from pyquant.integrations.vllm.embedding import PyquantEmbeddingMethod
from pyquant.integrations.vllm.experts import PyquantExpertsMethod, why_left
from pyquant.integrations.vllm.layer import logger, name_of
from pyquant.integrations.vllm.product import refused
from pyquant.integrations.vllm.report import ASKED, record_of, summary
from pyquant.integrations.vllm.scheme import PyquantScheme, text
from pyquant.integrations.vllm.tally import Layers, Tally
from pyquant.io.checkpoint import read_manifest
from pyquant.io.compressed_tensors import NARROW, REFUSAL
from pyquant.io.manifest import FILE

METHOD: Final = "pyquant"
_FILES: Final = "compressed-tensors"
_ONE_A_BYTE: Final = ("int-quantized", "naive-quantized")


class PyquantConfig(CompressedTensorsConfig):  # type: ignore[misc]
    """The quantisation of a compressed-tensors checkpoint, with its integers as the file means them.

    Against vLLM's `compressed-tensors`: scales stay float32; 4-bit weights with quantised inputs run in integers;
    static and affine inputs and zero points of weights are taken; each of the matrices that vLLM joins keeps its own
    input scale; experts run in integers too. Layers with floating-point codes and the key-value cache are left to vLLM.

    Example:
        >>> from vllm import LLM  # doctest: +SKIP
        >>> llm = LLM("checkpoint", quantization="pyquant")  # doctest: +SKIP
    """

    narrow: frozenset[str] = frozenset()
    manifest: Mapping[str, QScheme] = MappingProxyType({})
    embeddings: Sequence[str] = ()
    tally: Tally

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not args and not kwargs:  # what vLLM does for a model that says nothing of quantisation
            raise CheckpointError(
                "quantization='pyquant': got a checkpoint without quantization_config in config.json; allowed: one "
                "with quantised layers (pyquant.save_pretrained); without quantization= vLLM serves it as it is"
            )
        super().__init__(*args, **kwargs)

    def get_name(self) -> str:
        return METHOD

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        is_ours = str(hf_quant_cfg.get("quant_method", "")).replace("_", "-") == _FILES
        return METHOD if user_quant == METHOD and is_ours else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PyquantConfig:
        if config.get("transform_config"):
            raise CheckpointError("quantization_config: transform_config: got rotations of inputs; allowed: none")
        for words, group in config.get("config_groups", {}).items():
            if isinstance(group, dict) and group.get(REFUSAL):
                raise CheckpointError(f"quantization_config: vLLM has no layers for it, and {words}")
        made: PyquantConfig = super().from_config(config)
        own = config.get("pyquant")
        names = own.get(NARROW, []) if isinstance(own, dict) else []
        made.narrow = frozenset(map(str, names)) if isinstance(names, list) else frozenset()
        made.tally = Tally(_tell)
        return made

    @classmethod
    def _quantization_scheme_map_from_config(cls, config: dict[str, Any]) -> dict[str, Any]:
        """With the groups that vLLM's own reader stops at: whole codes one a byte, and nothing said of inputs."""
        groups = config.get("config_groups") or {}
        plain = {name: group for name, group in groups.items() if _is_plain(group, config.get("format"))}
        others = {name: group for name, group in groups.items() if name not in plain}
        found: dict[str, Any] = super()._quantization_scheme_map_from_config({**config, "config_groups": others})
        for group in plain.values():
            weights = QuantizationArgs.model_validate(group["weights"])
            words = {"weights": weights, "input_activations": None, "format": group.get("format")}
            found |= {target: dict(words) for target in group["targets"]}
        return found

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        super().apply_vllm_mapper(hf_to_vllm_mapper)
        self.narrow = frozenset(hf_to_vllm_mapper.apply_list(sorted(self.narrow)))
        self.manifest = hf_to_vllm_mapper.apply_dict(dict(self.manifest))
        self.embeddings = hf_to_vllm_mapper.apply_list(list(self.embeddings))

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Read what pyquant's own manifest says beyond the format: of a directory, not of a name on a hub."""
        super().maybe_update_config(model_name, hf_config=hf_config, revision=revision)
        if (Path(model_name) / FILE).is_file():
            layers = read_manifest(Path(model_name)).layers
            self.manifest = {name: entry.scheme for name, entry in layers.items()}
            self.embeddings = [name for name, entry in layers.items() if entry.kind == "embedding"]

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        method = self._method_of(layer, prefix)
        if isinstance(layer, ASKED):
            is_ours = isinstance(method, (PyquantEmbeddingMethod, PyquantExpertsMethod)) or isinstance(
                getattr(layer, "scheme", None), PyquantScheme
            )
            self.tally.asked(prefix, layer, will_be_packed=is_ours)
        return method

    def _method_of(self, layer: nn.Module, prefix: str) -> Any:
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            # some models of vLLM, Llama among them, give their embedding no name
            prefix = prefix or (self.embeddings[0] if len(self.embeddings) == 1 else "")
            said = self.get_scheme_dict(layer, prefix) or {}
            weights = said.get("weights")
            if weights is not None and said.get("format") != "pack-quantized":
                told = (text(weights.type), weights.num_bits, text(weights.strategy), weights.symmetric)
                if told != ("int", 8, "channel", True):
                    raise refused(prefix, "embedding", str(told), "int, 8 bits, channel, symmetric; or packed codes")
                return PyquantEmbeddingMethod(prefix)
        if isinstance(layer, RoutedExperts):
            return self._method_of_experts(layer, prefix)
        return super().get_quant_method(layer, prefix)

    def _method_of_experts(self, layer: Any, prefix: str) -> Any:
        """Of all matrices of all experts, which must be of one scheme; what pyquant has no bank for is left to vLLM."""
        self._add_fused_moe_to_target_scheme_map()
        matrices = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        said = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in matrices if name is not None]
        if len(said) == 3 and said[0] and all(one == said[0] for one in said) and said[0].get("weights") is not None:
            served = why_left(layer, said[0], said[0].get("format") or self.quant_format)
            if not isinstance(served, str):
                return PyquantExpertsMethod(layer.moe_config, served, prefix)
            logger.info("pyquant: experts '%s' are left to vLLM: %s", prefix, served)
        return super().get_quant_method(layer, prefix)

    def _get_scheme_from_parts(
        self,
        weight_quant: Any,
        input_quant: Any,
        output_quant: Any = None,
        format: str | None = None,
        layer_name: str | None = None,
    ) -> Any:
        name = layer_name or ""
        if text(weight_quant.type) != "int":
            return super()._get_scheme_from_parts(weight_quant, input_quant, output_quant, format, layer_name)
        if output_quant is not None:
            raise refused(name, "outputs", "codes", "real numbers, which vLLM hands on")
        packed = (self.quant_format if format is None else format) == "pack-quantized"
        narrow, two_level = self._told(name)
        return PyquantScheme(weight_quant, input_quant, packed=packed, narrow=narrow, two_level=two_level, name=name)

    def get_scheme_dict(self, layer: nn.Module, layer_name: str | None = None) -> Any:
        """As vLLM finds it, which asks for the first of the joined matrices alone: here all must be of one scheme."""
        found = super().get_scheme_dict(layer, layer_name)
        names = self._joined(layer_name or "")
        others = [super(PyquantConfig, self).get_scheme_dict(layer, name) for name in names]
        for name, other in zip(names, others):
            if other != found and any(others):  # none is named: the file has the joined matrix itself
                got = f"'{name}' quantised otherwise than its first"
                raise refused(str(layer_name), "matrices", got, "one scheme for all that vLLM joins")
        return found

    def _told(self, name: str) -> tuple[bool, TensorScheme | None]:
        """What the format has no words for: whether static inputs leave the lowest code out, and weights of two levels.
        All matrices that vLLM joined in a layer must be alike."""
        is_named = name in self.manifest or name in self.narrow
        told = {self._told_of(one) for one in (not is_named and self._joined(name)) or [name]}
        if len(told) > 1:
            raise refused(name, "matrices", "different ranges of codes", "one scheme for all that vLLM joins")
        return told.pop()

    def _told_of(self, name: str) -> tuple[bool, TensorScheme | None]:
        if name not in self.manifest:
            return name in self.narrow, None
        scheme = self.manifest[name]
        two_level = replace(scheme.weights, calibrator=GIVEN_CALIBRATOR) if scheme.weights.two_level else None
        return scheme.inputs is not None and scheme.inputs.narrow_range, two_level

    def _joined(self, name: str) -> list[str]:
        """Names in the file of the matrices that vLLM joined under a name; [] where it did not."""
        start, _, last = name.rpartition(".")
        return [f"{start}.{one}" if start else one for one in self.packed_modules_mapping.get(last, [])]


def _tell(layers: Layers) -> None:
    """A model was loaded: what each of its layers runs by."""
    logger.info("pyquant: %s", summary(record_of(name or name_of(layer), layer) for name, layer in layers))


def _is_plain(group: Mapping[str, Any], overall: str | None) -> bool:
    weights = group.get("weights")
    if not isinstance(weights, Mapping) or group.get("input_activations") is not None:
        return False
    return weights.get("type", "int") == "int" and (group.get("format") or overall) in _ONE_A_BYTE
