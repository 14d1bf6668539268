"""Play one visit to a prompt: one single-turn episode for each member of the group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lagzero.engine.request import Sampling, derive_seed
from lagzero.types import Group, Prompt, Rollout


class SamplingBackend(Protocol):
    """Something that samples a prompt once for each seed."""

    async def complete(
        self, prompt_ids: tuple[int, ...], seeds: Sequence[int], sampling: Sampling, *, label: str
    ) -> list[Rollout]:
        """Return one rollout for each seed, in order. ``label`` names the request to people."""
        ...


class SingleTurnGenerator:
    """One prompt, ``group_size`` responses.

    A member's random stream depends on the run's seed, the stream's name, the visit (hence the
    step), the prompt and the member, and not on which engine serves it.
    """

    def __init__(
        self,
        backend: SamplingBackend,
        sampling: Sampling,
        group_size: int,
        run_seed: int,
        stream: str = "train",
    ):
        self._backend = backend
        self._sampling = sampling
        self._group_size = group_size
        self._run_seed = run_seed
        self._stream = stream

    async def play(self, index: int, prompt: Prompt) -> Group:
        """Return the group of visit ``index``."""
        seeds = [
            derive_seed(self._run_seed, self._stream, index, prompt.id, member)
            for member in range(self._group_size)
        ]
        rollouts = await self._backend.complete(
            prompt.token_ids, seeds, self._sampling, label=f"{self._stream} group {index}"
        )
        return Group(index, prompt, tuple(rollouts))
