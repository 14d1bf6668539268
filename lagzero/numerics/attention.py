"""One attention function for transformers' own modules; a plan in the call says what it does.

The engine and the trainer run the same unmodified decoder modules. Each hands the model an
``AttentionPlan`` as a keyword of the forward call; transformers passes it down to here. The plan
knows where keys and values live (pages of a cache, or the packed row itself).

Shapes: H query heads, K key/value heads, T tokens of the flat row, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from lagzero.errors import LagzeroError

ATTENTION = "lagzero"
PLAN_KEYWORD = "attention_plan"


class AttentionPlan(Protocol):
    """How the tokens of one flat row attend."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Return [T, H, D] from query [T, H, D] and key, value [T, K, D].

        ``window`` limits a token to the last ``window`` positions, its own included.
        """
        ...


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attention_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if attention_plan is None:
        raise LagzeroError(
            f"{type(module).__name__} did not pass the attention plan on; lagzero cannot run this "
            "model, because its modules drop keywords of the forward call"
        )
    if softcap is not None or kwargs.get("s_aux") is not None:
        raise LagzeroError(
            f"{type(module).__name__} caps its attention scores or has attention sinks, which "
            "lagzero's attention does not compute"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    out = attention_plan.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale,
        sliding_window,
    )
    return out.unsqueeze(0), None


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """The plan does the masking, so transformers builds none."""


def register() -> None:
    """Make ``attn_implementation="lagzero"`` known to transformers. Safe to call again."""
    # Here, because it brings in all of transformers' modelling, which an engine may do without.
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attend)  # pyright: ignore
    AttentionMaskInterface.register(ATTENTION, _no_mask)  # pyright: ignore
