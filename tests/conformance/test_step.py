"""Whole steps: judged groups through preparation, packing, loss and reduction to the gradient."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import lagzero_side as side
import numpy as np
import pytest
import torch
from naive import step

from lagzero.config import AdvantageConfig, KLConfig, LossConfig, TrainConfig
from lagzero.losses.inputs import loss_inputs
from lagzero.losses.objective import make_loss, needs_reference
from lagzero.losses.reduce import reduce
from lagzero.prepare.prepare import GroupPreparer
from lagzero.types import (
    TOKEN,
    Array,
    Batch,
    Finish,
    Group,
    Outcome,
    Prompt,
    Rollout,
    Sample,
    Score,
    ScoredGroup,
)

VECTORS = side.read("step.json")
GROUPS: list[list[dict[str, Any]]] = VECTORS["groups"]
MEMBERS = [member for group in GROUPS for member in group]


def tokens_of_all(name: str) -> list[Any]:
    return [value for member in MEMBERS for value in member[name]]


def scored_groups() -> list[ScoredGroup]:
    """The vectors' groups; a token's id is its place among all tokens of the step."""
    first, out = 0, []
    for index, members in enumerate(GROUPS):
        rollouts, scores = [], []
        for number, member in enumerate(members):
            tokens = np.empty(len(member["trained"]), TOKEN)
            tokens["id"] = np.arange(first, first + len(tokens))
            tokens["trained"] = member["trained"]
            tokens["logprob"] = [np.nan if m is None else m for m in member["behaviour"]]
            tokens["version"] = [0 if on else -1 for on in member["trained"]]
            finish = Finish.LENGTH if member["truncated"] else Finish.STOP
            rollouts.append(Rollout(number, tokens, "", finish))
            known = member["reward"] is not None
            outcome = Outcome.SCORED if known else Outcome.UNSCORABLE
            scores.append(Score(outcome, member["reward"]))
            first += len(tokens)
        prompt = Prompt(f"p{index}", (500 + index, 600), "")
        out.append(ScoredGroup(Group(index, prompt, tuple(rollouts)), tuple(scores)))
    return out


def looked_up(name: str) -> Any:
    column = np.array([np.nan if v is None else v for v in tokens_of_all(name)])

    async def look_up(samples: Sequence[Sample]) -> list[Array]:
        return [column[s.tokens["id"]] for s in samples]

    return look_up


def loss_config(config: dict[str, Any]) -> LossConfig:
    return LossConfig(**{**config, "kl": KLConfig(**config.get("kl", {}))})


def prepared(config: dict[str, Any], budget: int, share: bool, order: Sequence[int]) -> Batch:
    advantage, loss = AdvantageConfig(**config["advantage"]), loss_config(config["loss"])
    preparer = GroupPreparer(
        advantage,
        loss,
        TrainConfig(micro_batch_tokens=budget, share_prompt=share),
        reference_logprobs=looked_up("reference") if needs_reference(loss) else None,
        values=looked_up("value") if advantage.estimator == "gae" else None,
    )
    groups = scored_groups()
    return asyncio.run(preparer.prepare([groups[i] for i in order]))


CUTS = [(1000, True, (0, 1, 2)), (1, True, (2, 0, 1)), (1, False, (1, 2, 0)), (9, False, (0, 2, 1))]


@pytest.mark.parametrize("case", VECTORS["cases"], ids=[case["name"] for case in VECTORS["cases"]])
@pytest.mark.parametrize(("budget", "share", "order"), CUTS)
def test_from_rewards_to_the_gradient(case: dict[str, Any], budget, share, order) -> None:
    """LN5, LN10, LP13: advantages cross packing in float32, hence 1e-6; the rest is float64."""
    config, expected = case["config"], case["expected"]
    batch = prepared(config, budget, share, order)
    leaf = torch.tensor([x or 0.0 for x in tokens_of_all("logprob")]).double().requires_grad_()
    length = leaf.shape[0]
    got = {name: [0.0] * length for name in ("advantage", "weight", "per_token", "return")}
    total = leaf.new_zeros(())
    for row in batch.micro_batches:
        places = row.targets.tolist()
        inputs = loss_inputs(row, batch.num_sequences, dtype=torch.float64)
        per_token, _ = make_loss(loss_config(config["loss"]))(leaf[places], None, inputs)
        total = total + reduce(per_token, torch.as_tensor(row.weights))
        columns = {"advantage": row.advantages, "weight": row.weights, "per_token": per_token}
        if "return" in expected:
            columns["return"] = row.returns
        for name, column in columns.items():
            for place, value in zip(places, column.tolist(), strict=True):
                got[name][place] = value
    total.backward()
    trained = [place for row in batch.micro_batches for place in row.targets.tolist()]
    assert sorted(trained) == [t for t, on in enumerate(expected["trained"]) if on]
    for name in got.keys() & expected.keys():
        assert got[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-6), name
    assert total.item() == pytest.approx(expected["loss"], rel=1e-6, abs=1e-6)
    assert side.gradient_of(leaf) == pytest.approx(expected["gradient"], rel=1e-6, abs=1e-6)


ADVANTAGES = [
    {
        "estimator": estimator,
        "normalize_std": std,
        "normalize_batch": batch,
        "zero_spread": flat,
        "truncated": cut,
        "short_group": short,
    }
    for estimator, std, batch, flat, cut, short in itertools.product(
        ("group_mean", "leave_one_out", "none", "gae"),
        (False, True),
        (False, True),
        ("keep", "drop"),
        ("keep", "mask"),
        ("keep", "drop"),
    )
    if not (std and estimator in ("none", "gae"))
]
KLS = [
    {},
    *(
        {"coefficient": 0.125, "estimator": kind, "where": where}
        for kind in ("k1", "k2", "k3")
        for where in ("reward", "advantage", "loss")
    ),
]


@pytest.mark.parametrize("kl", KLS, ids=lambda kl: "-".join(map(str, kl.values())) or "none")
def test_every_way_to_advantages_with_every_place_of_the_kl_term(kl: dict[str, Any]) -> None:
    """Which tokens are trained, and with what advantage, for all settings that decide it."""
    for advantage in ADVANTAGES:
        config = {"advantage": advantage, "loss": {"kl": kl}}
        expected = step.flattened(GROUPS, config)
        wanted = {
            t: a
            for t, (a, on) in enumerate(
                zip(expected["advantage"], expected["trained"], strict=True)
            )
            if on
        }
        batch = prepared(config, 1000, True, (0, 1, 2))
        got = {
            place: a
            for row in batch.micro_batches
            for place, a in zip(row.targets.tolist(), row.advantages.tolist(), strict=True)
        }
        assert got == pytest.approx(wanted, rel=1e-6, abs=1e-6), config


def test_the_cases_leave_out_what_they_should() -> None:
    """Trained tokens: all 16 of usable members, less those that a setting leaves out."""
    count = {c["name"]: sum(c["expected"]["trained"]) for c in VECTORS["cases"]}
    assert count["reinforce"] == 16
    assert count["grpo"] == count["reinforce"] - 3  # the flat group
    assert count["dapo"] == count["grpo"] - 2  # the truncated member
    assert count["short_groups_dropped"] == 8  # the first group
    assert count["flat_groups_kept"] == count["reinforce"]
    assert count["penalty_decides_about_spread"] == count["reinforce"]
    assert count["online_dpo"] == 3 + 2 + 2 + 3
    assert count["online_dpo_without_truncated"] == 3 + 1 + 2 + 3
