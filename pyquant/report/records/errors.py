"""ErrorReport: what quantisation changes in every tensor of a model, measured on data."""

from __future__ import annotations

from dataclasses import dataclass

from pyquant.report.records.record import record


@dataclass(frozen=True)
class TensorError:
    """The error of one tensor against its float original, over all numbers of all batches.

    layer       name of the layer; '' for the result of the whole model.
    tensor      'weight'; 'input': the layer's input as its codes mean it; 'alone': the layer's result where its input
                comes from the float model; 'output': its result where all layers before it are quantised too.
    scheme      of that tensor, or of the layer.
    count       numbers compared.
    mae, mse, max_error   mean absolute, mean squared and largest error, in the unit of the tensor.
    sqnr_db     10 log10(signal / error), infinite where nothing differs; negative where the error is the larger.
    cosine      of both tensors as vectors.
    clip_share  share of the numbers beyond the range of the codes; None for results.
    kl          Kullback-Leibler divergence in nats of the histogram (128 bins over the float numbers of all
                batches) of quantised results from that of the float ones; None for weights and inputs.
    """

    layer: str
    tensor: str
    scheme: str
    count: int
    mae: float
    mse: float
    max_error: float
    sqnr_db: float
    cosine: float
    clip_share: float | None = None
    kl: float | None = None


@record("errors")
@dataclass(frozen=True)
class ErrorReport:
    """What quantisation changes in a model, tensor by tensor, in the order of the layers; made by error_report.

    model    class of the model. batches, of what data there was.
    rows     TensorErrors; `of(layer)` finds those of one layer.
    skipped  {layer: why there is no row, or not every row, of it}.
    """

    model: str
    batches: int
    rows: tuple[TensorError, ...]
    skipped: dict[str, str]

    def of(self, layer: str, tensor: str = "output") -> TensorError:
        """One row. Raises KeyError naming what there is."""
        for row in self.rows:
            if (row.layer, row.tensor) == (layer, tensor):
                return row
        names = ", ".join(f"{row.layer}.{row.tensor}" for row in self.rows)
        raise KeyError(f"{layer}.{tensor}; there is {names}")

    def worst(self, count: int = 5, tensor: str = "alone") -> list[TensorError]:
        """The rows of one kind with the least SQNR, worst first: layers to keep in more bits, or to calibrate again."""
        return sorted((row for row in self.rows if row.tensor == tensor), key=lambda row: row.sqnr_db)[:count]
