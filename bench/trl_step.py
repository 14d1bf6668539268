"""One GRPO step of TRL's GRPOTrainer: a child of ``step.py``, run by TRL's own interpreter.

Needs trl 1.16 and torch, and nothing of lagzero.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import peers
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock:
    """Adds up seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``work`` with its seconds added up."""

        def run(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                spent = time.perf_counter() - begun
                self.seconds[name] = self.seconds.get(name, 0.0) + spent

        return run


class StepTimes(TrainerCallback):
    """Times the whole step, and the optimiser's part of it."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """The batch is there only now: generation begins inside the step."""
        self.begun = time.perf_counter()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Gradients are there and clipped."""
        self.updating = time.perf_counter()

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Weights are new; gradients are not cleared yet."""
        self.clock.seconds["optimizer"] = time.perf_counter() - self.updating

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """The step is over."""
        self.clock.seconds["step"] = time.perf_counter() - self.begun


def train(
    model: Any, tokenizer: Any, options: argparse.Namespace, prompts: int
) -> dict[str, float]:
    """Take one step on the first so many prompts; return seconds by stage, and tokens."""
    clock, tokens = Clock(), 0

    def alternate(completion_ids: list[list[int]], **_: Any) -> list[float]:
        nonlocal tokens
        tokens += sum(map(len, completion_ids))
        return [float(number % 2) for number in range(len(completion_ids))]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=alternate,
            args=settings(options, prompts, folder),
            train_dataset=Dataset.from_list(
                [
                    {"prompt": [{"role": "user", "content": question}]}
                    for question in peers.QUESTIONS[:prompts]
                ]
            ),
            callbacks=[StepTimes(clock)],
        )
        generate, backward = model.generate, trainer.accelerator.backward
        model.generate = clock.timed("generate", generate)
        trainer.accelerator.backward = clock.timed("backward", backward)
        trainer.compute_loss = clock.timed("forward", trainer.compute_loss)
        trainer.train()
        model.generate = generate
    return {**clock.seconds, "tokens": float(tokens)}


def settings(options: argparse.Namespace, prompts: int, folder: str) -> GRPOConfig:
    """Return the settings of one step, on a CPU, whose loss and optimiser are lagzero's."""
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        max_steps=1,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=prompts * options.samples // options.batch,
        num_generations=options.samples,
        max_completion_length=options.max_new_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        scale_rewards="group",
        num_iterations=1,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        gradient_checkpointing=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    """Warm up on one prompt, measure a step on all, print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True)
    parser.add_argument("--dtype", required=True, choices=("bfloat16", "float32"))
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--batch", type=int, default=8, help="sequences of one forward pass")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        options.folder, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    )
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    train(model, tokenizer, options, 1)
    times = train(model, tokenizer, options, options.prompts)
    stages = ("generate", "forward", "backward", "optimizer")
    times["prepare"] = times["step"] - sum(times[stage] for stage in stages)
    print(json.dumps({**times, "peak_gb": peers.peak_memory_gb()}))


if __name__ == "__main__":
    main()
