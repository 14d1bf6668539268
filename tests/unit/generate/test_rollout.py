"""A visit to a prompt becomes a group whose streams depend on the visit and the member alone."""

from __future__ import annotations

import asyncio

from lagzero.engine.request import Sampling
from lagzero.generate.rollout import SingleTurnGenerator
from lagzero.types import Finish, Prompt, Rollout, sampled_tokens


class Recorder:
    """A backend that notes what it is asked and answers with the seeds."""

    def __init__(self):
        self.asked = []

    async def complete(self, prompt_ids, seeds, sampling, *, label):
        self.asked.append((prompt_ids, tuple(seeds), sampling))
        return [
            Rollout(m, sampled_tokens([seed % 97], [-0.5], [3]), str(seed), Finish.LENGTH)
            for m, seed in enumerate(seeds)
        ]


def seeds_of(index=0, prompt="p", run_seed=0, stream="train", size=8):
    backend = Recorder()
    generator = SingleTurnGenerator(backend, Sampling(4), size, run_seed, stream)
    group = asyncio.run(generator.play(index, Prompt(prompt, (1, 2), "text")))
    assert group.index == index
    assert group.prompt.id == prompt
    assert [r.member for r in group.rollouts] == list(range(size))
    ((prompt_ids, seeds, sampling),) = backend.asked
    assert (prompt_ids, sampling) == ((1, 2), Sampling(4))
    assert [r.text for r in group.rollouts] == [str(s) for s in seeds]
    return seeds


def test_a_group_has_a_stream_for_each_member_the_same_on_every_run():
    """EN4: seed 0, a group of 8, two backends that know nothing of each other."""
    assert len(set(seeds_of())) == 8
    assert seeds_of() == seeds_of()
    assert all(0 <= seed < 1 << 64 for seed in seeds_of())


def test_a_smaller_group_is_the_start_of_a_larger_one():
    assert seeds_of(size=3) == seeds_of(size=8)[:3]


def test_visits_prompts_runs_and_purposes_have_streams_of_their_own():
    """EN4, DI8: a second visit to the same prompt is another group with other streams."""
    every = [
        seeds_of(),
        seeds_of(index=1),
        seeds_of(prompt="q"),
        seeds_of(run_seed=1),
        seeds_of(stream="eval"),
    ]
    assert len({seed for seeds in every for seed in seeds}) == 5 * 8
