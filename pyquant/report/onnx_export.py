"""An OnnxExport as Markdown and CSV; FORMATS is what the registry finds here."""

from __future__ import annotations

from typing import Final

from pyquant.report.records.onnx_export import OnnxExport
from pyquant.report.render import csv_text, page, table

_HEADS: Final = ("layer", "scheme", "exported as", "onnxruntime runs", "in", "why")


def layers_table(report: OnnxExport) -> str:
    """A row a layer."""
    rows = [(one.name, one.scheme, one.form, " ".join(one.operators), one.runs_as, one.why) for one in report.layers]
    return table(_HEADS, rows)


def outputs_table(report: OnnxExport) -> str:
    """A row a result."""
    rows = [
        (str(i), "equal" if one.equal else "differ", f"{one.max_error:.3g}", f"{one.relative_error:.3g}")
        for i, one in enumerate(report.outputs)
    ]
    return table(("result", "bits", "largest difference", "relative (L2)"), rows)


def onnx_markdown(report: OnnxExport) -> str:
    """Both tables, with the versions that they are true of."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    intro = (
        f"For {report.target}, opset {report.opset}; {versions}. The columns of onnxruntime are of its CPU provider."
    )
    return page([f"# {report.path}", intro, layers_table(report), outputs_table(report)])


def onnx_csv(report: OnnxExport) -> str:
    """A line a layer."""
    rows = ((one.name, one.scheme, one.form, " ".join(one.operators), one.runs_as, one.why) for one in report.layers)
    return csv_text(("layer", "scheme", "form", "operators", "runs_as", "why"), rows)


FORMATS: Final = {"md": onnx_markdown, "csv": onnx_csv}
