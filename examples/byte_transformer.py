"""A transformer that reads Python: 4-bit weights with and without GPTQ, then training under the rounding.

python examples/byte_transformer.py      the standard library's sources, on the CPU, some minutes; no download
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyquant
from pyquant import W4A8, QATRecipe, QuantizationCalibrator, SelectiveQuantizer

LENGTH, WIDTH, VOCABULARY = 64, 64, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ByteTransformer(nn.Module):
    """ids [batch, length] -> logits of each next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(ids) + self.place.weight[: ids.shape[1]])))


def text() -> tuple[Tensor, Tensor]:
    """(training, held out): the bytes below 128 of the standard library's sources, whole files."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [b"".join(f.read_bytes() for f in files[i::8]) for i in range(8)]
    ascii_only = [bytearray(part.translate(None, bytes(range(VOCABULARY, 256)))) for part in parts]
    numbers = [torch.frombuffer(part, dtype=torch.uint8).long() for part in ascii_only]
    return torch.cat(numbers[1:]), numbers[0]


def batches(data: Tensor, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = data[torch.randint(len(data) - LENGTH, (32, 1), generator=generator) + torch.arange(LENGTH + 1)]
        yield ids[:, :-1], ids[:, 1:]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@torch.no_grad()
def bits_per_byte(model: nn.Module, test: list[tuple[Tensor, Tensor]]) -> str:
    model.eval()
    return f"{sum(float(loss(model, batch)) for batch in test) / len(test):.4f} nats a byte"


def quantised(model: nn.Module, data: list[tuple[Tensor, Tensor]], mode: str) -> nn.Module:
    """4-bit weights, 8-bit inputs. naive: everything by max. hybrid: the head in floating point. selective: by MSE,
    and 8 bits in the layer that is hurt most."""
    if mode == "naive":
        quantizer = SelectiveQuantizer("max", "max", scheme=W4A8(group_size=None), mode="naive", verbose=False)
    else:
        method = "max" if mode == "hybrid" else "mse"
        quantizer = SelectiveQuantizer(method, method, scheme=W4A8(group_size=None), mode=mode, verbose=False)
        quantizer.register_skip_quantization(layer_names={"head"})
    if mode == "selective":
        quantizer.register_layer_scheme({"blocks.*.fc2"}, W4A8(group_size=32))
    found = quantizer.quantize_module(copy.deepcopy(model))
    QuantizationCalibrator().calibrate_model(found, data, num_calib_batches=len(data))
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fiftieth of the training")
    steps, tests = (24, 2) if parser.parse_args(argv).quick else (1200, 16)
    train, held_out = text()
    test, calibration = list(batches(held_out, tests, 1)), list(batches(train, min(tests, 8), 2))
    torch.manual_seed(0)
    model = ByteTransformer()
    adamw = QATRecipe(optimizer="adamw", bits=4)
    pyquant.finetune(model, loss, batches(train, steps, 0), lr=3e-3, steps=steps, recipe=adamw)
    print(f"float                      {bits_per_byte(model, test)}")

    for mode in ("naive", "hybrid", "selective"):
        print(f"W4A8 {mode:<21} {bits_per_byte(quantised(model, calibration, mode), test)}")

    by_gptq = quantised(model, calibration, "hybrid")
    kept = pyquant.gptq_(by_gptq, calibration, len(calibration), error="kl")
    print(
        f"W4A8 hybrid, GPTQ          {bits_per_byte(by_gptq, test)}; in {sum(k.accepted for k in kept.values())} layers"
    )

    # A tenth of the schedule at 30 % of the learning rate, from the calibrated model; and a float model beside it.
    trained, control = pyquant.prepare_qat_(quantised(model, calibration, "hybrid")), copy.deepcopy(model)
    more = max(1, round(adamw.schedule * steps))
    for each in (trained, control):
        pyquant.finetune(each, loss, batches(train, more, 3), lr=adamw.peak_lr(3e-3), steps=more, recipe=adamw)
    print(f"{f'W4A8 hybrid, {more} steps':<26} {bits_per_byte(trained, test)}")
    print(f"float, trained as long     {bits_per_byte(control, test)}")

    integers = pyquant.convert_(trained).eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        pyquant.save_pretrained(integers, folder)
        again = pyquant.load_pretrained(folder, ByteTransformer).eval()
        same = torch.equal(again(test[0][0]), integers(test[0][0]))
    print(f"integers, saved, reloaded  {bits_per_byte(again, test)}; bits equal: {same}")


if __name__ == "__main__":
    main()
