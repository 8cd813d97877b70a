"""Quantised models as ONNX files, for onnxruntime and TensorRT (docs/onnx.md)."""

from pyquant.integrations.onnx.export import export

__all__ = ["export"]
