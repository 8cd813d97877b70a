"""What onnxruntime made of an exported model: its optimised graph, and the results of a run."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

# Operators of onnxruntime that multiply codes by codes; those that read packed codes beside floating-point activations.
INTEGER: Final = frozenset(
    {
        "ConvInteger",
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "QGemm",
        "QLinearConv",
        "QLinearMatMul",
    }
)
PACKED: Final = frozenset({"GatherBlockQuantized", "MatMulNBits"})
PRECISE: Final = "session.x64quantprecision"  # sums of codes in 32 bits on x86 CPUs without VNNI
_THROUGH: Final = ("Cast", "DequantizeLinear", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


class Session:
    """An exported file, optimised and loaded by onnxruntime on a CPU."""

    def __init__(self, path: Path, *, is_precise: bool = False) -> None:
        import onnx
        import onnxruntime

        self._path = path
        options = onnxruntime.SessionOptions()
        # of integer weights that it multiplies as they are it would round the activations to 8 bits: another model
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        if is_precise:
            options.add_session_config_entry(PRECISE, "1")
        options.log_severity_level = 3  # it warns that an optimised graph belongs to this machine, which is its purpose
        with tempfile.TemporaryDirectory(prefix="pyquant-onnx-") as folder:
            optimised = Path(folder) / "optimised.onnx"
            options.optimized_model_filepath = str(optimised)
            options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.bin")
            options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            self.graph = onnx.load(str(optimised), load_external_data=False).graph

    def precise(self) -> Session:
        """The same file in a session whose sums of codes do not saturate."""
        return Session(self._path, is_precise=True)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Results for the tensors in the order of the graph's inputs."""
        names = [one.name for one in self._session.get_inputs()]
        feed = {name: _array(x) for name, x in zip(names, inputs, strict=True)}
        return [torch.from_numpy(y) for y in self._session.run(None, feed)]

    def operators_of(self, constant: str) -> list[str]:
        """The operators that read a constant of the exported file, or what it was renamed to; [] where it is gone."""
        names = {i.name for i in self.graph.initializer if i.name == constant or i.name.startswith(f"{constant}_")}
        found: list[str] = []
        while names:
            readers = [node for node in self.graph.node if names & set(node.input)]
            found += [node.op_type for node in readers if node.op_type not in _THROUGH]
            names = {name for node in readers if node.op_type in _THROUGH for name in node.output}
        return found


def _array(x: Tensor) -> Any:
    return x.detach().cpu().contiguous().numpy()


def constant_of(constants: Mapping[str, Any], names: Sequence[str], codes: Tensor) -> str | None:
    """The exporter's name for the codes of a layer that stands in the model under these names, or None.

    Of layers with equal codes the exporter keeps those of one.
    """
    wanted = [f"{name}.codes" if name else "codes" for name in names]
    own = next((name for name in wanted if name in constants), None)
    return own or next((name for name, one in constants.items() if _holds(name, one, codes)), None)


def _holds(name: str, constant: Any, codes: Tensor) -> bool:
    if name.rpartition(".")[2] != "codes" or list(constant.shape) != list(codes.shape):
        return False
    return bool((constant.const_value.numpy().astype("int16") == codes.to(torch.int16).numpy()).all())
