"""Recipe: one file for calibration, selective quantisation, training and search; what it says about every layer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Final, cast

from torch import nn

from pyquant.core.paths import file_path
from pyquant.core.patterns import MAX_EXPRESSIONS, Expression
from pyquant.core.presets import scheme_from_name
from pyquant.core.registry import IMPROVERS
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.nn.indivisible import CHOICES
from pyquant.nn.match import DEFAULT, FqnConfig, Key
from pyquant.recipe import documents
from pyquant.recipe.fields import check_keys, checked, choice, flag, listed, mapping, read, refuse, shown, text, written
from pyquant.recipe.layer_rule import FLOAT, LayerRule, with_defaults
from pyquant.recipe.sections import (
    ADAM,
    CalibrationParams,
    Provenance,
    QatModification,
    QatParams,
    RecipeNotice,
    SearchParams,
    SelectiveParams,
    rescales,
)

VERSION: Final = 1
MAX_RULES: Final = 2048  # different ones; any number of layers may share them
EVERYTHING: Final = "everything"
_WARN: Final = "warn"  # the word for heads=None where a format has no null
# What a file of `pyquant quantize --config` leaves unsaid is what the arguments of quantize_ leave unsaid.
_UNSAID: Final[dict[str, Any]] = {"default": None, "heads": None}
_UNSAID_SELECTIVE: Final = {"calibrator_i": "max"}
CALLBACK: Final = "QATRecipeModificationCallback"
_TYPE: Final = "type:"
_SECTIONS: Final = ("selective_quantizer_params", "calib_params", "search", "qat", "provenance")
_KEYS: Final = {"callback": "pre_launch_callbacks_list"}  # of files, where they are not the name of the field
_MAY_BE_NULL: Final = {*_SECTIONS, "pre_launch_callbacks_list", "layers"}  # which says the same as no such key


def _callback(data: object, where: str) -> QatModification | None:
    """The parameters of the callback: below its name, or at its level as a printed recipe has them."""
    if not isinstance(data, (list, tuple)):
        refuse(where, f"{type(data).__name__} {data!r}", f"a list with one entry: {CALLBACK}")
    if not data:
        return None
    if len(data) != 1:
        refuse(where, f"{len(data)} entries", f"one entry: {CALLBACK}")
    entries = dict(mapping(data[0], f"{where}[0]"))
    if CALLBACK not in entries:
        refuse(f"{where}[0]", f"keys {', '.join(map(repr, entries))}", CALLBACK)
    below = entries.pop(CALLBACK)
    if below is not None and entries:
        refuse(f"{where}[0]", f"parameters both below and next to {CALLBACK}", "below its name")
    modification = read(QatModification, entries or below or {}, f"{where}[0].{CALLBACK}")
    if entries:
        told = "where YAML reads them as separate keys; they are taken as its parameters. Indent them further to write"
        notice = f"{where}[0]: the parameters stand next to {CALLBACK}, {told} what is meant"
        warnings.warn(notice, RecipeNotice, stacklevel=2)
    return modification


def _default(data: object, where: str) -> LayerRule:
    rule = LayerRule.from_plain(data, where)
    if not rule.scheme:
        refuse(where, "no scheme", "a scheme, or null")
    return rule


def _heads(data: object, where: str) -> bool | str | None:
    if data is not None and not isinstance(data, bool) and data not in (_WARN, EVERYTHING):
        refuse(where, shown(data), f"true, false, null (or {_WARN}), {EVERYTHING}")
    return None if data == _WARN else data


def _chains(data: object, where: str) -> str | tuple[tuple[str, str], ...]:
    if isinstance(data, str) or data is False:
        return cast(str, choice("auto", "off")(data, where))
    if not isinstance(data, (list, tuple)):
        refuse(where, repr(data), "auto, off, or a list of [producer, consumer]")
    pairs = []
    for i, pair in enumerate(data):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            refuse(f"{where}[{i}]", repr(pair), "[producer, consumer]")
        pairs.append((text(pair[0], f"{where}[{i}]"), text(pair[1], f"{where}[{i}]")))
    return tuple(pairs)


def _layers(data: object, where: str) -> dict[str, LayerRule]:
    """The rules of layers; those of equal data are one rule, which is read once."""
    rules: dict[str, LayerRule] = {}
    known: dict[str, LayerRule] = {}
    layers = mapping(data, where)
    if (count := sum(key.startswith("re:") for key in layers)) > MAX_EXPRESSIONS:
        refuse(where, f"{count} expressions 're:...'", f"at most {MAX_EXPRESSIONS}")
    for key, rule in layers.items():
        _key(key, where)
        rule_text = _told(rule)
        if rule_text not in known:
            if len(known) >= MAX_RULES:
                refuse(where, f"more than {MAX_RULES} different rules", f"at most {MAX_RULES}")
            known[rule_text] = LayerRule.from_plain(rule, f"{where}[{key!r}]")
        rules[key] = known[rule_text]
    return rules


def _told(data: Any) -> str:
    """Plain data as text: equal for equal data, whatever the order of its keys and whatever stands for a key."""
    if isinstance(data, Mapping):
        return "{" + ", ".join(sorted(f"{_told(key)}: {_told(value)}" for key, value in data.items())) + "}"
    if isinstance(data, (list, tuple)):
        return "[" + ", ".join(map(_told, data)) + "]"
    return repr(data) if data is None or isinstance(data, (str, bool, int, float)) else shown(data)


def _key(name: str, where: str = "recipe") -> Key:
    """A key of FqnConfig; 'type:Linear' is the class of torch.nn, and nothing else is looked up by name."""
    if name.startswith(_TYPE):
        kind = getattr(nn, name.removeprefix(_TYPE).removeprefix("nn."), None)
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            refuse(where, repr(name), "'type:' and a class of torch.nn, such as type:Linear")
        return kind
    if name in ("", DEFAULT):
        refuse(where, f"key {name!r}", "names of layers (the default is the key `default`)")
    if name.startswith("re:"):
        try:
            Expression(name[3:])
        except ArgumentError as error:  # an expression that does not compile
            refuse(where, error.got, error.allowed)
    return name


_RECORDS: Final = (LayerRule, SelectiveParams, CalibrationParams, QatModification, SearchParams, QatParams, Provenance)


@dataclass(frozen=True)
class Recipe:
    """How a model is quantised, as plain data that YAML, TOML and JSON hold; two recipes compare by value.

    ptq_only  nothing is trained after calibration: prepare_qat_ refuses the recipe, and models that prepare_ made.
    selective_quantizer_params, calib_params   the block that SuperGradients' recipes have.
    callback  parameters of QATRecipeModificationCallback (pre_launch_callbacks_list), or None.
    default   LayerRule of every layer that nothing else names; scheme W8A8.
    layers    {key: LayerRule}: exact names before 're:...' before globs before 'type:Linear' (classes of torch.nn);
              among equals the first one wins.
    chains    'auto' (fuse_ after conversion, and link_ where an input is static), 'off', or the pairs (producer,
              consumer) of layers that link_ is to link, after fuse_, and no others.
    residuals 'quantize' or 'float': whether branches that pyquant.Residual marks are quantised.
    on_indivisible  layers whose K a group size does not divide: 'per_channel', 'skip' or 'error', as in quantize_.
    embeddings  whether nn.Embedding becomes QEmbedding, as in quantize_ (at conversion; simulation leaves them).
    heads     'everything': output heads and adapters are quantised like every other layer (that is what a recipe
              without the key means); True, False or None ('warn' in files): as the argument of quantize_.
    improve   names of what is done beside rounding, as in quantize_, which needs data then: ('gptq',).
    search, qat, provenance   further sections, or None.

    Unknown keys are errors that name the key. load, dump, load is the identity.

    Example:
        >>> recipe = Recipe.from_dict({"layers": {"head": None}, "default": "W8A8Dynamic"})
        >>> {key: str(scheme) for key, scheme in recipe.config().entries.items()}
        {'head': 'None', '_default': 'W8A8Dynamic'}
    """

    ptq_only: bool = checked(False, flag)
    selective_quantizer_params: SelectiveParams = checked(SelectiveParams(), partial(read, SelectiveParams))
    calib_params: CalibrationParams = checked(CalibrationParams(), partial(read, CalibrationParams))
    callback: QatModification | None = checked(None, _callback)
    default: LayerRule = checked(LayerRule("W8A8"), _default)
    layers: Mapping[str, LayerRule] = field(default_factory=dict, metadata={"check": _layers})
    chains: str | tuple[tuple[str, str], ...] = checked("off", _chains)
    residuals: str = checked("quantize", choice("quantize", "float"))
    on_indivisible: str = checked(CHOICES[0], choice(*CHOICES))
    embeddings: bool = checked(False, flag)
    heads: bool | str | None = checked(EVERYTHING, _heads)
    improve: tuple[str, ...] = checked((), listed(choice(IMPROVERS.names)))
    search: SearchParams | None = checked(None, partial(read, SearchParams))
    qat: QatParams | None = checked(None, partial(read, QatParams))
    provenance: Provenance | None = checked(None, partial(read, Provenance))

    def __post_init__(self) -> None:
        """Fields take plain data too, as files hold it."""
        for f in fields(self):
            value, where = getattr(self, f.name), f"recipe.{f.name}"
            if isinstance(value, _RECORDS) or (value is None and f.default is None):
                continue
            if f.name == "layers":
                given = mapping(value, where)
                rules = {key: rule for key, rule in given.items() if isinstance(rule, LayerRule)}
                read_rules = _layers({key: rule for key, rule in given.items() if key not in rules}, where)
                new: Any = {key: rules.get(key) or read_rules[key] for key in given}
            else:
                new = f.metadata["check"](value, where)
            object.__setattr__(self, f.name, new)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Recipe:
        """The recipe in a .yaml, .yml, .toml or .json file.

        Raises ArgumentError naming the file, the key and what is allowed; warns (RecipeNotice) where a shape is
        accepted that should be written otherwise.
        """
        path = file_path("path", path)
        return Recipe.from_dict(documents.read(path), str(path))

    @staticmethod
    def load_config(path: str | os.PathLike[str]) -> Recipe:
        """The recipe in a file of `pyquant quantize --config`, where keys that are missing have the defaults of
        quantize_: no `default` leaves other layers alone, `heads` is null, and static inputs take their maximum.

        Raises as load, and where no layer is given a scheme.
        """
        path = file_path("path", path)
        data = {**_UNSAID, **documents.read(path, "--config")}
        if isinstance(params := data.get("selective_quantizer_params") or {}, Mapping):
            data["selective_quantizer_params"] = {**_UNSAID_SELECTIVE, **params}
        recipe = Recipe.from_dict(data, str(path))
        if recipe.default_scheme() is None and not any(recipe.rules().values()):
            raise ArgumentError("--config", f"{path}: no scheme", "a default, or a scheme for at least one layer")
        return recipe

    @staticmethod
    def loads(content: str, format: str = "yaml", where: str = "recipe") -> Recipe:
        """The recipe in a text of format 'yaml', 'toml' or 'json'. Raises as load.

        Example:
            >>> Recipe.loads('{"calib_params": {"num_calib_batches": 4}}', "json").calib_params.num_calib_batches
            4
        """
        return Recipe.from_dict(documents.parse(content, format, where), where)

    def dumps(self, format: str = "yaml") -> str:
        """The recipe as text; loads gives an equal recipe back."""
        return documents.dump(self.to_dict(), format)

    @staticmethod
    def from_dict(data: Mapping[str, Any], where: str = "recipe") -> Recipe:
        """The recipe in plain data. Raises ArgumentError naming the key that is unknown or wrong."""
        entries = dict(mapping(data, where))
        readers = {_KEYS.get(f.name, f.name): f.metadata["check"] for f in fields(Recipe)}
        check_keys(entries, ["pyquant_recipe", *readers], where)
        version = entries.pop("pyquant_recipe", VERSION)
        if isinstance(version, bool) or version != VERSION:
            refuse(f"{where}.pyquant_recipe", repr(version), f"{VERSION} (a newer recipe needs a newer pyquant)")
        given = {key: value for key, value in entries.items() if value is not None or key not in _MAY_BE_NULL}
        values = {key: readers[key](value, f"{where}.{key}") for key, value in given.items()}
        if "qat" in values and rescales(values["qat"].optimizer):
            warnings.warn(f"{where}.qat.optimizer {values['qat'].optimizer!r}: {ADAM}", RecipeNotice, stacklevel=2)
        recipe = Recipe(**{f.name: values[key] for f in fields(Recipe) if (key := _KEYS.get(f.name, f.name)) in values})
        recipe.rules()
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """Plain data that from_dict reads back into an equal recipe."""
        plain: dict[str, Any] = {"pyquant_recipe": VERSION, "ptq_only": self.ptq_only}
        for key in _SECTIONS:
            section = getattr(self, key)
            if section is not None:
                plain[key] = written(section)
        if self.callback is not None:
            plain["pre_launch_callbacks_list"] = [{CALLBACK: written(self.callback)}]
        plain["default"] = self.default.to_plain()
        if self.layers:
            plain["layers"] = {key: rule.to_plain() for key, rule in self.layers.items()}
        plain["chains"] = self.chains if isinstance(self.chains, str) else [list(pair) for pair in self.chains]
        plain["residuals"] = self.residuals
        later = {"on_indivisible": CHOICES[0], "embeddings": False, "heads": EVERYTHING}  # where they say something
        plain |= {key: getattr(self, key) for key, default in later.items() if getattr(self, key) != default}
        plain |= {"improve": list(self.improve)} if self.improve else {}
        return plain | ({"heads": _WARN} if self.heads is None else {})

    def default_scheme(self) -> QScheme | None:
        """The scheme of layers that no rule names, calibrators included; None: they stay in floating point."""
        if self.default.scheme == FLOAT:
            return None
        base = with_defaults(scheme_from_name(self.default.scheme), self.selective_quantizer_params, self.calib_params)
        return self.default.resolve(base, self.selective_quantizer_params, self.calib_params)

    def rules(self) -> dict[Key, QScheme | None]:
        """Every key with its scheme (None: floating point): skip_modules first, then layers in their order."""
        default = self.default_scheme()
        skipped = dict.fromkeys(self.selective_quantizer_params.skip_modules or ())
        resolved: dict[int, QScheme | None] = {}  # by rule: a search writes few rules for many layers
        schemes: dict[Key, QScheme | None] = {_key(name): None for name in skipped}
        for name, rule in self.layers.items():
            if name in skipped:
                refuse(f"recipe.layers[{name!r}]", "a rule for a name in skip_modules", "one of the two")
            if default is None and not rule.scheme:
                refuse(f"recipe.layers[{name!r}]", "no scheme, and the default is null", "a scheme")
            try:
                if id(rule) not in resolved:
                    resolved[id(rule)] = rule.resolve(default, self.selective_quantizer_params, self.calib_params)
                schemes[_key(name)] = resolved[id(rule)]
            except ValueError as error:
                refuse(f"recipe.layers[{name!r}]", str(error), "a combination of fields that is defined")
        return schemes

    def config(self) -> FqnConfig:
        """The recipe as a config for quantize_, insert_fake_quantize_ or prepare_qat_.

        Names in it are those of layers; SelectiveQuantizer.from_recipe also takes names of whole blocks.
        """
        default = self.default_scheme()
        return FqnConfig({**self.rules(), **({} if default is None else {DEFAULT: default})} or {DEFAULT: None})


def is_recipe(config: object) -> bool:
    """Whether a config is a Recipe or the path of one."""
    return isinstance(config, (Recipe, os.PathLike)) or (
        isinstance(config, str) and config.lower().endswith(tuple(documents.FORMATS))
    )
