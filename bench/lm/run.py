"""A run over subjects, ways and draws: finished cells are journalled, so that the same command goes on after a kill."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyquant
from bench.lm.measure import FLOAT, Cell, Way, measured, state_bytes
from bench.lm.peers import PEERS, PeerJob, measure_peer
from bench.lm.records import FLOAT_ROW, LmRow, row_of
from bench.lm.subject import Judgement, Subject
from pyquant.io.journal import Journal

Tell = Callable[[str], None]


class Run:
    """The cells of one subject. facts: what they depend on besides the subject's name and pyquant's version."""

    def __init__(self, subject: Subject, journal: Path, facts: Mapping[str, str], tell: Tell) -> None:
        self.subject, self.tell = subject, tell
        identity = {"subject": subject.name, "pyquant": pyquant.__version__, **facts}
        self.journal = Journal(journal, "cells of bench.lm", identity)
        self._judgement: Judgement | None = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.journal.close()

    def float_cell(self) -> Cell:
        """The float model itself."""
        return self._cell(FLOAT, self._float)

    def row(self, way: Way, draws: int) -> LmRow:
        """One way, over the draws; where data changes nothing there is one."""
        count = draws if way.varies else 1
        cells = [
            self._cell(
                f"{way.label}, draw {draw}", lambda draw=draw: measured(self.subject, way, draw, self._reference())
            )
            for draw in range(count)
        ]
        return row_of(self.subject, way.scheme, way.method, cells, self.float_cell())

    def float_row(self) -> LmRow:
        """The line that the others are compared with."""
        cell = self.float_cell()
        return row_of(self.subject, "", FLOAT_ROW, [cell], cell)

    def peer_row(self, job: PeerJob, python: str, draws: int) -> LmRow:
        """A rival, over the draws; a line with its reason where it did not run."""
        peer, cells, note = PEERS[job.peer], [], ""
        for draw in range(draws if peer.needs_data else 1):
            key = f"{job.peer}, draw {draw}"
            if key not in self.journal.entries:
                self.tell(f"{self.subject.name}: {key}")
                found, note = measure_peer(PeerJob(**{**vars(job), "draw": draw}), python)
                if found is None:
                    return LmRow(self.subject.name, self.subject.measure, peer.scheme, job.peer, 0, note=note)
                self.journal.add(key, {**asdict(found), "version": note})
            entry = dict(self.journal.entries[key])
            note = entry.pop("version")
            cells.append(Cell(**entry))
        return row_of(self.subject, peer.scheme, job.peer, cells, self.float_cell(), note)

    def _cell(self, key: str, measure: Callable[[], Cell]) -> Cell:
        if key not in self.journal.entries:
            self.tell(f"{self.subject.name}: {key}")
            self.journal.add(key, asdict(measure()))
        return Cell(**self.journal.entries[key])

    def _quantised(self, way: Way, draw: int) -> Cell:
        return measured(self.subject, way, draw, self._reference())

    def _reference(self) -> Judgement:
        if self._judgement is None:
            self._judgement = self.subject.judge(self.subject.make(), None)
        return self._judgement

    def _float(self) -> Cell:
        found = self._reference()
        return Cell(found.losses, found.hits, 0.0, None, state_bytes(self.subject.make()))


def facts_of(folder: Path, texts: Sequence[str | Path | None], options: Any) -> dict[str, str]:
    """What the cells of a language model depend on: its files, the texts, how they are cut."""
    files = sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".json", ".model"))
    stamps = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    contents = [None if text is None else hashlib.sha256(Path(text).read_bytes()).hexdigest() for text in texts]
    return {
        "model": hashlib.sha256(json.dumps(stamps).encode()).hexdigest(),
        "texts": hashlib.sha256(json.dumps(contents).encode()).hexdigest(),
        "options": json.dumps(asdict(options), sort_keys=True),
    }
