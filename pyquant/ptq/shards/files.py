"""quantize_files: from a float checkpoint to a quantised one block by block, with the data that ranges need."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from pyquant.core import arguments
from pyquant.core.names import listed
from pyquant.core.paths import file_path
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, QuantizationWarning
from pyquant.io.foreign.source import Source
from pyquant.io.pretrained.float_weights import FloatWeights
from pyquant.io.pretrained.place import refill
from pyquant.io.pretrained.quantized import new_name
from pyquant.io.pretrained.save import record_of, write
from pyquant.nn.convert import integer_twin, quantize_layers_
from pyquant.nn.fates import Fate, forms_of, noted, twins_of
from pyquant.nn.linear_state import LinearState
from pyquant.nn.match import FqnConfig
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qlinear import QLinear
from pyquant.nn.sites import Filter, Owner, find_owners
from pyquant.nn.swap import as_it_is, swap_modules
from pyquant.nn.undo import Undo, undone_on_error
from pyquant.ptq.blockwise.drive import Progress, Way, improved
from pyquant.ptq.blockwise.find import AUTO, Blocks
from pyquant.ptq.blockwise.ranges import calibrate_by
from pyquant.ptq.blockwise.saved import JOURNAL
from pyquant.ptq.improve.matrix import Layer, simulated_layers
from pyquant.ptq.improve.replay import BatchToInputs, Replay
from pyquant.ptq.improve.steps import check_names, improvers_of, parted
from pyquant.ptq.quantize import count_of
from pyquant.ptq.run import recipe_of
from pyquant.ptq.selective import SelectiveQuantizer
from pyquant.ptq.shards.before import improved_before
from pyquant.ptq.shards.floats import Floats, Run
from pyquant.ptq.shards.outline import blocks_of, empty_, tensors_in
from pyquant.ptq.shards.residence import FromFiles
from pyquant.ptq.shards.store import Store
from pyquant.recipe import Recipe, is_recipe
from pyquant.simulate.calibrate import targets_of
from pyquant.simulate.insert import replace_simulating, simulated
from pyquant.simulate.kinds import SIMULATED, is_simulated

UNFINISHED = ".unfinished"
# What runs write there: journals, blocks, inputs of blocks, marks, temporaries.
_OURS: Final = re.compile(
    r"(blocks|errors)\.journal|block-[0-9a-f]{16}\.safetensors|\d{8}\.safetensors|checked|\.pyquant-[0-9a-f]{32}(\.file)?\.tmp"
)


@torch.no_grad()
def quantize_files(
    model: nn.Module,
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config: QScheme
    | str
    | Callable[[], QScheme]
    | FqnConfig
    | Mapping[str | type, QScheme | None]
    | Recipe
    | os.PathLike[str],
    filter_fn: Filter | None = None,
    *,
    data: Iterable[Any] | None = None,
    num_batches: int | None = None,
    improve: Sequence[str] = (),
    batch_to_inputs: BatchToInputs | None = None,
    embeddings: bool = False,
    heads: bool | None = None,
    on_indivisible: str = "per_channel",
    rename: Callable[[str], str] | None = None,
    blocks: Blocks = AUTO,
    device: torch.device | str | None = None,
    cache: str | os.PathLike[str] | None = None,
    save_to: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> str:
    """Quantise a float checkpoint into another directory, a block of the model at a time, with data where ranges or
    codes need it.

    Byte for byte the directory of loading the whole model, quantize_ with these arguments, and save_pretrained; memory
    holds what lies outside of the blocks, one block, and what reconstruction needs for it (docs/reconstruction.md 3).

    model        as of quantize_checkpoint_: its weights are not used, so it belongs on the meta device. Afterwards its
                 layers are quantised ones, empty in the blocks; on an error it is as before.
    path         directory of a model in floating point, as of quantize_checkpoint_.
    out          directory that save_pretrained would write.
    config, filter_fn, embeddings, heads, on_indivisible, batch_to_inputs   as in quantize_; no 16-bit layers, no recipe
                 with `chains`.
    data, num_batches   batches, gone through several times where `improve` names anything; as in quantize_.
    improve      as in quantize_. Each improver of the float model ('equalize', 'smooth', 'search_scales', 'rotate',
                 'rotate_online') leaves a float copy in save_to, of which the next one is made.
    rename       name of a tensor in the files -> its name in the model; None: they are the same.
    blocks, device, cache   as of gptq_: which modules are the blocks (the model has to have some), where each is
                 while it runs, a folder for their inputs.
    save_to      folder for finished blocks; a run that was killed and begins again with the same arguments goes on
                 after the last one, to the same bytes. None: OUT.unfinished beside `out`, which is gone at the end.
    progress     called with (done, total, name) after every block of every pass: 'ranges', each improver, 'codes'.
    ->           SHA-256 of the manifest, as of save_pretrained.
    Raises ArgumentError or SchemeError as quantize_, and where blocks are not called one after the other;
    CheckpointError as quantize_checkpoint_, and for a save_to of something else.

    Example:
        >>> import json, pathlib, tempfile, pyquant
        >>> from safetensors.torch import save_file
        >>> block = lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> build = lambda: nn.Sequential(nn.Sequential(block(), block()), nn.Linear(8, 2)).eval()
        >>> whole, data = build(), [torch.randn(4, 8) for _ in range(4)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "config.json").write_text("{}")
        ...     save_file(whole.state_dict(), f"{folder}/model.safetensors")
        ...     with torch.device("meta"):
        ...         model = build()
        ...     digest = quantize_files(model, folder, f"{folder}/w8a8", "W8A8", data=data)
        ...     digest == pyquant.save_pretrained(pyquant.quantize_(whole, "W8A8", data=data), f"{folder}/whole")
        True
    """
    arguments.module("model", model)
    arguments.function("rename", rename, "(name) -> name")
    recipe = recipe_of(config) if is_recipe(config) else None  # type: ignore[arg-type]
    names = check_names(improve, data)
    if recipe is not None:
        names = _of_recipe(recipe, names, data, num_batches, filter_fn, embeddings, heads, on_indivisible)
        num_batches = recipe.calib_params.num_calib_batches
    count = 0 if data is None else count_of(data, num_batches)
    early, late = parted(names)
    improvers_of(late, count or 2)  # what cannot be done is told first
    target = file_path("out", out)
    folder = file_path("save_to", save_to) if save_to is not None else _unfinished(target)
    source = Source(file_path("path", path), is_float=True)
    way = Way(blocks, device, cache, folder, progress)
    undo = as_it_is(model)
    with undone_on_error(undo), ExitStack() as last:
        empty_(model)
        weights = FloatWeights(model, source, lambda name: name if rename is None else new_name(rename(name)))
        refill(model, undo)
        floats = Floats(model, weights, _facts(source))
        if early:
            replay = Replay(model, cast("Iterable[Any]", data), count, batch_to_inputs)
            run = Run(replay, config if recipe is None else recipe.config(), way, undo)  # type: ignore[arg-type]
            floats = improved_before(early, floats, run)
        work = _Work(floats, find_owners(model), way, late, batch_to_inputs, data, count, last)
        if recipe is None:
            options: dict[str, Any] = {"embeddings": embeddings, "heads": heads, "on_indivisible": on_indivisible}
            quantize_layers_(model, config, filter_fn, check_speed=False, prepare=work.twins, **options)  # type: ignore[arg-type]
        else:
            work.by_recipe(recipe, undo)
        if weights.unused:
            what = f"{source.directory}: {type(model).__name__} has no place for the tensors {listed(weights.unused)}"
            warnings.warn(f"quantize_files: {what}", QuantizationWarning, stacklevel=2)
        digest = write(model, target, recipe=recipe, source=work.store)
    if save_to is None:
        _remove(folder)
    return digest


def _unfinished(target: Path) -> Path:
    """Where what is finished lies until the end. Raises ArgumentError where something else lies there."""
    target = Path(os.path.abspath(target))  # '.' has no name
    folder = target.with_name(target.name + UNFINISHED)
    if other := [path for path in _files_in(folder) if not _OURS.fullmatch(path.name)]:
        got = f"{target.name}, beside which {folder.name} holds {listed([str(p.relative_to(folder)) for p in other])}"
        raise ArgumentError("out", got, "a name beside which nothing of yours has this one")
    return folder


def _remove(folder: Path) -> None:
    """The files of an unfinished run, and folders that are empty then: nothing that someone has put beside them."""
    files = [path for path in _files_in(folder) if _OURS.fullmatch(path.name)]
    for path in sorted(files, key=lambda path: path.name != JOURNAL):  # without it nothing counts as finished
        path.unlink(missing_ok=True)
    for place in sorted([folder, *(path for path in folder.glob("**/*") if path.is_dir())], reverse=True):
        with suppress(OSError):
            place.rmdir()


def _files_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("**/*") if path.is_symlink() or not path.is_dir()]


@dataclass
class _Work:
    """One model on its way from files to files. owners: its modules with linear forms, before anything was replaced;
    last: closes the store."""

    floats: Floats
    owners: Sequence[Owner]
    way: Way
    improve: tuple[str, ...]
    batch_to_inputs: BatchToInputs | None
    data: Iterable[Any] | None
    count: int
    last: ExitStack
    store: Store = field(init=False)

    @property
    def model(self) -> nn.Module:
        return self.floats.model

    def twins(self, model: nn.Module, fates: Sequence[Fate]) -> dict[int, nn.Module]:
        """{id of a float layer: its quantised twin}, for quantize_layers_, which puts them in."""
        layers = [fate for fate in fates if fate.layer is not None and isinstance(fate.site.module, tuple(SIMULATED))]
        for fate in layers:
            if fate.layer is not None and fate.layer.scheme.is_float:
                got = f"{fate.layer.scheme} for {fate.site.names[0]}"
                raise ArgumentError("config", got, "schemes of codes; None leaves a layer in floating point")
        twins = twins_of(layers, simulated)
        undo: list[Undo] = []
        swap_modules(model, [*forms_of(fates), *twins], undo=undo)
        try:
            made = self.quantised()
            return {id(fate.site.module): made[id(twin)] for fate, (_, twin) in zip(layers, twins, strict=True)}
        finally:
            for step in reversed(undo):
                step()

    def by_recipe(self, recipe: Recipe, undo: list[Undo]) -> None:
        """What quantize_recipe_ does, in its order."""
        quantizer = SelectiveQuantizer.from_recipe(recipe)
        undo += quantizer.quantize_reversibly(self.model)
        halves = [name for name, module in self.model.named_modules() if isinstance(module, LinearState)]
        if halves:
            allowed = "schemes of codes; null leaves a layer in floating point"
            raise ArgumentError("config", f"16-bit layers {listed(halves)}", allowed)
        params = recipe.calib_params
        for target in targets_of(self.model):
            if target.fake.method_is_open:
                method = params.histogram_calib_method
                target.set_method(method, params.percentile if method == "percentile" else 99.99)
        made = self.quantised()
        replace_simulating(self.model, lambda layer: made[id(layer)], undo)
        swap_modules(self.model, twins_of(quantizer.lookups, integer_twin), undo=undo)

    def quantised(self) -> dict[int, nn.Module]:
        """{id of a simulating layer: its quantised twin}; of those in blocks the numbers are in the store."""
        residence = FromFiles(self.model, self.floats.weights, self.owners, self.floats.facts)
        blocks = blocks_of(self.model, self.way, lambda module: isinstance(module, Layer))
        residence.settle(blocks)
        fakes = {target.name: target.fake for target in targets_of(self.model, weights=False)}
        if fakes and self.data is None:
            raise ArgumentError("data", f"None, for {listed(list(fakes))}", "batches, or a dynamic scheme")
        if self.data is not None and (fakes or self.improve):
            replay = Replay(self.model, self.data, self.count, self.batch_to_inputs)
            calibrate_by(replay, fakes, self._way("ranges", residence))
            for name, improver in improvers_of(self.improve, self.count).items():
                improved(replay, simulated_layers(self.model), improver, self._way(name, residence))
        return self._codes(residence, blocks)

    def _codes(self, residence: FromFiles, blocks: Mapping[str, nn.Module]) -> dict[int, nn.Module]:
        way = self._way("codes", residence)
        self.store = self.last.enter_context(Store(Path(way.save_to or ""), residence.fingerprint))
        for done, (name, block) in enumerate(blocks.items(), 1):
            layers = {at: m for at, m in block.named_modules(prefix=name) if is_simulated(m)}
            if name not in self.store:
                with way.place.holds(block):
                    records = [
                        record_of(at, cast(QLinear | QConv2d, layer.to_quantized())) for at, layer in layers.items()
                    ]
                    self.store.add_layers(name, records, tensors_in(block, name, layers))
            if way.progress is not None:
                way.progress(done, len(blocks), name)
        return {id(layer): noted(_twin(layer), layer.note) for layer in self.model.modules() if is_simulated(layer)}

    def _way(self, step: str, residence: FromFiles) -> Way:
        told = self.way.progress
        progress = None if told is None else lambda done, total, what: told(done, total, f"{step} {what}")
        folder = Path(os.fspath(self.way.save_to or "")) / step
        return Way(self.way.blocks, self.way.device, self.way.cache, folder, progress, residence)


def _twin(layer: Any) -> nn.Module:
    """The quantised twin, an empty one of an empty layer."""
    quantised: nn.Module
    fake = layer.weight_fake_quant
    if layer.weight.is_meta and not fake.is_calibrated:
        fake._is_known = True  # what has no numbers needs no range
        quantised = layer.to_quantized()
        fake._is_known = False
    else:
        quantised = layer.to_quantized()
    return quantised


def _of_recipe(
    recipe: Recipe,
    names: tuple[str, ...],
    data: object,
    num_batches: int | None,
    filter_fn: object,
    embeddings: bool,
    heads: bool | None,
    on_indivisible: str,
) -> tuple[str, ...]:
    """The improvers, where a recipe says what the other arguments would. Raises ArgumentError."""
    given = {"filter_fn": filter_fn, "num_batches": num_batches, "heads": heads, "embeddings": embeddings or None}
    given["on_indivisible"] = None if on_indivisible == "per_channel" else on_indivisible
    for name, value in given.items():
        if value is not None:
            raise ArgumentError(name, arguments.shown(value), "nothing beside a recipe, which says it")
    if recipe.chains != "off":
        raise ArgumentError("recipe.chains", arguments.shown(recipe.chains), "off: layers are in memory one by one")
    if names and recipe.improve:
        raise ArgumentError("improve", listed(names), f"nothing beside the recipe's {listed(recipe.improve)}")
    return names or check_names(recipe.improve, data)


def _facts(source: Source) -> str:
    """What the files of a directory are known by: names, sizes, times of change, and what is in them."""
    hasher = hashlib.sha256()
    for name in sorted(source):
        span = source.span(name)
        hasher.update(f"{name} {span.dtype} {span.shape} {span.start}\n".encode())
    for file in sorted(source.directory.glob("*.safetensors")):
        info = file.stat()
        hasher.update(f"{file.name} {info.st_size} {info.st_mtime_ns}\n".encode())
    return hasher.hexdigest()
