"""Low-rank adapters on the linear layers, in PEFT's format. They are never merged into the base."""

# transformers' and PEFT's own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lagzero.config import LoraConfig
from lagzero.errors import LagzeroError
from lagzero.train.model import Policy, ReferenceScope

if TYPE_CHECKING:
    import peft

_TRAINED, _START = "default", "start"


def add_lora(policy: Policy, config: LoraConfig, seed: int = 0) -> Policy:
    """Return the policy with adapters in its linear layers; only they are trainable.

    Each targeted layer computes base(x) + (alpha / rank) B A x. Adapters are float32 whatever the
    base's type, so that small updates survive, and base and adapter are always applied apart:
    merging in a small type would round both. Fresh adapters have B = 0, A drawn from ``seed``.

    Changes the policy's module in place. Raises LagzeroError for a folder that holds no adapter,
    for one that does not fit the model, and for targets that name no layer.
    Source: Hu et al. 2021.
    """
    import peft  # a second of imports that nobody else needs

    if policy.adapter is not None:
        raise ValueError("the policy has an adapter already")
    try:
        if config.start is not None:
            folder = _adapter_folder(config.start)
            adapter = peft.PeftModel.from_pretrained(policy.module, folder, is_trainable=True)
        else:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                adapter = peft.get_peft_model(policy.module, _peft_config(config))
    except (ValueError, RuntimeError, OSError) as error:
        raise LagzeroError(
            f"model.lora: the adapter does not fit {type(policy.module).__name__}: {error}"
        ) from error
    adapter.eval()
    out = replace(policy, adapter=adapter)
    if not out.trainable():
        raise LagzeroError("model.lora: no parameter of the adapter is trainable")
    return out


def lora_reference(policy: Policy, config: LoraConfig) -> ReferenceScope:
    """Return the reference policy of a run that trains adapters; it costs no second model.

    ``base`` switches the adapters off. ``start`` is a frozen copy of the adapter that training
    started from, so that the divergence is 0 at first; a fresh adapter's start is the base. The
    copy is loaded here, beside the trained adapter in the policy's module.
    """
    adapter = policy.adapter
    if adapter is None:
        raise ValueError("the policy has no adapter")

    @contextmanager
    def base() -> Generator[Policy]:
        with adapter.disable_adapter():
            yield policy

    @contextmanager
    def start() -> Generator[Policy]:
        adapter.base_model.set_adapter(_START, inference_mode=True)
        try:
            yield policy
        finally:
            adapter.base_model.set_adapter(_TRAINED)

    if config.start is None or config.reference == "base":
        return base
    adapter.load_adapter(_adapter_folder(config.start), _START, is_trainable=False)
    adapter.eval()
    return start


def _adapter_folder(start: str) -> str:
    folder = Path(start)
    if not (folder / "adapter_config.json").is_file():
        raise LagzeroError(f"model.lora.start: {start!r} is no folder with an adapter_config.json")
    return str(folder)


def _peft_config(config: LoraConfig) -> peft.LoraConfig:
    import peft

    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]  a float works as well
        target_modules=config.targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
