"""LearnedPrecision: the target is met, what is sensitive keeps bits, and the result is a config."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from qat_models import draw, linear
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant import ArgumentError, FqnConfig, LearnedPrecision, convert_, prepare_qat_, quantize_
from pyquant.qat.learned_bits import LearnedBits
from pyquant.qat.precision import _interpolate
from pyquant.simulate.linear import FakeQuantLinear


def net(sensitive: int | None = None) -> nn.Sequential:
    """Three Linears; in the rows of the sensitive one an outlier leaves too few codes to the others at 4 bits."""
    layers = [linear(32, 32, "precision", i) for i in range(3)]
    if sensitive is not None:
        with torch.no_grad():
            layers[sensitive].weight[:, 0] *= 25
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def learn(model: nn.Sequential, steps: int = 80, **options: object) -> tuple[LearnedPrecision, list[float], list[str]]:
    x = draw("precision").normal(64, 32)
    with torch.no_grad():
        target = model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    learned = LearnedPrecision(model, steps=steps, bit_lr=0.1, **options)
    losses, phases = [], []
    for _ in range(steps):
        phases.append(learned.phase)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target) / target.var()
        (loss + learned.penalty()).backward()
        optimizer.step()
        learned.step()
        losses.append(loss.item())
    return learned, losses, phases


@pytest.mark.parametrize("sensitive", [0, 1, 2])
def test_the_sensitive_layer_keeps_more_bits(sensitive: int) -> None:
    model = net(sensitive)
    learned, _, phases = learn(model, target=0.34)  # one of three layers may have 8 bits
    bits = learned.bits()
    assert bits == {str(2 * i): (8 if i == sensitive else 4, 8) for i in range(3)}
    assert [phases.count(p) for p in ("warm-up", "bits", "fine-tune")] == [8, 48, 24]
    assert phases == sorted(phases, key=["warm-up", "bits", "fine-tune"].index)
    config = learned.config()
    assert isinstance(config, FqnConfig)
    assert str(config.entries[str(2 * sensitive)]) == "W8A8Dynamic"
    assert isinstance(model[0], FakeQuantLinear)  # prepared: the rest of the run fine-tunes the real schemes
    assert model[2 * sensitive].scheme.weights.bits == 8
    x = draw("after").normal(4, 32)
    y = model(x).detach()
    convert_(model)
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-4)
    quantize_(net(), config)
    prepare_qat_(net(), config)


def test_a_measured_latency_table_decides_otherwise() -> None:
    """A layer that is not faster with fewer bits keeps them: the penalty has nothing to gain there."""
    flat, steep = {4: 10.0, 8: 10.0, 16: 10.0}, {4: 1.0, 8: 5.0, 16: 10.0}
    learned, _, _ = learn(net(), target=0.5, cost={"0": steep, "2": flat, "4": steep}, strength=3.0)
    bits = learned.bits()
    assert bits["2"][0] >= 8
    total = sum({"0": steep, "2": flat, "4": steep}[name][w] for name, (w, _) in bits.items())
    assert total <= 0.5 * 30


def test_a_loose_target_changes_nothing() -> None:
    learned, _, _ = learn(net(), target=0.99, start_bits=16, steps=20)
    assert set(learned.bits().values()) <= {(16, 16), (8, 8)}
    assert learned.bits()["0"][0] >= 8


@pytest.mark.parametrize("nudge", [-1e-6, 0.0, 1e-6])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_a_rounding_error_asks_for_no_more_bits(bits: int, nudge: float) -> None:
    learned = LearnedPrecision(net(), target=0.99, start_bits=bits, steps=2, phases=(0.0, 1.0))
    with torch.no_grad():
        for layer in learned.layers.values():
            layer.weight_bits.log_limit += nudge
    wanted = learned.bits()
    learned.freeze()
    # 16 bits everywhere are more than the target: one layer has 8. Where 4 are wanted, what is left makes 8 of them.
    expected = {4: [8, 8, 8], 8: [8, 8, 8], 16: [8, 16, 16]}[bits]
    assert sorted(w for w, _ in learned.bits().values()) == expected, wanted


@pytest.mark.parametrize("learn_inputs", [False, True])
def test_what_the_layers_do_not_want_of_the_target_is_given_out(learn_inputs: bool) -> None:
    """No layer could have 8 bits instead of 4 within what is left; the first in order of what they want got them."""
    for target in (0.26, 0.3, 0.34, 0.4, 0.45, 0.5, 0.9):
        model = nn.Sequential(*(linear(k, n, "fill", i) for i, (k, n) in enumerate([(32, 64), (64, 16), (16, 8)])))
        options = {"target": target, "start_bits": 4, "steps": 2, "phases": (0.0, 1.0)}
        learned = LearnedPrecision(model, learn_inputs=learn_inputs, **options)
        costs = {name: table.copy() for name, table in learned._costs.items()}
        learned.freeze()
        bits = {name: max(pair) if learn_inputs else pair[0] for name, pair in learned.bits().items()}
        left = target * sum(table[16] for table in costs.values()) - sum(costs[n][b] for n, b in bits.items())
        assert left >= -1e-6
        assert all(costs[name][8] - costs[name][4] > left for name, b in bits.items() if b == 4)
        assert set(bits.values()) <= {4, 8}
    assert set(bits.values()) == {8}


def test_more_than_16_bits_are_16() -> None:
    learned = LearnedPrecision(net(), target=0.99, start_bits=16, steps=2, phases=(0.0, 1.0))
    with torch.no_grad():
        learned.layers["2"].weight_bits.log_step -= 1.5
    learned.freeze()
    assert learned.bits()["2"] == (16, 16)


@pytest.mark.parametrize("dynamic", [True, False])
def test_learned_inputs(dynamic: bool) -> None:
    model = net(1)
    learned, _, _ = learn(model, target=0.34, learn_inputs=True, dynamic=dynamic)
    bits = learned.bits()
    assert all(w in (4, 8, 16) and a in (4, 8, 16) and a >= w for w, a in bits.values())
    cost = sum((32 * 32 + 32) * max(pair) / 8 for pair in bits.values())
    assert cost <= 0.34 * 3 * (32 * 32 + 32) * 2
    schemes = [s for s in learned.config().entries.values() if s is not None]
    assert all(s.inputs.dynamic == dynamic for s in schemes)
    if not dynamic:
        assert type(model[0]) is nn.Linear  # static inputs want a calibration first


def test_nothing_moves_in_the_warm_up_and_nothing_is_left_behind() -> None:
    model = net()
    weights = [id(p) for p in model.parameters()]
    learned = LearnedPrecision(model, target=0.5, steps=100)
    assert learned.penalty() == 0
    before = copy.deepcopy({n: p for n, p in model.named_parameters() if "log_" in n})
    for _ in range(5):
        model(draw("w").normal(4, 32)).square().mean().backward()
        learned.step()
    after = {n: p for n, p in model.named_parameters() if "log_" in n}
    assert all(torch.equal(before[n], after[n]) for n in before)
    with pytest.raises(ArgumentError, match="phase"):
        learned.config()
    learned.freeze()
    assert [id(p) for p in model.parameters()] == weights


@pytest.mark.parametrize("bits", range(2, 17))
def test_bits_of_step_and_limit(bits: int) -> None:
    fake = LearnedBits(bits, True, torch.device("cpu"))
    assert fake.bits().item() == pytest.approx(bits, abs=1e-4)
    value = fake.bits()
    value.backward()
    assert fake.log_limit.grad >= 0.5  # straight through the ceil: a wider limit costs bits
    assert fake.log_step.grad == -fake.log_limit.grad
    with torch.no_grad():
        fake.log_step -= 0.3
    assert fake.bits().item() == pytest.approx(bits + 1, abs=1e-4)


def test_gradients_of_step_and_limit() -> None:
    """Uhlich et al., U3: inside d(round(x/d) - x/d), beyond the limit sign(x) x_max; in log2 units times ln 2."""
    fake = LearnedBits(4, False, torch.device("cpu"))
    x = draw("u3").normal(50)
    x[0] = 3 * x.abs().max()  # the unit; with a limit of a third, others lie inside
    with torch.no_grad():
        fake.log_limit.fill_(math.log2(0.4))
    grad = draw("g").normal(50)
    fake(x).backward(grad)
    unit = x.abs().max().double()
    d, limit = unit * 2 ** fake.log_step.double(), unit * 2 ** fake.log_limit.double()
    inside = x.double().abs() <= limit
    ratio = x.double() / d
    by_step = (grad * torch.where(inside, d * (ratio.round() - ratio), 0.0)).sum() * math.log(2)
    by_limit = (grad * torch.where(inside, 0.0, x.double().sign() * limit)).sum() * math.log(2)
    assert not inside.all()
    torch.testing.assert_close(fake.log_step.grad.double(), by_step, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fake.log_limit.grad.double(), by_limit, rtol=1e-4, atol=1e-5)


def test_eight_bits_round_as_the_deployed_layer() -> None:
    w = draw("deployed").normal(8, 32)
    from pyquant import ops

    expected = ops.fake_quantize_dynamic(w, "per_channel")[0]
    torch.testing.assert_close(LearnedBits(8, True, torch.device("cpu"))(w), expected, rtol=1e-5, atol=1e-6)


def test_costs_between_the_levels() -> None:
    table = {4: 1.0, 8: 5.0, 16: 7.0}
    for bits, cost in ((3.0, 1.0), (4.0, 1.0), (6.0, 3.0), (8.0, 5.0), (12.0, 6.0), (16.0, 7.0), (17.0, 7.0)):
        assert _interpolate(torch.tensor(bits), table).item() == pytest.approx(cost)


def test_wrong_arguments() -> None:
    for options, match in (
        ({"target": 1.5}, "target"),
        ({"target": 0.2}, "target"),
        ({"target": 0.5, "steps": 0}, "steps"),
        ({"target": 0.5, "phases": (0.6, 0.6)}, "phases"),
        ({"target": 0.5, "start_bits": 3}, "start_bits"),
        ({"target": 0.5, "cost": "time"}, "cost"),
        ({"target": 0.5, "cost": {"0": {4: 1, 8: 2}}}, "cost"),
    ):
        model = net()
        with pytest.raises(ArgumentError, match=match):
            LearnedPrecision(model, **{"steps": 10} | options)
        assert [type(m) for m in model] == [nn.Linear, nn.ReLU] * 2 + [nn.Linear]  # as it was
    with pytest.raises(ArgumentError, match="model"):
        LearnedPrecision(nn.Sequential(nn.ReLU()), target=0.5, steps=10)


def test_static_unit_is_one_number() -> None:
    x: Tensor = draw("unit").normal(4, 8)
    y = LearnedBits(8, False, torch.device("cpu"))(x)
    step = x.abs().max() / 127
    torch.testing.assert_close(torch.round(y / step) * step, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ended", [3, 20, 40, 70])  # warm-up, bits, bits, after the freeze
def test_a_run_resumes_to_the_same_bits(ended: int) -> None:
    x = draw("precision").normal(64, 32)
    target = net(1)(x).detach()

    def begun() -> tuple[nn.Sequential, LearnedPrecision, torch.optim.Optimizer]:
        model = net(1)
        weights = list(model.parameters())
        learned = LearnedPrecision(model, steps=80, bit_lr=0.1, target=0.34)
        return model, learned, torch.optim.SGD(weights, lr=1e-5, momentum=0.9)

    def go_on(model: nn.Module, learned: LearnedPrecision, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            (F.mse_loss(model(x), target) + learned.penalty()).backward()
            optimizer.step()
            learned.step()

    whole, first, resumed = begun(), begun(), begun()
    go_on(*whole, 80)
    go_on(*first, ended)
    kept = copy.deepcopy([part.state_dict() for part in first])
    resumed[1].load_state_dict(kept[1])
    resumed[0].load_state_dict(kept[0])
    resumed[2].load_state_dict(kept[2])
    assert resumed[1].phase == first[1].phase
    assert resumed[1].bits() == first[1].bits()
    go_on(*resumed, 80 - ended)
    assert resumed[1].bits() == whole[1].bits()
    a, b = whole[0].state_dict(), resumed[0].state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_state_of_another_run_is_refused() -> None:
    model = net()
    learned = LearnedPrecision(model, steps=80, target=0.5)
    state = learned.state_dict()
    with pytest.raises(ArgumentError, match="ends"):
        LearnedPrecision(net(), steps=40, target=0.5).load_state_dict(state)
    with pytest.raises(ArgumentError, match="layers"):
        LearnedPrecision(nn.Sequential(nn.Linear(8, 8)), steps=80, target=0.5).load_state_dict(state)
    learned.freeze()
    with pytest.raises(ArgumentError, match="not final yet"):
        learned.load_state_dict(state)
