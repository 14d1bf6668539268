"""Objectives on pairs of sequences of which one is preferred."""

# torch's own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lagzero.losses.inputs import LossInputs
from lagzero.losses.policy import PolicyTerm


def dpo_loss(logprobs: Tensor, inputs: LossInputs, beta: float) -> PolicyTerm:
    """Return the preference loss of each group's pair: chosen A = +1, rejected A = -1.

    With L and R the log-probs of policy and reference, summed over a sequence's trained tokens::

        margin = beta ((L_chosen - R_chosen) - (L_rejected - R_rejected))
        loss   = -log sigmoid(margin)

    Every token of both sequences repeats its pair's loss, so ``sequence_mean`` reduction gives the
    mean over pairs. Since both signs are in A, margin = beta sum_n A_n (l_n - r_n) over the pair.

    Args:
        logprobs: [N] nats, with gradient.
        inputs: with reference log-probs and groups; both sequences of a pair are in the same
            inputs.
        beta: > 0, nats^-1: how far a preference may move the policy from the reference.

    Raises ValueError without reference or groups, and for a group that is no such pair.
    Source: Rafailov et al. 2023, arXiv:2305.18290.
    """
    reference, groups = inputs.reference_logprobs, inputs.groups
    if reference is None or groups is None:
        missing = "reference log-probs" if reference is None else "groups"
        raise ValueError(f"the preference loss needs {missing}, and the batch has none")
    signs = inputs.advantages.to(logprobs.dtype)
    pairs, places = torch.unique(groups, return_inverse=True)
    _check_pairs(pairs, places, inputs.sequences, signs)
    moved = signs * (logprobs - reference.detach().to(logprobs.dtype))
    margins = beta * logprobs.new_zeros(len(pairs)).index_add(0, places, moved)
    losses = -logsigmoid(margins)
    margins = margins.detach()
    return PolicyTerm(
        losses[places],
        {
            "policy/loss": (losses.detach(), "mean"),
            "preference/margin_mean": (margins, "mean"),
            "preference/right_share": ((margins > 0).to(margins.dtype), "mean"),
        },
    )


def _check_pairs(pairs: Tensor, places: Tensor, sequences: Tensor, signs: Tensor) -> None:
    """Refuse groups that are not one sequence with A = +1 and one with A = -1."""
    members = torch.unique(torch.stack([places.to(signs.dtype), sequences, signs]), dim=1)
    group, sign = members[0].long(), members[2]
    size = torch.bincount(group, minlength=len(pairs))
    balance = torch.zeros_like(pairs, dtype=signs.dtype).index_add(0, group, sign)
    wrong = (size != 2) | (balance != 0)
    wrong[group[sign.abs() != 1]] = True
    if wrong.any():
        raise ValueError(
            f"group {int(pairs[wrong][0])} of the step is no pair: it must have one sequence with "
            "advantage 1 and one with advantage -1, in the same row"
        )
