"""What a model must do to run here: nothing crosses sequences, and its head is understood.

Models are compared with themselves: their own forward pass of one sequence, with their own
attention, against lagzero's pass over a packed row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from lagzero.errors import LagzeroError
from lagzero.numerics.attention import ATTENTION, PLAN_KEYWORD
from lagzero.numerics.packed import PackedPlan

if TYPE_CHECKING:
    from lagzero.train.model import Policy

T = TypeVar("T")


class _Noted:
    """A packed plan that notes which layers asked it."""

    def __init__(self, plan: PackedPlan):
        self._plan = plan
        self.layers: set[int] = set()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        self.layers.add(layer)
        return self._plan.attend(layer, query, key, value, scale, window)


@torch.no_grad()
def check_model(policy: Policy) -> None:
    """Compare a short packed row with the model's own forward of each sequence alone.

    The row holds a sequence, and a prompt with two responses. Raises LagzeroError for a model
    whose layers keep a state or attend past lagzero's plan, and as ``check_head`` does.
    """
    num = min(max(policy.context_limit // 2, 1), 5)
    size = policy.module.get_input_embeddings().weight.shape[0]
    parts = torch.arange(4 * num, device=policy.device).view(4, num) * 7919 % size
    positions = np.tile(np.arange(num), 4) + np.repeat([0, 0, num, num], num)
    noted = _Noted(
        PackedPlan(positions, np.repeat(range(4), num), np.array([-1, -1, 1, 1]), policy.device)
    )
    at = torch.as_tensor(positions, device=policy.device)
    row = _explained(policy, lambda: policy.hidden(parts.flatten(), at, noted))
    num_layers = getattr(policy.module.config.get_text_config(), "num_hidden_layers", 1)
    if len(noted.layers) < num_layers:
        raise _refusal(
            policy,
            f"only {len(noted.layers)} of its {num_layers} layers use lagzero's attention; the "
            "others would run over from one sequence into the next",
        )
    alone, prompt, *responses = row.view(4, num, -1)
    ours = [alone, *(torch.cat([prompt, response]) for response in responses)]
    ids = [parts[0], *(torch.cat([parts[1], response]) for response in parts[2:])]
    theirs = _explained(policy, lambda: _own_hidden(policy, ids))
    gap = _relative_gap(torch.cat(ours), torch.cat(theirs))
    if not gap <= _tolerance(policy.dtype):
        raise _refusal(
            policy,
            f"in a packed row its hidden states differ by {gap:.2g} of their size from those of "
            "each sequence alone: its layers mix sequences, or attend as lagzero does not",
        )
    check_head(policy)


def _tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative gap that may be rounding.

    Both passes round after each of some hundred operations, in another order: SmolLM2's 30 layers
    come to 15 spacings in float32 and 6 in bfloat16. The margin for deeper models is wide in
    float32 (6e-5), which finds any mixing; in bfloat16 (0.125) only gross mixing stands out.
    """
    return (512 if dtype == torch.float32 else 16) * torch.finfo(dtype).eps


def _relative_gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest |ours - theirs| / |theirs| of a token's hidden state, from [N, D]."""
    squares = (ours - theirs).double().square().sum(-1), theirs.double().square().sum(-1)
    return float((squares[0] / squares[1].clamp(min=1e-30)).max()) ** 0.5


def _own_hidden(policy: Policy, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return hidden states [N, D] of each sequence [N] alone, by the model's own attention."""
    policy.module.set_attn_implementation("eager")
    try:
        base = policy.module.base_model
        return [base(input_ids=s[None], use_cache=False).last_hidden_state[0] for s in sequences]
    finally:
        policy.module.set_attn_implementation(ATTENTION)


def _explained(policy: Policy, run: Callable[[], T]) -> T:
    """Run a forward pass; what a model's code raises there is no fault of the user's."""
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise _refusal(policy, f"it fails on a packed row ({type(e).__name__}: {e})") from e


def _refusal(policy: Policy, reason: str) -> LagzeroError:
    return LagzeroError(
        f"model.path: {type(policy.module).__name__} cannot be trained: {reason}. Use a model "
        "whose layers are all attention, such as Llama, Qwen3 or Gemma 3"
    )


@torch.no_grad()
def check_head(policy: Policy) -> None:
    """Compare lagzero's logits of a short row with the model's own forward.

    Raises LagzeroError when they differ: the model then does something to its hidden states or
    logits that lagzero does not know of, and every log-prob would be wrong.
    """
    num = min(4, policy.context_limit)
    places = np.arange(num, dtype=np.int32)
    plan = PackedPlan(places, np.zeros_like(places), np.array([-1], np.int32), policy.device)
    at = torch.as_tensor(places, device=policy.device).long()
    ours = policy.logits(policy.hidden(at, at, plan))
    theirs = policy.module(
        input_ids=at[None],
        position_ids=at[None],
        use_cache=False,
        **{PLAN_KEYWORD: plan},
    ).logits[0]
    spacing = torch.finfo(policy.dtype).eps  # a head in the model's type may round each step
    if not torch.allclose(ours, theirs.to(ours.dtype), rtol=8 * spacing, atol=8 * spacing):
        raise LagzeroError(
            f"{type(policy.module).__name__} turns hidden states into logits in a way that lagzero "
            f"does not know (largest difference {float((ours - theirs).abs().max()):.3g}); it "
            "cannot be trained"
        )
