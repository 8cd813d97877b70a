"""The fingerprint of an analysis changes with everything that losses depend on, and with nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import nets

from pyquant.calibrate import counting_padding
from pyquant.mixed_precision.choices.fingerprint import fingerprint
from pyquant.mixed_precision.choices.switchable import SwitchableModel


def _told(seed: int = 0, formats: tuple[str, ...] = ("fp32", "int8"), data: int = 1, **more: object) -> str:
    model = nets.classifier(seed)
    switchable = SwitchableModel(model, formats, nets.batches(2, seed=data), num_batches=2, **more)  # type: ignore[arg-type]
    return fingerprint(switchable, nets.batches(1, seed=7))


def test_equal_analyses_have_equal_fingerprints() -> None:
    assert _told() == _told()


def test_every_part_counts() -> None:
    joined = {"all": ["0", "2", "4"]}
    told = [
        _told(),
        _told(1),
        _told(formats=("fp32", "int4")),
        _told(formats=("fp32", "int8", "int4")),
        _told(data=2),
        _told(grouping=joined),
        _told(formats=("fp32", "W8A8")),
    ]
    assert len(set(told)) == len(told)


def test_the_content_of_batches_counts_whatever_their_form() -> None:
    switchable = SwitchableModel(nets.classifier(), ("fp32", "W8A8Dynamic"))
    x, y = torch.ones(2), torch.zeros(2)
    forms = [
        [x],
        [y],
        [(x, y)],
        [(y, x)],
        [{"a": x}],
        [{"b": x}],
        [x, x],
        [x.double()],
        [x.reshape(1, 2)],
        [(x, 1)],
        [(x, 2)],
        [(x, "1")],
        [],
    ]
    told = [fingerprint(switchable, form) for form in forms]
    assert len(set(told)) == len(told)
    assert told == [fingerprint(switchable, form) for form in forms]
    assert fingerprint(switchable, [], "a") != fingerprint(switchable, [], "b") != told[-1]


def test_batches_whose_padding_counts_are_others() -> None:
    switchable = SwitchableModel(nets.classifier(0), ("fp32", "int8"), nets.batches(1, seed=1), num_batches=1)
    batch = {"input_ids": torch.ones(1, 3), "attention_mask": torch.tensor([[1, 1, 0]])}
    with counting_padding():
        counted = fingerprint(switchable, [batch])
    assert counted != fingerprint(switchable, [batch])
    whole = [batch | {"attention_mask": torch.ones(1, 3)}]
    with counting_padding():
        counted = fingerprint(switchable, whole)
    assert counted == fingerprint(switchable, whole)
