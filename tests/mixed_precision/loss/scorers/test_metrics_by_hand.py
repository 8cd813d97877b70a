"""Every sensitivity metric against its definition, computed in float64 in another way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp

sys.path.insert(0, str(Path(__file__).parents[2]))
import nets

from pyquant.core.registry import SCORERS
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.mixed_precision.choices.switchable import SwitchableModel
from pyquant.mixed_precision.loss.evaluate import LossOfOutputs, TaskMetric
from pyquant.mixed_precision.loss.scorers import Scorer, Scoring, Work, sensitivity_metric

FORMATS = ("fp32", "int8", "int4", "W4A8Dynamic(group_size=8)", "W8A16")


def _scoring(
    model: nn.Module, data: list[Tensor], loss: str = "kl", formats: tuple[str, ...] = FORMATS, **more: object
) -> Scoring:
    switchable = SwitchableModel(model, formats, data, num_batches=len(data))
    return Scoring(switchable, LossOfOutputs(switchable, loss), **more)  # type: ignore[arg-type]


def _table(scorer: Scorer) -> list[list[float]]:
    return scorer.table([scorer.measure(work) for work in scorer.work()])


def _inputs(model: nn.Sequential, data: list[Tensor]) -> dict[str, Tensor]:
    """The input of every Linear of a chain, float32."""
    found, x = {}, torch.cat(data)
    for name, module in model.named_children():
        if isinstance(module, nn.Linear):
            found[name] = x.detach().clone()
        x = module(x)
    return found


def _tail(model: nn.Sequential, name: str) -> nn.Sequential:
    """What comes after a layer, without activations that work in place."""
    later = [m for n, m in model.named_children() if int(n) > int(name)]
    return nn.Sequential(*[nn.ReLU() if isinstance(m, nn.ReLU) else m for m in later])


def test_fisher_is_the_gauss_newton_form_of_each_loss() -> None:
    model, data = nets.classifier(), nets.batches(3)
    inputs = _inputs(model, data)
    for loss in ("kl", "sqnr"):  # mse is that of the pixels
        scoring = _scoring(model, data, loss, FORMATS[:4], repeats=100)
        table = _table(SCORERS.find("fisher")(scoring))
        outputs = torch.cat(data)
        with torch.no_grad():
            outputs = model(outputs).double()
        p = outputs.softmax(-1)
        for g, f in scoring.cells():
            name = scoring.switchable.groups[g].layers[0]
            float_layer, layer = (scoring.switchable.layer(name, i) for i in (0, f))
            with torch.no_grad():
                y, dy = float_layer(inputs[name]), layer(inputs[name]) - float_layer(inputs[name])
                _, change = jvp(_tail(model, name), (y,), (dy,))
            change = change.double()
            if loss == "kl":
                rise = 0.5 * ((p * change.square()).sum(-1) - (p * change).sum(-1).square()).mean()
            else:
                rise = change.square().sum() / outputs.square().sum()
            assert table[g][f] == pytest.approx(rise.item(), rel=0.1), (loss, g, f)
    assert all(row[0] == 0 for row in table)


@pytest.mark.parametrize("rows", [1, 5])
def test_fisher_sums_over_the_pixels_of_a_sample_with_one_output(rows: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 36, 4)).eval()
    data = [torch.randn(rows, 3, 8, 8) for _ in range(4)]
    scoring = _scoring(model, data, "mse", ("fp32", "int4"), repeats=400)
    table = _table(SCORERS.find("fisher")(scoring))
    exact = 0.0
    for x in data:
        with torch.no_grad():
            y = model[0](x)
            _, change = jvp(model[1:], (y,), (scoring.switchable.layer("0", 1)(x) - y,))
        exact += change.double().square().mean().item() / len(data)
    assert table[0][1] == pytest.approx(exact, rel=0.1)


def test_fisher_is_the_rise_of_kl() -> None:
    for model, data, within in (
        (nets.classifier(), nets.batches(4, 256), 0.1),
        (nets.Attention(), nets.tokens(8), 0.25),
    ):
        scoring = _scoring(model, data, formats=("fp32", "int8", "int4"), repeats=8)
        table = _table(SCORERS.find("fisher")(scoring))
        for g, f in scoring.cells():
            config = tuple(f if i == g else 0 for i in range(len(scoring.switchable.groups)))
            measured = scoring.loss(config)
            assert table[g][f] == pytest.approx(measured, rel=within), (type(model).__name__, g, f)


def test_hessian_is_the_trace_times_the_change() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).eval()
    data = [torch.randn(16, 5) for _ in range(2)]
    labels = torch.randint(0, 3, (16,))

    def task_loss(network: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(network(x), labels)

    for loss_fn in (None, task_loss):
        scoring = _scoring(model, data, repeats=500, loss_fn=loss_fn, formats=("fp32", "int4"))
        table = _table(SCORERS.find("hessian")(scoring))
        for g, name in ((0, "0"), (1, "2")):
            weight = model.get_submodule(name).weight.detach()

            def exact(w: Tensor, name: str = name, loss_fn: object = loss_fn) -> Tensor:
                state = {k: v.detach() for k, v in model.state_dict().items()} | {f"{name}.weight": w}
                if loss_fn is not None:
                    fixed = lambda x: functional_call(model, state, (x,))  # noqa: E731
                    return sum(task_loss(fixed, x) for x in data) / len(data)  # type: ignore[arg-type,return-value]
                old = model(torch.cat(data)).detach().log_softmax(-1)
                new = functional_call(model, state, (torch.cat(data),)).log_softmax(-1)
                return (old.exp() * (old - new)).sum(-1).mean()

            hessian = torch.autograd.functional.hessian(exact, weight).reshape(weight.numel(), -1)
            change = (scoring.switchable.layer(name, 1).to_float().weight - weight).square().sum()
            expected = 0.5 * hessian.trace() / weight.numel() * change
            assert table[g][1] == pytest.approx(expected.item(), rel=0.1), (g, loss_fn)


def test_noise_has_the_variance_of_its_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 30)).eval()
    data = [torch.randn(60, 64) for _ in range(2)]
    scoring = _scoring(model, data, "mse", repeats=30)
    table = _table(SCORERS.find("noise")(scoring))
    x, weight = torch.cat(data).double(), model[0].weight.detach().double()
    for f in range(1, len(FORMATS)):
        layer = scoring.switchable.layer("0", f)
        scale = layer.weight_scale.double().reshape(30, -1)
        variance = scale.repeat_interleave(64 // scale.shape[1], 1).square() / 12
        in_weights = (x.square() @ variance.T).mean()
        if f in (1, 2):
            step = layer.input_scale.double().square() / 12
        elif f == 3:  # dynamic, symmetric: amax of the row over 127
            step = (x.abs().amax(1) / 127).square().mean() / 12
        else:
            step = torch.zeros(1)
        expected = in_weights + step * weight.square().sum(1).mean()
        assert table[0][f] == pytest.approx(expected.item(), rel=0.1), f


def test_error_is_noise_to_signal_of_weights_and_inputs() -> None:
    model, data = nets.classifier(), nets.batches()
    scoring = _scoring(model, data)
    table = _table(SCORERS.find("error")(scoring))
    inputs = _inputs(model, data)
    for g, f in scoring.cells():
        name = scoring.switchable.groups[g].layers[0]
        layer, x = scoring.switchable.layer(name, f), inputs[name]
        w = model.get_submodule(name).weight.detach().double()
        total = (layer.to_float().weight.double() - w).square().sum() / w.square().sum()
        if f in (1, 2):
            zero = layer.input_zero_point if layer.input_zero_point is not None else torch.zeros(1)
            low, high = layer.scheme.inputs.code_range
            codes = ((x / layer.input_scale).round() + zero).clamp(low, high)
            rounded = (codes - zero) * layer.input_scale
        elif f == 3:
            scale = x.abs().amax(1, keepdim=True) / 127
            rounded = (x / scale).round() * scale
        else:
            rounded = x
        total = total + (rounded.double() - x.double()).square().sum() / x.double().square().sum()
        assert table[g][f] == pytest.approx(total.item(), rel=1e-3), (g, f)


def test_the_planted_layer_ranks_first_by_every_metric() -> None:
    model, data = nets.planted(), nets.batches(2, 256, 128)
    x = torch.cat(data)
    with torch.no_grad():
        labels = model(x).argmax(-1)
    scoring = _scoring(model, data, formats=("fp32", "int4"))
    scoring.task = TaskMetric(scoring.switchable, lambda m: (m(x).argmax(-1) == labels).float().mean())
    names = [group.name for group in scoring.switchable.groups]
    for metric in SCORERS:
        scorer = SCORERS.find(metric)(scoring)
        if scorer.evaluator is not None:
            losses = [scorer.evaluator(tuple(int(i == g) for i in range(5))) for g in range(5)]
        else:
            losses = [row[1] for row in _table(scorer)]
        assert names[max(range(5), key=losses.__getitem__)] == nets.PLANTED, (metric, losses)
        assert sorted(losses)[-1] > 1.5 * sorted(losses)[-2], (metric, losses)


def test_kl_of_single_groups_adds_up() -> None:
    model, data = nets.classifier(), nets.batches(2, 256)
    scoring = _scoring(model, data, formats=("fp32", "int8"))
    single = [scoring.loss(tuple(int(i == g) for i in range(3))) for g in range(3)]
    assert sum(single) == pytest.approx(scoring.loss((1, 1, 1)), rel=0.15)


def test_rows_are_the_same_whenever_they_are_measured_and_leave_the_model_alone() -> None:
    model, data = nets.Attention(), nets.tokens(2)
    model.q.weight.requires_grad_(False)
    model.train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    scoring = _scoring(model, data, formats=("fp32", "int8"))
    for metric in ("noise", "fisher", "hessian", "error"):
        scorer, again = SCORERS.find(metric)(scoring), SCORERS.find(metric)(scoring)
        rows = [list(scorer.measure(work)) for work in scorer.work()]
        torch.manual_seed(99)
        assert rows == [list(again.measure(work)) for work in reversed(again.work())][::-1], metric
        assert {len(row) for row in rows} == {scorer.width}
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())


def test_encoder_layers_are_seen_although_torch_has_a_faster_path() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    model = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(16, 6)).eval()
    scoring = _scoring(model, [torch.randn(4, 3, 16)], formats=("fp32", "int4"))
    for metric in ("noise", "fisher", "hessian", "error"):
        assert all(row[1] > 0 for row in _table(SCORERS.find(metric)(scoring))), metric
    assert torch.backends.mha.get_fastpath_enabled()


def test_what_a_metric_cannot_do_is_refused() -> None:
    class NoGradients(nn.Sequential):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y

    scoring = _scoring(NoGradients(*nets.classifier()).eval(), nets.batches(1), formats=("fp32", "int8"))
    for metric in ("fisher", "hessian"):
        scorer = SCORERS.find(metric)(scoring)
        with pytest.raises(UnsupportedError, match="without gradients"):
            scorer.measure(scorer.work()[0])
    by_angle = _scoring(nets.classifier(), nets.batches(1), "cosine")
    for metric in ("fisher", "hessian"):
        with pytest.raises(ArgumentError, match="'cosine'"):
            SCORERS.find(metric)(by_angle)
    with pytest.raises(ArgumentError, match="eval_fn"):
        SCORERS.find("eval")(scoring)
    with pytest.raises(ArgumentError, match="'best'"):
        SCORERS.find("best")


def test_a_metric_is_one_class() -> None:
    @sensitivity_metric("size")
    class Size(Scorer):
        """Counts bits."""

        unit = "bits"

        def work(self) -> list[Work]:
            return [Work("all")]

        def measure(self, work: Work) -> list[float]:
            return [1.0]

        def table(self, rows: object) -> list[list[float]]:
            return [[0.0, 8.0] for _ in self.scoring.switchable.groups]

    try:
        from pyquant.mixed_precision.loss.sensitivity import sensitivity

        report = sensitivity(nets.classifier(), nets.batches(1), ("fp32", "int8"), "size", num_batches=1)
        assert report.loss == ((0.0, 8.0),) * 3
        assert report.unit == "bits"
    finally:
        SCORERS.remove("size")
