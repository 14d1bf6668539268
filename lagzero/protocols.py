"""What each stage of one RL step must be able to do. The loop knows these and no backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from lagzero.types import Batch, Group, Prompt, ScoredGroup, StepStats


class PromptSource(Protocol):
    """An endless or finite stream of prompts, a pure function of the visit index."""

    def at(self, index: int) -> Prompt | None:
        """Return the prompt of visit ``index`` (from 0), or None past the last visit."""
        ...


class Generator(Protocol):
    """Plays one visit to a prompt."""

    async def play(self, index: int, prompt: Prompt) -> Group:
        """Return the group of visit ``index``. The same index gives the same random streams."""
        ...


class Scorer(Protocol):
    """Judges a group's rollouts."""

    async def score(self, group: Group) -> ScoredGroup:
        """Return one score for each rollout, in order. Never raises for a bad sample."""
        ...


class Preparer(Protocol):
    """Turns scored groups into a batch: advantages, selection, packing."""

    async def prepare(self, groups: Sequence[ScoredGroup]) -> Batch:
        """Return the batch of one step; it may hold no tokens."""
        ...

    def useful(self, scored: ScoredGroup) -> bool:
        """Say whether a group can teach anything. A schedule that resamples asks it."""
        ...


class Trainer(Protocol):
    """Takes optimiser steps."""

    async def step(self, batch: Batch) -> StepStats:
        """Take one optimiser step and return what it measured. An empty batch updates nothing."""
        ...


class WeightLink(Protocol):
    """Carries weights from the trainer to the generator."""

    async def publish(self, version: int) -> None:
        """Make the trainer's weights the generator's policy ``version``, all or nothing."""
        ...


class Gate(Protocol):
    """Says which stages may run together. The loop never branches on placement."""

    def shared(self, stage: str) -> AbstractAsyncContextManager[None]:
        """Enter a stage that others of its kind may share."""
        ...

    def exclusive(self, stage: str) -> AbstractAsyncContextManager[None]:
        """Enter a stage that nothing may overlap."""
        ...


class Observer(Protocol):
    """Hears of what happens. It never steers."""

    def stage(self, stage: str) -> AbstractAsyncContextManager[None]:
        """Time a stage."""
        ...

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of one finished step."""
        ...
