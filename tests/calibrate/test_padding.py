"""A padded batch gives the statistics of its sequences one by one: ranges, moments, factors, biases, losses."""

from __future__ import annotations

import copy
import threading
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pyquant
from pyquant import W4A8, W8A8, CalibrationError, convert_, insert_fake_quantize_
from pyquant.calibrate import RangeStatistics, counted, counting_padding, run_calibration
from pyquant.calibrate.padding import NO_PADDING, left_out, now, padding_of
from pyquant.ptq.blockwise.stage import Stage
from pyquant.ptq.improve.bias_correction import bias_correction_
from pyquant.ptq.improve.moments import moments_of
from pyquant.ptq.improve.replay import Replay
from pyquant.simulate.calibrate import calibrate_

LENGTHS = (7, 3, 5, 7)
VOCABULARY, WIDTH, CLASSES = 40, 16, 11
PAD = 0


class Attending(nn.Module):
    """Tokens, self-attention that sees no padding, and a head; the embedding of the padding is an outlier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        with torch.no_grad():
            self.embedding.weight[PAD] = 25.0

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) / WIDTH**0.5).masked_fill(attention_mask[:, None] == 0, -1e9)
        x = x + self.out(scores.softmax(-1) @ v)
        x = x + self.down(torch.relu(self.up(x.flatten(0, 1)))).view_as(x)  # tokens of all sequences, as experts do
        return self.head(x)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Attending().eval()


def sequences(batches: int = 2) -> list[list[Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [[torch.randint(1, VOCABULARY, [n], generator=g) for n in LENGTHS] for _ in range(batches)]


def padded(left: bool = False, dtype: torch.dtype = torch.int64, batches: int = 2) -> list[dict[str, Tensor]]:
    found = []
    for rows in sequences(batches):
        length = max(map(len, rows))
        ids, mask = torch.full([len(rows), length], PAD), torch.zeros(len(rows), length, dtype=dtype)
        for i, row in enumerate(rows):
            at = slice(length - len(row), length) if left else slice(len(row))
            ids[i, at], mask[i, at] = row, 1
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


def alone(batches: int = 2) -> list[dict[str, Tensor]]:
    rows = [row for batch in sequences(batches) for row in batch]
    return [{"input_ids": row[None], "attention_mask": torch.ones(1, len(row), dtype=torch.int64)} for row in rows]


def ranges(data: list[Any], make: Callable[[], nn.Module] = model_of, method: str | None = None) -> dict[str, Tensor]:
    model = insert_fake_quantize_(make(), W8A8())
    calibrate_(model, data, len(data), method=method)
    return {name: value.clone() for name, value in model.state_dict().items() if "input_fake_quant" in name}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == wanted.keys() != set()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=tolerance, atol=0), name


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("method", ["max", "percentile", "entropy", "mse"])
def test_ranges_are_those_of_the_sequences_alone(left: bool, method: str) -> None:
    # products of other shapes may round otherwise, and a histogram's bins with them
    assert_close(ranges(padded(left), method=method), ranges(alone(), method=method), 1e-5 if method == "max" else 1e-2)


def test_the_planted_outlier_would_be_seen() -> None:
    with counting_padding():
        counts = ranges(padded())
    assert counts["qkv.input_fake_quant.scale"] > 5 * ranges(padded())["qkv.input_fake_quant.scale"]
    assert now() is NO_PADDING


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32, torch.float16])
def test_masks_of_any_type(dtype: torch.dtype) -> None:
    wanted, found = ranges(padded()), ranges(padded(dtype=dtype))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_batch_encodings_pairs_with_labels_and_batch_to_inputs() -> None:
    wanted = ranges(padded())
    encodings = [UserDict(batch) for batch in padded()]
    with_labels = [(batch, torch.zeros(4)) for batch in padded()]
    for data in (encodings, with_labels):
        found = ranges(data)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    rows = [(batch["input_ids"], batch["attention_mask"]) for batch in padded()]
    model = insert_fake_quantize_(model_of(), W8A8())
    calibrate_(model, rows, 2, batch_to_inputs=lambda batch: batch)  # positions have the names of forward()
    assert torch.equal(model.qkv.input_fake_quant.scale, wanted["qkv.input_fake_quant.scale"])


def test_of_a_tuple_the_first_item_alone_is_read() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    x = torch.ones(2, 3, 4)
    x[1, 2] = 9
    data = [(x, torch.tensor([[1, 1, 1], [1, 1, 0]]))]
    assert ranges(data, lambda: copy.deepcopy(net))["0.input_fake_quant.scale"].item() == pytest.approx(9 / 127)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 3),
        torch.zeros(2, 3),  # as masks that are added look
        torch.tensor([[0.0, 0.0, -1e9], [0.0, 0.0, 0.0]]),
        torch.tensor([[1, 1, 2], [1, 2, 0]]),  # packed sequences
        torch.ones(2, 1, 3, 3),
        torch.tensor([1, 1, 0]),
        [[1, 1, 0], [1, 1, 1]],
        None,
    ],
    ids=["ones", "zeros", "added", "numbered", "4-D", "1-D", "list", "none"],
)
def test_what_is_no_mask_leaves_the_very_tensor(mask: Any) -> None:
    x = torch.randn(2, 3, 4)
    with left_out(padding_of({"attention_mask": mask})):
        assert counted(x) is x


def test_shapes_that_a_mask_fits() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    index = [0, 1, 3]
    x = torch.randn(2, 3, 4)
    with left_out(padding_of({"attention_mask": mask})):
        assert torch.equal(counted(x), x.flatten(0, 1)[index])
        assert torch.equal(counted(x.flatten(0, 1)), x.flatten(0, 1)[index])
        assert counted(x[..., None]).shape == (3, 4, 1)
        for other in (torch.randn(2, 3), torch.randn(3, 2, 4), torch.randn(2, 4), torch.randn(2, 5, 3), torch.ones(6)):
            assert counted(other) is other
        with torch.inference_mode():
            assert counted(torch.randn(2, 3, 4)).shape == (3, 4)


def test_two_masks() -> None:
    source, target = torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.tensor([[1, 0], [1, 1]])
    with left_out(padding_of({"attention_mask": source, "decoder_attention_mask": target})):
        assert counted(torch.ones(2, 3, 4)).shape == (5, 4)
        assert counted(torch.ones(2, 2, 4)).shape == (3, 4)
    other = torch.tensor([[1, 0, 0], [1, 1, 1]])
    x = torch.ones(2, 3, 4)
    with left_out(padding_of({"attention_mask": source, "decoder_attention_mask": other})):
        assert counted(x) is x
    with left_out(padding_of({"attention_mask": source, "decoder_attention_mask": source.clone()})):
        assert counted(x).shape == (5, 4)


def test_a_decoder_without_a_mask_counts_whole() -> None:
    mask, x = torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.ones(2, 3, 4)
    ids = torch.ones(2, 3, dtype=torch.int64)
    with left_out(padding_of({"attention_mask": mask, "decoder_input_ids": ids})):
        assert counted(x) is x
    with left_out(padding_of({"attention_mask": mask, "decoder_input_ids": ids[:, :2]})):
        assert counted(x).shape == (5, 4)
    with left_out(padding_of({"attention_mask": mask}, has_decoder=True)):
        assert counted(x) is x


def test_nothing_is_left_behind_by_an_error_nor_seen_by_other_threads() -> None:
    padding = padding_of(padded()[0])
    seen: list[Any] = []
    with left_out(padding):
        thread = threading.Thread(target=lambda: seen.append(now()))
        thread.start()
        thread.join()
        with pytest.raises(ZeroDivisionError), left_out(NO_PADDING):
            raise ZeroDivisionError
        assert now() is padding
    assert seen == [NO_PADDING]
    model = insert_fake_quantize_(model_of(), W8A8())
    wrong = [{**padded()[0], "attention_mask": torch.tensor([[1, 0]])}]
    with pytest.raises(CalibrationError, match=r"batch 0"):
        calibrate_(model, wrong, 1)
    assert now() is NO_PADDING


def test_batches_of_padding_alone_add_nothing() -> None:
    nothing = padded()[0]
    nothing = {"input_ids": nothing["input_ids"] * 0, "attention_mask": nothing["attention_mask"] * 0}
    wanted, found = ranges(padded()), ranges([*padded(), nothing])
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(CalibrationError, match=r"saw no data"):
        ranges([nothing])


def test_calls_in_a_checkpoint_several_calls_and_targets_of_ones_own() -> None:
    class Own(nn.Linear):
        statistics: RangeStatistics | None = None

        def start_calibration(self) -> dict[str, RangeStatistics]:
            self.statistics = RangeStatistics()
            return {"input": self.statistics}

        def stop_calibration(self) -> None:
            self.statistics = None

        def forward(self, x: Tensor) -> Tensor:
            if self.statistics is not None:
                self.statistics.observe(counted(x))
            return super().forward(x)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Own(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(checkpoint(self.layer, x, use_reentrant=False))

    # forward() takes no mask, the batch has one
    x, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 1, 1]])
    for mode in (torch.no_grad, torch.inference_mode):
        model = Twice()
        with mode():
            found = run_calibration(model, [model.layer], [{"x": x, "attention_mask": mask}], 1)
        assert found["layer"]["input"].count == 2 * 5 * 4


def moments(data: list[Any]) -> Iterator[Tensor]:
    model = insert_fake_quantize_(model_of(), W4A8(group_size=None))
    calibrate_(model, data, len(data), method="max")
    replay = Replay(model, data, len(data))
    for name in ("qkv", "up", "head"):
        stage = Stage("", model, {name: getattr(model, name)}, {name: 1}, replay, replay, ())
        found, _ = moments_of(stage, [name], len(data), cross=True)
        assert found.cross is not None
        assert found.rows == 2 * sum(LENGTHS)
        yield from (found.hessian, found.cross, found.total, found.moved)


@pytest.mark.parametrize("left", [False, True])
def test_second_moments(left: bool) -> None:
    for found, wanted in zip(moments(padded(left)), moments(alone()), strict=True):
        # codes of inputs at a half may differ by a step
        assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


def test_bias_correction() -> None:
    biases = []
    for data in (padded(), alone()):
        model = insert_fake_quantize_(model_of(), W4A8(group_size=None))
        calibrate_(model, data, len(data), method="max")
        bias_correction_(model, data, len(data))
        biases.append({name: value.detach() for name, value in model.state_dict().items() if name.endswith(".bias")})
    for name, wanted in biases[1].items():
        assert torch.allclose(biases[0][name], wanted, atol=2e-3), name


def test_smoothing_factors() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm, self.up = nn.Embedding(VOCABULARY, 8), nn.LayerNorm(8), nn.Linear(8, 4)
            with torch.no_grad():
                self.embedding.weight[PAD] = torch.tensor([9.0, 0, 0, 0, 0, 0, 0, 0])

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.up(self.norm(self.embedding(input_ids)))

    torch.manual_seed(0)
    start, found = Normed().eval(), []
    for data in (padded(), alone()):
        model = copy.deepcopy(start)
        pyquant.smooth_(model, data, len(data), pairs=[("norm", ["up"])])
        found.append(model.norm.weight)
    assert torch.equal(*found)
    with counting_padding():
        model = copy.deepcopy(start)
        pyquant.smooth_(model, padded(), 2, pairs=[("norm", ["up"])])
    assert not torch.allclose(model.norm.weight, found[0])


def test_error_reports() -> None:
    float_model = model_of()
    model = insert_fake_quantize_(copy.deepcopy(float_model), W4A8(group_size=None))
    calibrate_(model, alone(), 8, method="max")
    convert_(model)
    reports = [pyquant.error_report(model, float_model, data, len(data)) for data in (padded(), alone())]
    for found, wanted in zip(*(report.rows for report in reports), strict=True):
        assert (found.layer, found.tensor) == (wanted.layer, wanted.tensor)
        assert found.mse == pytest.approx(wanted.mse, rel=2e-3)
        assert found.sqnr_db == pytest.approx(wanted.sqnr_db, abs=0.05)


@pytest.mark.parametrize("metric", ["kl", "sqnr", "mse", "cosine", "error", "hessian"])
def test_sensitivities(metric: str) -> None:
    tables = [
        pyquant.sensitivity(model_of(), data, ("float", "int8"), metric, num_batches=len(data), repeats=1).loss
        for data in (padded(), alone())
    ]
    if metric == "hessian":  # probes are drawn for each batch: the sum of other draws
        assert all(row[1] >= 0 for row in tables[0])
        return
    for found, wanted in zip(*tables, strict=True):
        assert found[1] == pytest.approx(wanted[1], rel=2e-2)


def test_fisher_has_the_terms_of_tokens_that_count() -> None:
    report = pyquant.sensitivity(model_of(), padded(), ("float", "int8"), "fisher", num_batches=2, repeats=16)
    wanted = pyquant.sensitivity(model_of(), alone(), ("float", "int8"), "fisher", num_batches=8, repeats=16)
    for found, other in zip(report.loss, wanted.loss, strict=True):
        assert 0.5 < found[1] / other[1] < 2


@pytest.mark.parametrize("improve", ["gptq", "learn_rounding"])
def test_improvers_are_judged_without_padding(improve: str) -> None:
    data = padded(batches=4)
    model = insert_fake_quantize_(model_of(), W4A8(group_size=None))
    calibrate_(model, data, len(data), method="max")
    counts = data[-1]["attention_mask"] == 1
    with torch.no_grad():
        floats, rounded = (net(**data[-1])[counts].double() for net in (model_of(), model))
    if improve == "gptq":
        found: Any = pyquant.gptq_(model, data, len(data), num_held_out=1, error="mse", blocks=None)
    else:
        found = pyquant.learn_rounding_(model, data, len(data), num_held_out=1, error="mse", steps=1, blocks=None)
    wanted = float((rounded - floats).square().sum() / floats.square().sum())
    assert next(iter(found.values())).error_before == pytest.approx(wanted, rel=1e-6)


def transformer(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4}, "Llama": {"num_key_value_heads": 2}}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY, max_position_embeddings=32, pad_token_id=PAD, **sizes, **more.get(family, {})
    )
    config._attn_implementation = "eager"
    # a BertModel's pooler reads the first position, whatever it is
    kind = "BertForMaskedLM" if family == "Bert" else f"{family}ForCausalLM"
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[PAD] = torch.eye(32)[3] * 100  # no norm makes such a row of another
    return model


def positioned(data: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """With the positions that a padded sequence would have alone."""
    return [{**d, "position_ids": (d["attention_mask"].cumsum(-1) - 1).clamp_min(0)} for d in data]


@pytest.mark.parametrize("family", ["Bert", "Llama", "Mixtral"])
@pytest.mark.parametrize("left", [False, True])
def test_transformers(family: str, left: bool) -> None:
    found, wanted = [], []
    for data, into in ((positioned(padded(left)), found), (positioned(alone()), wanted)):
        model = pyquant.expose_linears_(transformer(family))
        insert_fake_quantize_(model, W8A8())
        calibrate_(model, data, len(data), method="max")
        into.append({n: v.clone() for n, v in model.state_dict().items() if "input_fake_quant.scale" in n})
        into += [m.tokens_seen for m in model.modules() if getattr(m, "tokens_seen", None)]
    assert_close(found[0], wanted[0])
    assert found[1:] == wanted[1:]
    if family == "Mixtral":
        assert all(sum(seen) == 2 * 2 * sum(LENGTHS) for seen in found[1:])
        assert len(found) == 3


def test_transformers_block_by_block() -> None:
    def biases(data: list[dict[str, Tensor]], blocks: str | None) -> dict[str, Tensor]:
        model = insert_fake_quantize_(transformer("Llama"), W4A8(group_size=None))
        calibrate_(model, data, len(data), method="max")
        bias_correction_(model, data, len(data), blocks=blocks)
        return {n: v.detach() for n, v in model.state_dict().items() if n.endswith(".bias")}

    whole, found = (biases(positioned(padded(left=True)), blocks) for blocks in (None, "auto"))
    assert found.keys() == whole.keys() != set()
    assert all(torch.equal(found[n], whole[n]) for n in found)
    wanted = biases(positioned(alone()), "auto")
    assert all(torch.allclose(found[n], wanted[n], atol=5e-3) for n in found)


def test_convolutions_take_whole_images() -> None:
    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 1)

        def forward(self, pixels: Tensor) -> Tensor:
            return self.conv(pixels)

    pixels = torch.rand(2, 3, 4, 4)  # as many channels as there are tokens
    pixels[:, 2] = 50
    batch = {"pixels": pixels, "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 0]])}
    assert ranges([batch], Seeing)["conv.input_fake_quant.scale"].item() == pytest.approx(50 / 127)
