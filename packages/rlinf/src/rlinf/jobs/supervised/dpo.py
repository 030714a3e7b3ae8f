"""The job `dpo`: a language model learns to prefer one of two answers.

Before the first step the trainer scores all pairs: the model as it is then is the reference, so no second one is held.
The log-probabilities lie in the run's folder, and a resumed run reads them there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlinf.config.supervised import DpoConfig
from rlinf.errors import RunFailed
from rlinf.jobs.base import Flows
from rlinf.jobs.supervised.flow import PREFERENCE_TRAINER, scoring_flow
from rlinf.jobs.supervised.pairs import PairJob, PreferenceSource
from rlinf.machine import Machine
from rlinf.run_folder.checkpoints import writing_whole
from rlinf.tasks.preferences import TokenizedPreference
from rlinf_workers import Flow
from rlinf_workers.roles import DpoSettings, Preference

if TYPE_CHECKING:
    from rlinf.loop.session import Session

REFERENCE_FOLDER, REFERENCE_FILE = "reference_logprobs", "logprobs.safetensors"
TRAIN, HELD_OUT = "train", "held_out"
PAIRS_AT_ONCE = 1024
"""Pairs that one run of the scoring flow gets, so that a long one shows how far it is."""


class DpoSource(PreferenceSource):
    """Pairs of answers, with the reference's log-probabilities once these are known."""

    def __init__(self, config: DpoConfig) -> None:
        super().__init__(config)
        self.reference: dict[str, Tensor] = {}
        """Set -> [pairs, 2] float64, log-probability of the preferred answer and the other; empty: not known yet."""

    def item(self, index: int, one: TokenizedPreference, place: int, *, is_held_out: bool) -> Preference:
        reference = self.reference.get(HELD_OUT if is_held_out else TRAIN)
        return self.pair(index, one, None if reference is None else reference[place])


class DpoJob(PairJob):
    """Minimizes the loss of DPO or IPO."""

    config: DpoConfig
    source: DpoSource
    source_class = DpoSource
    trainer_class = PREFERENCE_TRAINER

    def __init__(self, config: DpoConfig, machine: Machine) -> None:
        super().__init__(config, machine)
        self._scoring: Flow | None = None

    def trainer_arguments(self, folder: Path) -> tuple[Any, ...]:
        dpo = self.config.dpo
        settings = DpoSettings(beta=dpo.beta, kind=dpo.loss, label_smoothing=dpo.label_smoothing)
        return (*super().trainer_arguments(folder), settings)

    def build(self, folder: Path) -> Flows:
        flows = super().build(folder)
        self._scoring = scoring_flow(flows.train, self.config)
        return replace(flows, others=[self._scoring])

    # -- the reference ---------------------------------------------------------------------------------------------

    def prepare(self, session: Session) -> None:
        """Scores all pairs with the model before its first step."""
        scored = {
            TRAIN: self._scored(session, len(self.source.training_set), is_held_out=False),
            HELD_OUT: self._scored(session, len(self.source.held_out), is_held_out=True),
        }
        with writing_whole(session.folder / REFERENCE_FOLDER) as partial:
            save_file(scored, partial / REFERENCE_FILE)
        self.source.reference = scored

    def restore(self, session: Session, step: int) -> None:
        file = session.folder / REFERENCE_FOLDER / REFERENCE_FILE
        scored = load_file(file) if file.is_file() else {}
        sizes = {TRAIN: len(self.source.training_set), HELD_OUT: len(self.source.held_out)}
        if {name: len(rows) for name, rows in scored.items()} != sizes:
            raise RunFailed(
                f"{file} has no log-probabilities of the reference for these pairs; start the run anew with this data"
            )
        self.source.reference = scored

    def _scored(self, session: Session, count: int, *, is_held_out: bool) -> Tensor:
        """[count, 2] float64"""
        assert self._scoring is not None, "the flows were built"
        rows = torch.zeros(count, 2, dtype=torch.float64)
        for start in range(0, count, PAIRS_AT_ONCE):
            places = range(start, min(start + PAIRS_AT_ONCE, count))
            pairs = self.source.items(places, is_held_out=is_held_out)
            run = session.run_flow(self._scoring, step=0, feeds={"pairs": pairs}, phase="evaluate")
            order = self.source.order(places, is_held_out=is_held_out)
            for measures in run.collected["measured"]:
                rows[order[measures.index]] = measures.values
            session.message(f"reference: {places.stop:,} of {count:,} {'held-out ' if is_held_out else ''}pairs")
        return rows
