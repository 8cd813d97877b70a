"""What a MODEL argument names: 'package.module:callable', or a folder of a Hugging Face model."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pyquant.errors import ArgumentError, PyquantError

MODEL_HELP = "package.module:callable that returns an nn.Module, or a folder of a Hugging Face model"
_BATCHES = "package.module:callable that returns batches, or, with the folder of a Hugging Face model, a text file"
_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_HUB_NAME = re.compile(r"([\w.-]+/)?[\w.-]+")


def load_callable(text: str, argument: str, allowed: str) -> Callable[..., Any]:
    """The callable named 'package.module:callable'; the current folder is importable, as with `python -m`.

    allowed  for messages: what the argument may be.
    Raises ArgumentError naming `argument` when the text is no such name, or the module or attribute is not there.
    An error inside the module itself is passed on: it is the user's to read.
    """
    if not _NAME.fullmatch(text):
        is_hub = allowed == MODEL_HELP and _HUB_NAME.fullmatch(text)
        hint = f" (download a model of the hub first: hf download {text} --local-dir FOLDER)" if is_hub else ""
        raise ArgumentError(argument, f"{text!r}, {_kind_of(text)}", allowed + hint)
    module_name, _, attribute = text.partition(":")
    with _current_folder_importable():
        if _spec_of(module_name) is None:
            raise ArgumentError(argument, f"no module named {module_name!r}", "an importable module")
        target: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ArgumentError(argument, f"{module_name!r} has no {attribute!r}", "a callable of that module")
        target = getattr(target, part)
    if not callable(target):
        raise ArgumentError(argument, f"{text!r} is a {type(target).__name__}", "a callable")
    return target  # type: ignore[no-any-return]


def _kind_of(text: str) -> str:
    if Path(text).exists():
        return "a folder" if Path(text).is_dir() else "a file"
    return "not a name of that form" if ":" in text else "no such file or folder"


def load_called(text: str, argument: str, allowed: str, *given: str) -> Callable[..., Any]:
    """load_callable for one that is called with the arguments `given` (names for messages); its signature is checked
    before any long work begins. Raises ArgumentError naming `argument`.

    What it raises itself when it is called is passed on, after a line that names the option.
    """
    target = load_callable(text, argument, allowed)
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # builtins without one
        signature = None
    if signature is not None:
        try:
            signature.bind(*given)
        except TypeError:
            called = f"a callable that takes ({', '.join(given)})" if given else "a callable without arguments"
            takes = f"takes arguments {signature}" if signature.parameters else "takes no arguments"
            raise ArgumentError(argument, f"{text} {takes}"[:200], called) from None

    def call(*values: Any) -> Any:
        try:
            return target(*values)
        except PyquantError:
            raise
        except Exception:
            print(f"pyquant: {text}, which {argument} names, raised:", file=sys.stderr)
            raise

    return call


def load_inputs(text: str, argument: str) -> Any:
    """What the callable that `text` names returns: inputs of a model. Raises ArgumentError naming `argument`."""
    return load_called(text, argument, "package.module:callable that returns inputs of the model")()


def load_eval(text: str, argument: str) -> Callable[[torch.nn.Module], Any]:
    """load_called for one that is called with a model. Raises ArgumentError naming `argument`."""
    return load_called(text, argument, "package.module:callable that takes the model and returns a number", "model")


def load_batches(text: str, argument: str, model: str, of_model: str = "MODEL") -> Callable[[], Iterable[Any]]:
    """What `text` names: a file, whose text the tokenizer of the folder `model` cuts, or load_called for a callable
    that returns batches. ArgumentError naming `argument` where it is neither, or returns anything else, or `of_model`,
    which named the folder, where that has no tokenizer."""
    if Path(text).is_file():
        if not Path(model).is_dir():
            allowed = "a text with the folder of a Hugging Face model alone, whose tokenizer cuts it"
            raise ArgumentError(argument, f"{text}, a file, with {model}", allowed)
        return lambda: _batches_of_text(text, argument, model, of_model)
    call = load_called(text, argument, _BATCHES)

    def batches() -> Iterable[Any]:
        result = call()
        if not isinstance(result, Iterable):
            raise ArgumentError(
                argument, f"a callable that returned a {type(result).__name__}", "an iterable of batches"
            )
        return result

    return batches


def _batches_of_text(path: str, argument: str, model: str, of_model: str) -> Iterable[Any]:
    from pyquant.integrations.transformers import text_batches

    try:
        return text_batches(model, path)
    except ArgumentError as error:
        named = {"path": argument, "folder": of_model}.get(error.argument or "", error.argument)
        raise ArgumentError(named, error.got, error.allowed) from None


def usual_batches(batches: Iterable[Any], count: int | None) -> tuple[Iterable[Any], int]:
    """Batches and how many of them are used: `count`, or 16, or all of fewer, so that the work is known before."""
    from pyquant.mixed_precision.choices.switchable import USUAL_BATCHES

    if count is not None:
        return batches, count
    first = list(itertools.islice(batches, USUAL_BATCHES))
    return first, max(len(first), 1)


def model_factory(text: str, argument: str = "MODEL") -> Callable[[], torch.nn.Module]:
    """A callable that builds the model `text` names, in eval mode. Raises ArgumentError naming `argument`."""
    if Path(text).is_dir():
        _refuse_codes(Path(text), argument)
        return lambda: _hugging_face(Path(text), argument)
    build = load_called(text, argument, MODEL_HELP)

    def factory() -> torch.nn.Module:
        model = build()
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(argument, f"{text} returned a {type(model).__name__}", "an nn.Module")
        return model.eval()

    return factory


def _refuse_codes(folder: Path, argument: str) -> None:
    """Raise ArgumentError for the folder of a quantised model, from which transformers would make other layers."""
    from pyquant.io.foreign.source import read_words
    from pyquant.io.manifest import CONFIG, FILE

    named = (folder / CONFIG).is_file() and "quantization_config" in read_words(folder / CONFIG)
    if named or (folder / FILE).is_file():
        allowed = "the folder of the float model (codes of other tools: `pyquant convert`)"
        raise ArgumentError(argument, f"{folder}, which holds a quantised model", allowed)


def _hugging_face(folder: Path, argument: str) -> torch.nn.Module:
    kind, _ = _class_of(folder, argument)
    model: torch.nn.Module = kind.from_pretrained(str(folder), local_files_only=True)
    return model.eval()


def empty_model(folder: Path, argument: str, default: torch.dtype = torch.float32) -> torch.nn.Module:
    """The model that config.json of a folder describes, on the meta device, in the types in which from_pretrained would
    load it; default: of one whose config.json names none. Raises ArgumentError naming `argument`."""
    from pyquant.integrations.transformers import keep_types

    kind, config = _class_of(folder, argument)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    dtype = getattr(config, "dtype", None) or default
    with torch.device("meta"):
        model: torch.nn.Module = kind._from_config(config, dtype=dtype)
    keep_types(model, dtype)
    return model.eval()


def _class_of(folder: Path, argument: str) -> tuple[Any, Any]:
    """The class of transformers that a folder is for, and its configuration."""
    if not (folder / "config.json").is_file():
        raise ArgumentError(argument, f"folder {folder} without config.json", MODEL_HELP)
    try:
        import transformers
    except ImportError:
        raise ArgumentError(argument, f"folder {folder}", "transformers installed: pip install transformers") from None
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ArgumentError(argument, f"folder {folder}: {error}"[:300], MODEL_HELP) from None
    # the class that the folder names has the head that its weights belong to; AutoModel is the body alone
    named = next((getattr(transformers, name, None) for name in config.architectures or ()), None)
    return named or transformers.AutoModel, config


def _spec_of(module_name: str) -> object | None:
    try:
        return importlib.util.find_spec(module_name)
    except ModuleNotFoundError:  # a parent package is missing
        return None


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
