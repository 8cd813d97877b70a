"""The loop: schedule, clipping, autocast, scaling, callbacks, and QAT that recovers what 4 bits cost."""

from __future__ import annotations

import copy
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from qat_models import calibrate, draw, linear, mlp, prepared
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant import ArgumentError, NonFiniteError, QATRecipe, Recipe, convert_, finetune, prepare_qat_
from pyquant.core.presets import W4A4, W8A8, W4A8Dynamic, W8A8Dynamic
from pyquant.qat.finetune import param_groups


def data(*path: object, n: int = 4) -> list[tuple[Tensor, Tensor]]:
    d = draw("finetune", *path)
    teacher = mlp("teacher")
    with torch.no_grad():
        return [(x, teacher(x)) for x in (d.normal(16, 32) for _ in range(n))]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[1])


def test_four_bits_recover() -> None:
    """R121: training brings back most of what rounding to 4 bits cost, and the deployed layer keeps it."""
    batches = data("recover", n=8)
    model = mlp("teacher")  # trained as well as can be: it is the teacher
    x = torch.cat([b[0] for b in batches])
    target = torch.cat([b[1] for b in batches])
    calibrate(prepared(model, W4A4(symmetric_inputs=False)), x, share=0.9)
    with torch.no_grad():
        before = F.mse_loss(convert_(copy.deepcopy(model))(x), target).item()
    finetune(model, loss, batches, lr=0.1, steps=150, recipe=QATRecipe(bits=4))
    convert_(model)
    after = F.mse_loss(model(x), target).item()
    assert after < 0.5 * before


def test_schedule_momentum_and_clipping() -> None:
    batches = data("schedule")
    model = prepared(mlp(), W8A8Dynamic())
    manual = copy.deepcopy(model)
    losses = finetune(model, loss, batches, lr=0.05, epochs=3, weight_decay=0.01)
    recipe = QATRecipe()
    ordered = sorted(manual.parameters(), key=lambda p: -p.dim())
    optimizer = torch.optim.SGD(
        [{"params": [p for p in manual.parameters() if p.dim() == k], "weight_decay": 0.01 * (k - 1)} for k in (2, 1)],
        lr=0.05,
        momentum=0.9,
    )
    expected = []
    for step in range(12):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * recipe.lr_factor(step, 12)
        optimizer.zero_grad()
        value = loss(manual, batches[step % 4])
        value.backward()
        assert nn.utils.clip_grad_norm_(ordered, 1.0) > 0
        optimizer.step()
        expected.append(value.item())
    assert losses == expected
    for p, q in zip(model.parameters(), manual.parameters(), strict=True):
        assert torch.equal(p, q)
    assert model.training


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("forward", ["simulated", "int8"])
def test_autocast_and_learned_ranges(autocast: torch.dtype, forward: str) -> None:
    batches = data("autocast")
    model = prepared(mlp("s"), W8A8(), batches[0][0], learn_amax=True, forward=forward)
    losses = finetune(
        model, loss, batches, lr=0.1, steps=30, autocast=autocast, recipe=QATRecipe(optimizer="sgd"), range_lr=0.1
    )
    assert losses[-1] < losses[0]
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_adamw_and_callbacks() -> None:
    seen: list[tuple[int, float, bool]] = []
    batches = data("adam")
    model = prepared(mlp("s"), W4A8Dynamic(16), learn_amax=True)

    def look(step: int, value: float) -> None:
        seen.append((step, value, model[0].weight.grad is not None))

    losses = finetune(model, loss, batches, lr=0.01, steps=20, recipe=QATRecipe(optimizer="adamw"), on_step=look)
    assert [s[0] for s in seen] == list(range(20))
    assert [s[1] for s in seen] == losses
    assert all(s[2] for s in seen)
    assert losses[-1] < losses[0]


def test_muon_for_the_weights_of_linears_and_adamw_for_the_rest() -> None:
    """The same steps as torch's optimisers by hand; a table that is tied to a head counts as a table."""
    recipe = QATRecipe(bits=4, optimizer="muon", grad_clip=1e9)
    embedding, head = nn.Embedding(11, 8), nn.Linear(8, 11)
    head.weight = embedding.weight
    model = prepared(nn.Sequential(embedding, nn.Linear(8, 8), nn.LayerNorm(8), head), W4A8Dynamic(8))
    manual = copy.deepcopy(model)
    ids = torch.arange(11).view(1, 11)

    def ce(m: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(m(x).flatten(0, 1), x.flatten())

    losses = finetune(model, ce, [ids], lr=0.02, steps=12, recipe=recipe, weight_decay=0.1)
    table, weight = manual[0].weight, manual[1].weight
    others = [manual[1].bias, manual[2].weight, manual[2].bias, manual[3].bias]
    muon = torch.optim.Muon([weight], 0.02, 0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([{"params": [table], "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    expected = []
    for step in range(12):
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = 0.02 * recipe.lr_factor(step, 12)
        manual.zero_grad()
        value = ce(manual, ids)
        value.backward()
        muon.step()
        adamw.step()
        expected.append(value.item())
    assert losses == expected
    assert losses[-1] < 0.7 * losses[0]
    for p, q in zip(model.parameters(), manual.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("autocast", [None, torch.float16])
def test_muon_with_learned_ranges_and_a_scaled_loss(autocast: torch.dtype | None) -> None:
    batches = data("muon")
    model = prepared(mlp("s"), W4A8Dynamic(16), learn_amax=True)
    recipe = QATRecipe(bits=4, optimizer="muon")
    losses = finetune(model, loss, batches, lr=0.02, steps=30, autocast=autocast, recipe=recipe, range_lr=0.1)
    assert losses[-1] < 0.5 * losses[0]


def test_a_step_that_overflows_for_one_optimiser_is_left_out_by_both() -> None:
    """The norm for clipping is that of all gradients, and Muon's alone would look finite to the scaler."""
    model = prepared(mlp("s"), W4A8Dynamic(16))
    seen: list[list[Tensor]] = []
    model[0].bias.register_hook(lambda grad: grad * torch.inf if len(seen) == 2 else grad)

    def look(step: int, value: float) -> None:
        seen.append([p.detach().clone() for p in model.parameters()])

    recipe = QATRecipe(bits=4, optimizer="muon")
    finetune(model, loss, data("muon"), lr=0.02, steps=6, autocast=torch.float16, recipe=recipe, on_step=look)
    pairs = [zip(before, after) for before, after in pairwise(seen)]
    assert [all(torch.equal(*pair) for pair in step) for step in pairs] == [False, False, True, False, False]
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("grad_clip", [1.0, 0.0])
def test_gradients_that_no_scale_of_the_loss_makes_finite_stop_the_training(grad_clip: float) -> None:
    """Each such step is left out: without an end to that a run trains nothing and says nothing."""
    recipe, count = QATRecipe(grad_clip=grad_clip), 0

    def spoilt(grad: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return grad * torch.inf if count % 32 else grad

    model = prepared(mlp("s"), W4A8Dynamic(16))
    before = copy.deepcopy(model.state_dict())
    handle = model[0].bias.register_hook(spoilt)
    finetune(model, loss, data("muon"), lr=0.02, steps=40, autocast=torch.float16, recipe=recipe)  # 31, then one
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    handle.remove()
    model[0].bias.register_hook(lambda grad: grad * torch.nan)
    with pytest.raises(NonFiniteError, match="in 32 steps one after another, up to step 31"):
        finetune(model, loss, data("muon"), lr=0.02, steps=40, autocast=torch.float16, recipe=recipe)


def test_muon_without_a_linear_or_with_nothing_else() -> None:
    recipe = QATRecipe(bits=4, optimizer="muon")
    for model in (nn.Sequential(nn.Linear(4, 4, bias=False)), nn.Sequential(nn.LayerNorm(4))):
        before = copy.deepcopy(model)
        finetune(model, lambda m, x: m(x).square().mean(), [torch.randn(3, 4)], lr=0.1, steps=3, recipe=recipe)
        assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters()) if p.dim() > 0)


def test_groups() -> None:
    model = prepared(mlp(), W8A8Dynamic(), learn_amax=True)
    weights, rest, ranges = param_groups(model, 0.1, 0.5)
    assert [p.dim() for p in weights["params"]] == [2, 2]
    assert (weights["weight_decay"], rest["weight_decay"], ranges["weight_decay"]) == (0.1, 0.0, 0.0)
    assert len(ranges["params"]) == 2
    assert ranges["lr_share"] == 0.5
    model[0].weight.requires_grad_(False)
    assert len(param_groups(model)[0]["params"]) == 1


def test_what_goes_wrong_is_named() -> None:
    model = prepared(nn.Sequential(linear(32, 16)), W8A8Dynamic())
    batches = data("wrong")
    with pytest.raises(ArgumentError, match="steps"):
        finetune(model, loss, iter(batches), lr=0.1)
    with pytest.raises(ArgumentError, match="loader"):
        finetune(model, loss, [], lr=0.1, steps=3)
    with pytest.raises(ArgumentError, match="loader"):
        finetune(model, loss, iter(batches), lr=0.1, steps=9)  # a generator runs out
    with pytest.raises(ArgumentError, match="autocast"):
        finetune(model, loss, batches, lr=0.1, autocast=torch.float32)
    with pytest.raises(ArgumentError, match=r"loss_fn.*no parameter has a part in"):
        finetune(model, lambda m, b: m(b[0]).detach().sum(), batches, lr=0.1)
    with pytest.raises(ArgumentError, match="in step 0"):
        finetune(model, lambda m, b: m(b[0]).sum() * torch.inf, batches, lr=0.1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_stops_before_it_reaches_the_weights(value: float) -> None:
    """4-bit codes of NaN are zeros: the losses stay finite."""
    model = prepared(mlp("s"), W4A8Dynamic(16))

    def bad(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found = loss(model, batch)
        if len(steps) == 2:
            found.register_hook(lambda grad: grad * value)
        steps.append(0)
        return found

    steps: list[int] = []
    with pytest.raises(NonFiniteError, match=r"gradient of '0\.weight' .* in step 2"):
        finetune(model, bad, data("gradient"), lr=0.05, steps=8)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("steps", "told"), [(5, "step 4"), (300, "step 127")])
def test_weights_that_are_not_finite_are_noticed_where_nothing_is_clipped(steps: int, told: str) -> None:
    model = prepared(mlp("s"), W4A8Dynamic(16), learn_amax=True)

    def spoil(step: int, value: float) -> None:
        if step == min(steps, 70) - 1:
            model[0].weight.grad[1, 2] = torch.nan

    recipe = QATRecipe(bits=4, grad_clip=0)
    with pytest.raises(NonFiniteError, match=rf"'0\.weight'.*after {told}"):
        finetune(model, loss, data("spoilt"), lr=0.01, steps=steps, recipe=recipe, on_step=spoil)


def test_large_gradients_are_clipped_and_a_scaled_loss_may_overflow() -> None:
    """A norm beyond float32 is no gradient that is not finite; GradScaler leaves out steps of its own accord."""
    huge = prepared(mlp("s"), W8A8Dynamic())
    finetune(huge, lambda m, b: loss(m, b) * 1e30, data("huge"), lr=0.05, steps=3)
    scaled = prepared(mlp("s"), W8A8Dynamic())
    batches = data("scaled")
    losses = finetune(scaled, lambda m, b: loss(m, b) * 10, batches, lr=0.05, steps=30, autocast=torch.float16)
    assert losses[-1] < losses[0]
    assert all(p.isfinite().all() for p in [*huge.parameters(), *scaled.parameters()])


@pytest.mark.parametrize(
    ("qat", "options"),
    [
        ({"momentum": 0.5, "grad_clip": 0.01}, {"momentum": 0.5, "recipe": QATRecipe(grad_clip=0.01)}),
        ({"amp": "bf16"}, {"autocast": torch.bfloat16}),
        ({"optimizer": "adamw", "grad_clip": 0}, {"recipe": QATRecipe(optimizer="adamw", grad_clip=0)}),
        ({"optimizer": "adam"}, {"recipe": QATRecipe(optimizer="adam")}),
    ],
)
@pytest.mark.filterwarnings("ignore::pyquant.RecipeNotice")
def test_a_recipes_section_trains_as_its_arguments_do(qat: dict[str, object], options: dict, tmp_path: Path) -> None:
    batches = data("section")
    (tmp_path / "r.json").write_text(json.dumps({"qat": qat}))
    plain = finetune(prepared(mlp("s"), W8A8Dynamic()), loss, batches, lr=0.05, steps=6)
    expected = finetune(prepared(mlp("s"), W8A8Dynamic()), loss, batches, lr=0.05, steps=6, **options)
    assert expected != plain
    for recipe in (Recipe.from_dict({"qat": qat}), tmp_path / "r.json"):
        model = prepared(mlp("s"), W8A8Dynamic())
        assert finetune(model, loss, batches, lr=0.05, steps=6, recipe=recipe) == expected
    with pytest.raises(ArgumentError, match="ptq_only"):
        finetune(model, loss, batches, lr=0.05, steps=6, recipe=Recipe(ptq_only=True))


def test_start_from_float_refuses_a_calibrated_model() -> None:
    model, recipe = mlp("s"), {"default": "W8A8Dynamic", "qat": {"start_from": "float"}}
    prepare_qat_(model, Recipe.from_dict(recipe))
    with pytest.raises(ArgumentError, match=r"start_from.*the float model"):
        prepare_qat_(model, Recipe.from_dict(recipe))
    prepare_qat_(model, Recipe.from_dict({**recipe, "qat": {}}))
