"""OnnxExport: what became of a model in an ONNX file, layer by layer, and how far its results are from the model's."""

from __future__ import annotations

from dataclasses import dataclass

from pyquant.report.records.record import record


@dataclass(frozen=True)
class OnnxLayer:
    """One layer. form: what was exported. operators: those of onnxruntime's optimised graph that read its codes.

    runs_as  'integer' (codes times codes), 'codes' (weights read as codes, activations in floating point), 'float',
             'constant' (its result depends on no input), or 'unused'; why: in words.
    """

    name: str
    scheme: str
    form: str
    operators: tuple[str, ...]
    runs_as: str
    why: str


@dataclass(frozen=True)
class OnnxOutput:
    """One result of onnxruntime beside the model's: same bits, largest difference, relative difference (L2)."""

    equal: bool
    max_error: float
    relative_error: float


@record("onnx-export")
@dataclass(frozen=True)
class OnnxExport:
    """The report of pyquant.integrations.onnx.export.

    path, target, opset   as asked for. versions: {package: version} that wrote and read the file.
    layers   quantised ones and floating-point ones. outputs: in the model's order.

    Example:
        >>> layer = OnnxLayer("head", "W8A8", "Q/DQ Gemm", ("Gemm",), "float", "Gemm reads its weights dequantised")
        >>> OnnxExport("m.onnx", "onnxruntime", 21, {}, (layer,), ()).not_integer[0].name
        'head'
    """

    path: str
    target: str
    opset: int
    versions: dict[str, str]
    layers: tuple[OnnxLayer, ...]
    outputs: tuple[OnnxOutput, ...]

    @property
    def not_integer(self) -> tuple[OnnxLayer, ...]:
        """Layers of integer schemes that onnxruntime multiplies in floating point."""
        return tuple(one for one in self.layers if one.runs_as == "float" and one.form in _INTEGER_FORMS)

    @property
    def equal(self) -> bool:
        """Whether every result has the model's bits."""
        return all(one.equal for one in self.outputs)


_INTEGER_FORMS = ("ConvInteger", "MatMulInteger", "Q/DQ Conv", "Q/DQ Gemm", "Q/DQ MatMul")
