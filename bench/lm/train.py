"""Trains a language model on text that is on every machine, and saves it as transformers would.

    python -m bench.lm.train [--out DIR] [--seed N]

A Llama of 8 blocks, 384 wide (14.4 million parameters), that reads bytes: the sources of Python's standard library, as
in bench.accuracy. One thread, Muon and AdamW, bf16 products: 17 minutes of a core with AVX-512 BF16. A run that was
ended goes on from its last checkpoint, to the same bits on the same machine. The folder then holds what
AutoModelForCausalLM and AutoTokenizer load without a network, `held_out.txt` and `cloze.jsonl` to judge by and
`calibration.txt` to calibrate with.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from bench.accuracy.text import corpus, windows
from pyquant.errors import ArgumentError
from pyquant.io.atomic import write_file
from pyquant.measure.timing import using_threads
from pyquant.ops.tuned import cache_folder

CHECKPOINT: Final = "checkpoint.safetensors"
DONE: Final = "training.json"  # written last: a folder that holds it is complete
_CALIBRATION_BYTES: Final = 400_000  # the first of the training text
_WORD: Final = re.compile(r"\b[A-Za-z]{5,}\b")


@dataclass(frozen=True)
class Size:
    """What is trained. intermediate: neurons of the MLP. length: bytes of a window, the most that the model reads."""

    width: int = 384
    layers: int = 8
    heads: int = 6
    intermediate: int = 1024
    length: int = 256


@dataclass(frozen=True)
class Schedule:
    """Warm-up over 20 steps, a constant rate, then linearly to zero over the last 30 %.

    The constant part does not depend on `steps`: a run may be made longer as long as it has not reached the decay.
    """

    steps: int = 250
    batch: int = 16
    learning_rate: float = 2e-3
    save_every: int = 25

    @property
    def decays_from(self) -> int:
        return self.steps - round(0.3 * self.steps)

    def factor(self, step: int) -> float:
        """The rate of a step as a share of the peak."""
        return min(1.0, (step + 1) / 20, (self.steps - step) / max(1, self.steps - self.decays_from))


@using_threads(1)  # sums depend on the number of threads
def train(out: Path, seed: int = 0, size: Size | None = None, schedule: Schedule | None = None) -> Path:
    """Train, or go on training, until the folder `out` holds the model. -> the folder.

    Raises ArgumentError where `out` holds another model, or a checkpoint of a schedule that cannot be changed any more.
    """
    size, schedule = size or Size(), schedule or Schedule()
    told = {"seed": seed, **asdict(size), "batch": schedule.batch, "learning_rate": schedule.learning_rate}
    if (out / DONE).exists():
        found = json.loads((out / DONE).read_text(encoding="utf-8"))
        _same(found, told | {"steps": schedule.steps}, out)
        return out
    torch.manual_seed(seed)
    model = make_model(size)
    optimizers = make_optimizers(model, schedule.learning_rate)
    step, spent = _resume(out, model, optimizers, told, schedule)
    before, model = time.process_time() - spent, model.train()
    while step < schedule.steps:
        loss = _step(model, optimizers, schedule, step, seed, size.length)
        step += 1
        if step % 10 == 0 or step == schedule.steps:
            print(
                f"step {step}/{schedule.steps}: {loss:.4f} nats a byte, {time.process_time() - before:.0f} s",
                flush=True,
            )
        if step % schedule.save_every == 0 and step < schedule.steps:
            _keep(out, model, optimizers, told, step, schedule, time.process_time() - before)
    finish(out, model, told | {"steps": step, "seconds": round(time.process_time() - before)})
    return out


def make_model(size: Size) -> nn.Module:
    """A new LlamaForCausalLM over bytes, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=size.width,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        use_cache=False,
    )
    return LlamaForCausalLM(config).float()


def make_optimizers(model: nn.Module, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the tables and norms."""
    inside = [p for n, p in model.named_parameters() if p.dim() == 2 and ".layers." in n]
    known = {id(p) for p in inside}
    rest = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(inside, learning_rate, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _step(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], schedule: Schedule, step: int, seed: int, length: int
) -> float:
    # a batch depends on seed and step alone, so that a resumed run reads what it would have read
    ids = windows(corpus()[0], length + 1, schedule.batch, torch.Generator().manual_seed(seed * 1_000_003 + step))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate * schedule.factor(step)
        optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16):
        logits: Tensor = model(ids[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return float(loss.detach())


def _keep(
    out: Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    told: dict[str, Any],
    step: int,
    schedule: Schedule,
    seconds: float,
) -> None:
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for i, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {
                f"optimizer.{i}.{index}.{key}": torch.as_tensor(value, device="cpu") for key, value in state.items()
            }
    known = {"told": told, "step": step, "steps": schedule.steps, "seconds": seconds}
    write_file(out / CHECKPOINT, save({n: t.contiguous() for n, t in tensors.items()}, {"training": json.dumps(known)}))


def _resume(
    out: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], told: dict[str, Any], schedule: Schedule
) -> tuple[int, float]:
    """(steps done, CPU seconds spent) after loading the folder's checkpoint, (0, 0) without one."""
    path = out / CHECKPOINT
    if not path.exists():
        return 0, 0.0
    with safe_open(path, "pt") as file:
        known = json.loads(file.metadata()["training"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    _same(known["told"], told, out)
    step, steps = int(known["step"]), int(known["steps"])
    if steps != schedule.steps and step > min(schedule.decays_from, Schedule(steps).decays_from):
        raise ArgumentError("steps", schedule.steps, f"{steps}: the run in {out} has begun to lower its rate for that")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
    for i, optimizer in enumerate(optimizers):
        whole = optimizer.state_dict()
        for name, tensor in tensors.items():
            if name.startswith(f"optimizer.{i}."):
                _, _, index, key = name.split(".")
                whole["state"].setdefault(int(index), {})[key] = tensor
        optimizer.load_state_dict(whole)
    print(f"going on after step {step}", flush=True)
    return step, float(known["seconds"])


def _same(found: dict[str, Any], told: dict[str, Any], out: Path) -> None:
    for name, value in told.items():
        if found.get(name) != value:
            raise ArgumentError(name, value, f"{found.get(name)}, as in {out}, or another folder")


def finish(out: Path, model: nn.Module, told: dict[str, Any]) -> None:
    """Model, tokenizer and texts; then the file that says that they are whole; the checkpoint goes."""
    model.eval().save_pretrained(out)  # type: ignore[operator]
    byte_tokenizer(int(told["length"])).save_pretrained(out)
    texts = corpus()
    for name, ids in (("held_out.txt", texts[1]), ("calibration.txt", texts[0][:_CALIBRATION_BYTES])):
        write_file(out / name, bytes(ids.tolist()))
    lines = "".join(json.dumps(line) + "\n" for line in cloze_lines(bytes(texts[1].tolist()).decode("ascii"), 64))
    write_file(out / "cloze.jsonl", lines.encode())
    write_file(out / DONE, (json.dumps(told, indent=1) + "\n").encode())
    (out / CHECKPOINT).unlink(missing_ok=True)


def cloze_lines(text: str, count: int) -> Iterator[dict[str, str]]:
    """Words of at least five letters that the 200 characters before them hold too, evenly spread over a text: what
    LAMBADA asks of prose, that a reader of the last few words alone cannot answer it."""
    for part in range(count):
        begin = len(text) * part // count
        for found in _WORD.finditer(text, begin + 200, len(text) * (part + 1) // count):
            word, context = found.group(), text[found.start() - 200 : found.start()]
            if re.search(rf"\b{word}\b", context):
                yield {"context": context, "word": word}
                break


def byte_tokenizer(length: int) -> Any:
    """A tokenizer of transformers whose ids are the bytes of the text in UTF-8, without special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=length, clean_up_tokenization_spaces=False
    )


def _characters() -> Iterator[str]:
    """How byte-level tokenizers write each byte: printable ones of Latin-1 as themselves, others from U+0100 on."""
    others = 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or (byte >= 0xA1 and byte != 0xAD):
            yield chr(byte)
        else:
            yield chr(others)
            others += 1


def default_folder(seed: int = 0) -> Path:
    """Where the model lies in the user's cache."""
    return cache_folder() / "lm" / f"bytes-{Size.width}x{Size.layers}-seed{seed}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.lm.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", metavar="DIR", help="default: lm/bytes-384x8-seed<N> in pyquant's cache")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--steps", type=int, default=Schedule.steps, metavar="N", help=f"default: {Schedule.steps}")
    args = parser.parse_args(argv)
    out = Path(args.out) if args.out else default_folder(args.seed)
    print(train(out, args.seed, schedule=Schedule(args.steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
