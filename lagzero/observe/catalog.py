"""Every metric that a run may report, in one table. To add a metric, add a row.

A name is ``room/what``, its unit in the last word where it has one. ``*`` stands for any one name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Reduction = Literal["mean", "std", "sum", "max", "min", "share", "last"]

REDUCTIONS: Mapping[Reduction, str] = {
    "mean": "mean over what the explanation names",
    "std": "population standard deviation over what the explanation names",
    "sum": "sum, or count, over the step",
    "max": "largest of the step",
    "min": "smallest of the step",
    "share": "mean of 0/1, between 0 and 1",
    "last": "value at the end of the step",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure: its unit (empty: a plain number), how it is reduced, and what it tells."""

    name: str
    unit: str
    reduction: Reduction
    text: str


CATALOG: tuple[Metric, ...] = (
    # what the policy wrote, and what it was worth
    Metric("reward/mean", "", "mean", "Weighted reward over scored rollouts, before any penalty."),
    Metric("reward/std", "", "std", "Weighted reward over scored rollouts of the whole step."),
    Metric("reward/max", "", "max", "Best weighted reward."),
    Metric("reward/min", "", "min", "Worst weighted reward."),
    Metric("reward/positive_share", "", "share", "Scored rollouts with a reward above 0."),
    Metric("reward/part/*/mean", "", "mean", "One reward of the mix, unweighted, by its name."),
    Metric(
        "reward/kl_per_sequence/mean",
        "nats",
        "mean",
        "KL(sampler || reference) of a rollout, summed over its tokens, with loss.kl.where reward.",
    ),
    Metric("reward/kl_per_token/mean", "nats", "mean", "The same, of a trained token."),
    Metric("reward/penalised/mean", "", "mean", "Weighted reward less the penalty for this KL."),
    Metric("length/mean", "tokens", "mean", "Sampled tokens of a response, trained on or not."),
    Metric("length/max", "tokens", "max", "Longest response."),
    Metric("finish/stop/share", "", "share", "Rollouts ended by a stop id or stop string."),
    Metric("finish/length/share", "", "share", "Rollouts cut by rollout.max_new_tokens."),
    Metric("finish/context/share", "", "share", "Rollouts cut by the model's context."),
    Metric("finish/abort/share", "", "share", "Rollouts taken back before they ended."),
    # what is kept of it
    Metric("rollouts/count", "rollouts", "sum", "Rollouts that the step consumed."),
    Metric("rollouts/trained/count", "rollouts", "sum", "Rollouts trained on."),
    Metric(
        "rollouts/unscorable/count", "rollouts", "sum", "Left out: the reward gave them no score."
    ),
    Metric("rollouts/infrastructure/count", "rollouts", "sum", "Left out: scoring itself failed."),
    Metric("rollouts/empty/count", "rollouts", "sum", "Left out: no token was sampled."),
    Metric(
        "rollouts/truncated/count",
        "rollouts",
        "sum",
        "Left out: a limit cut them off and advantage.truncated is mask.",
    ),
    Metric(
        "rollouts/short_group/count",
        "rollouts",
        "sum",
        "Left out: their group lost a member and advantage.short_group is drop.",
    ),
    Metric("rollouts/lone/count", "rollouts", "sum", "Left out: nobody left to compare with."),
    Metric(
        "rollouts/zero_spread/count",
        "rollouts",
        "sum",
        "Left out: all rewards of their group are equal and advantage.zero_spread is not keep.",
    ),
    Metric(
        "rollouts/unpaired/count",
        "rollouts",
        "sum",
        "Left out: neither the best nor the worst of their group, under loss.policy dpo.",
    ),
    Metric("groups/count", "groups", "sum", "Groups that the step consumed."),
    Metric(
        "groups/mixed_share", "", "share", "Groups whose rewards differ: those that teach anything."
    ),
    Metric("groups/short/count", "groups", "sum", "Groups that lost a member."),
    Metric("groups/lone/count", "groups", "sum", "Groups with one usable member."),
    Metric("groups/zero_spread/count", "groups", "sum", "Groups whose rewards are all equal."),
    Metric("advantage/zero_share", "", "share", "Trained sequences whose advantage is 0."),
    Metric("advantage/abs_max", "", "max", "Largest |advantage| of a trained token."),
    Metric("tokens/trained/count", "tokens", "sum", "Tokens that the loss sees."),
    Metric("pack/rows/count", "rows", "sum", "Packed rows, one forward and backward pass each."),
    Metric("pack/tokens/count", "tokens", "sum", "Input tokens of all rows, prompts included."),
    Metric("pack/row_tokens/max", "tokens", "max", "Input tokens of the longest row."),
    Metric(
        "pack/saved_share",
        "",
        "share",
        "Input tokens saved by computing a group's prompt once, of those without sharing.",
    ),
    # staleness
    Metric("version/min", "versions", "min", "Oldest policy version that sampled a trained token."),
    Metric("version/max", "versions", "max", "Newest such version."),
    Metric("lag/max", "versions", "max", "Trainer version before the update minus version/min."),
    Metric("lag/token_mean", "versions", "mean", "Lag of the trained tokens."),
    Metric("lag/share/*", "", "share", "Trained tokens with this lag; 8_up: with 8 or more."),
    Metric("lag/*/kl_k1", "nats", "mean", "KL(sampler || trainer), k1; tokens with this lag."),
    Metric("lag/*/kl_k3", "nats", "mean", "KL(sampler || trainer), k3; tokens with this lag."),
    Metric("lag/*/ratio_mean", "", "mean", "Token ratio trainer / sampler; tokens with this lag."),
    Metric(
        "lag/*/ess_share",
        "",
        "share",
        "Effective sample size of these ratios, as a share of the tokens with this lag.",
    ),
    Metric(
        "lag/*/stopped_share",
        "",
        "share",
        "Tokens with this lag that a bound, mask or largest lag leaves without policy gradient.",
    ),
    Metric(
        "lag/*/capped_share",
        "",
        "share",
        "Tokens with this lag whose importance weight a bound changed.",
    ),
    Metric("lag/group_mean", "versions", "mean", "Lag of the trained groups, by staleness.clock."),
    Metric("lag/group_max", "versions", "max", "Largest such lag."),
    Metric("staleness/given_up/count", "groups", "sum", "Groups given up since the step before."),
    Metric(
        "staleness/given_up/share", "", "share", "Of the groups trained or given up since then."
    ),
    Metric(
        "staleness/given_up/*/count",
        "groups",
        "sum",
        "By reason: stale (above the bound), surplus, interrupted, timeout, zero_spread (another "
        "was played in its place), lost (play failed).",
    ),
    *(
        row
        for name, whom in (
            ("trained", "groups of the step"),
            ("waiting", "finished groups that are held for later steps"),
            ("given_up/*", "finished groups given up, by reason"),
        )
        for row in (
            Metric(f"staleness/{name}/length_mean", "tokens", "mean", f"Of a rollout; {whom}."),
            Metric(f"staleness/{name}/reward_mean", "", "mean", f"Of scored rollouts; {whom}."),
        )
    ),
    Metric("staleness/waiting/count", "groups", "last", "Finished groups held for later steps."),
    Metric("staleness/playing/count", "groups", "last", "Groups that are being played."),
    Metric(
        "staleness/restarts/count", "groups", "sum", "Groups begun again since the step before."
    ),
    Metric(
        "staleness/long_share",
        "",
        "share",
        "Long visits among those that ended lately: trained or given up (docs/staleness.md).",
    ),
    Metric("staleness/long_trained_share", "", "share", "Long visits among the trained of them."),
    Metric("staleness/long_lost_share", "", "share", "Of the long visits, those given up."),
    Metric(
        "staleness/selection_p",
        "",
        "last",
        "Probability of so many long ones among the given-up, were these drawn blindly.",
    ),
    Metric("staleness/alarm", "", "last", "1 while long groups are being lost, else 0."),
    # the objective
    Metric("train/loss", "", "sum", "The step's loss, with its weights; mean over train.passes."),
    Metric(
        "policy/loss",
        "",
        "mean",
        "Policy term over trained tokens, without the weights of correction and reduction.",
    ),
    Metric(
        "policy/ratio_mean",
        "",
        "mean",
        "Importance ratio that the loss uses, policy / loss.proximal: the update under way alone, "
        "unless loss.proximal is behaviour.",
    ),
    Metric("policy/ratio_max", "", "max", "Largest such ratio."),
    Metric("policy/ratio_min", "", "min", "Smallest such ratio."),
    Metric(
        "policy/clipped_low_share",
        "",
        "share",
        "Tokens with a ratio below 1 - clip_low; with policy clip, those with A < 0: no gradient.",
    ),
    Metric(
        "policy/clipped_high_share",
        "",
        "share",
        "Tokens with a ratio above 1 + clip_high; with policy clip, those with A > 0: no gradient.",
    ),
    Metric("policy/dual_clipped_share", "", "share", "Tokens with A < 0 at the dual_clip bound."),
    Metric("preference/margin_mean", "nats", "mean", "Margin of the chosen sequence, over pairs."),
    Metric("preference/right_share", "", "share", "Pairs with a margin above 0."),
    # the correction
    Metric(
        "correction/weight_mean",
        "",
        "mean",
        "Weight that the correction gives the policy term, masked tokens as 0.",
    ),
    Metric("correction/weight_max", "", "max", "Largest such weight."),
    Metric("correction/truncated_share", "", "share", "Tokens whose weight was cut to high."),
    Metric(
        "correction/masked_share",
        "",
        "share",
        "Tokens outside low .. high, or older than max_token_lag: not trained.",
    ),
    Metric(
        "correction/ess_share",
        "",
        "share",
        "Effective sample size of these weights, as a share of the trained tokens.",
    ),
    Metric("policy/entropy", "nats", "mean", "Entropy of the policy at trained tokens."),
    Metric("reference/kl_k1", "nats", "mean", "KL to the reference, estimator k1, of the loss."),
    Metric("reference/kl_k2", "nats", "mean", "KL to the reference, estimator k2, of the loss."),
    Metric("reference/kl_k3", "nats", "mean", "KL to the reference, estimator k3, of the loss."),
    # the critic
    Metric(
        "value/loss", "", "mean", "Loss of the critic's values over trained tokens, unweighted."
    ),
    Metric(
        "value/explained_variance",
        "",
        "last",
        "Share of the returns' variance that the values before the step account for; at most 1.",
    ),
    Metric(
        "value/clipped_share",
        "",
        "share",
        "Values that moved further than critic.clip towards their return: no gradient.",
    ),
    Metric("value/mean", "", "mean", "The critic's values at trained tokens."),
    Metric("value/return_mean", "", "mean", "The returns that they are trained on."),
    Metric("value/grad_norm", "", "last", "Norm of the critic's own gradient, before clipping."),
    # sampler against trainer
    *(
        row
        for room, whom in (
            ("behaviour", "all trained tokens, lag included"),
            ("mismatch", "trained tokens of the current version: numerics alone"),
        )
        for row in (
            Metric(f"{room}/kl_k1", "nats", "mean", f"KL(sampler || trainer), k1; {whom}."),
            Metric(f"{room}/kl_k3", "nats", "mean", f"KL(sampler || trainer), k3; {whom}."),
            Metric(f"{room}/gap_max", "nats", "max", f"Largest log-prob difference; {whom}."),
            Metric(f"{room}/ratio_mean", "", "mean", f"Token ratio trainer / sampler; {whom}."),
            Metric(f"{room}/ratio_max", "", "max", f"Largest token ratio; {whom}."),
            Metric(f"{room}/ratio_min", "", "min", f"Smallest token ratio; {whom}."),
            Metric(
                f"{room}/ess_share",
                "",
                "share",
                f"Effective sample size of the ratios, as a share of the tokens; {whom}.",
            ),
        )
    ),
    # the update
    Metric("train/grad_norm", "", "last", "Norm of the whole gradient, before clipping."),
    Metric("train/lr", "", "last", "Learning rate of this step."),
    Metric("train/num_updates", "", "sum", "Updates of the optimiser, train.passes of them."),
    Metric("train/num_tokens", "tokens", "sum", "Input tokens of all passes, prompts included."),
    Metric("train/num_trained_tokens", "tokens", "sum", "Tokens with a gradient of their own."),
    Metric("train/num_micro_batches", "rows", "sum", "Forward and backward passes of all rows."),
    Metric("train/forward_s", "s", "sum", "Time in forward passes."),
    Metric("train/backward_s", "s", "sum", "Time in backward passes."),
    Metric("train/optimizer_s", "s", "sum", "Time in the optimiser."),
    Metric("train/tok_per_s", "tok/s", "mean", "train/num_tokens over the time of the step."),
    # the engine
    Metric("engine/num_sampled_tokens", "tokens", "sum", "Tokens sampled during the step."),
    Metric(
        "engine/num_preemptions", "", "sum", "Sequences put back because the KV cache was full."
    ),
    Metric("engine/num_moved", "", "sum", "Responses that went on at another engine, at any time."),
    Metric("engine/num_proposed", "tokens", "sum", "Guessed tokens that the policy judged."),
    Metric("engine/num_accepted", "tokens", "sum", "Those that saved a forward pass."),
    Metric("engine/max_used_pages", "pages", "max", "Most KV cache pages in use since the start."),
    Metric(
        "engine/prefix_hit_share",
        "",
        "share",
        "Prompt tokens found in the prefix cache; a prompt counts once, however many share it.",
    ),
    # time
    Metric("time/step_s", "s", "sum", "Wall time since the step before was finished."),
    Metric("time/generate_s", "s", "sum", "Wall time with at least one prompt being played."),
    Metric("time/score_s", "s", "sum", "Wall time with at least one group being scored."),
    Metric("time/prepare_s", "s", "sum", "Wall time of advantages, selection and packing."),
    Metric("time/train_s", "s", "sum", "Wall time of the optimiser step."),
    Metric("time/sync_s", "s", "sum", "Wall time of handing the weights to the engine."),
    Metric("time/evaluate_s", "s", "sum", "Wall time of measuring held-out accuracy."),
    Metric("time/checkpoint_s", "s", "sum", "Wall time of writing checkpoints."),
    Metric("time/generate_tok_per_s", "tok/s", "mean", "Sampled tokens over time/generate_s."),
    # held-out accuracy; in a line of its own, with the step it was measured after
    Metric("eval/greedy_accuracy", "", "share", "Held-out rollouts judged right, greedy."),
    Metric("eval/sampled_accuracy", "", "share", "Held-out rollouts judged right, sampled."),
    Metric("eval/greedy_reward_mean", "", "mean", "Weighted reward, greedy."),
    Metric("eval/sampled_reward_mean", "", "mean", "Weighted reward, sampled."),
    Metric("eval/greedy_num_scored", "rollouts", "sum", "Greedy rollouts that were scored."),
    Metric("eval/sampled_num_scored", "rollouts", "sum", "Sampled rollouts that were scored."),
    Metric("eval/num_unscored", "rollouts", "sum", "Held-out rollouts without a score."),
    Metric("eval/greedy_tokens_mean", "tokens", "mean", "Response length, greedy."),
    Metric("eval/sampled_tokens_mean", "tokens", "mean", "Response length, sampled."),
    Metric("eval/truncated_share", "", "share", "Held-out rollouts cut by a limit."),
)


def find(name: str, catalog: Iterable[Metric] = CATALOG) -> Metric | None:
    """Return the row that describes a metric, or None."""
    for metric in catalog:
        if metric.name == name or ("*" in metric.name and _pattern(metric).fullmatch(name)):
            return metric
    return None


def _pattern(metric: Metric) -> re.Pattern[str]:
    return re.compile(re.escape(metric.name).replace(r"\*", ".+"))


def checked(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return plain numbers in their order, without those that are not finite.

    Raises ValueError naming every metric that the catalogue lacks, and TypeError for a value that
    is no number.
    """
    unknown = [name for name in metrics if find(name) is None]
    if unknown:
        raise ValueError(
            f"not in lagzero/observe/catalog.py: {', '.join(unknown)}; add a row for each"
        )
    plain: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"metric {name} is {value!r}, not a number") from error
        if math.isfinite(number):
            plain[name] = int(number) if number.is_integer() else number
    return plain


def schema(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Map each name to its unit, reduction and explanation."""
    rows = {name: find(name) for name in names}
    return {
        name: {"unit": row.unit, "reduction": row.reduction, "text": row.text}
        for name, row in rows.items()
        if row is not None
    }


def markdown(catalog: Iterable[Metric] = CATALOG) -> str:
    """Return the table of docs/metrics.md."""
    lines = ["| metric | unit | reduction | what it tells |", "|---|---|---|---|"]
    lines += [f"| `{m.name}` | {m.unit} | {m.reduction} | {m.text} |" for m in catalog]
    return "\n".join(lines).replace("||", r"\|\|") + "\n"
