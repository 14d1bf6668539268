"""Combinations of settings that cannot work, each with its remedy.

A value by itself is checked by its type in ``config``.

A problem starts with the path to change. A note is worth a line on the screen and stops nothing.
Files are looked up relative to the working directory; no model and no torch is loaded. The
objective has a file of its own, ``config_check_loss``. What a source, a reward or the schedule
needs is checked by their rooms (``data.source``, ``score.load``, ``schedule.check``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lagzero.config import Config, LoraConfig, SourceConfig
from lagzero.config_check_advantage import (
    advantage_notes,
    advantage_problems,
    optimizer_notes,
    optimizer_problems,
)
from lagzero.config_check_loss import loss_notes, loss_problems
from lagzero.config_engine import SpeculateConfig
from lagzero.config_files import chat_template_text, looks_like_path
from lagzero.errors import ConfigError


def check(config: Config, *, training: bool = True) -> list[str]:
    """Return every combination that cannot work, one line each; empty when all is well.

    ``training`` False leaves out what only concerns training, for a run that measures alone.
    """
    always = [
        *_model(config),
        *_data(config),
        *_rollout(config),
        *_engine(config),
        *_products(config),
        *_speculate(config.engine.speculate),
    ]
    if not training:
        return [*always, *_measuring(config)]
    return [
        *always,
        *_evaluation(config),
        *_types(config),
        *_sampling(config),
        *_score(config),
        *advantage_problems(config),
        *loss_problems(config),
        *_rounded_weights(config),
        *_optimizer(config),
    ]


def notes(config: Config, *, training: bool = True) -> list[str]:
    """Return what is allowed but may surprise, one line each."""
    always = [
        *_lora_notes(config),
        *_eval_notes(config),
        *_speculate_notes(config.engine.speculate),
    ]
    if not training:
        return always
    return [
        *always,
        *_exact_notes(config),
        *_notes(config),
        *advantage_notes(config),
        *loss_notes(config),
    ]


def _model(config: Config) -> Iterator[str]:
    model = config.model
    for name, path in (("path", model.path), ("reference", model.reference)):
        if path is not None and looks_like_path(path) and not Path(path).is_dir():
            yield f"model.{name}: there is no folder {path}; give a model folder or a hub id"
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", model.device):
        yield f"model.device: found '{model.device}'; valid: auto, cpu, cuda or cuda:<number>"
    if model.chat_template is not None:
        try:
            chat_template_text(model.chat_template)
        except ConfigError as error:
            yield from error.problems
    if model.system_prompt is not None and not config.data.chat:
        yield (
            "model.system_prompt: text that is not rendered as chat has no place for one; set it "
            "to null, or data.chat: true"
        )
    lora = model.lora
    if lora is None:
        return
    if lora.targets == []:
        yield "model.lora.targets: an empty list adapts nothing; use all-linear or name layers"
    if lora.start is not None and not (Path(lora.start) / "adapter_config.json").is_file():
        yield (
            f"model.lora.start: {lora.start} is not a PEFT folder (no adapter_config.json there); "
            "give one, or null for a new adapter"
        )


def _data(config: Config) -> Iterator[str]:
    for e, held_out in enumerate(config.data.eval):
        for t, trained in enumerate(config.data.train):
            if _same_rows(held_out, trained):
                yield (
                    f"data.eval.{e}: reads the same rows as data.train.{t}, so nothing is held "
                    "out; give it another split, file or options"
                )
    for name in ("prompt_column", "answer_column", "id_column"):
        if getattr(config.data, name) == "":
            yield f"data.{name}: an empty name; give the column's name"


def _measuring(config: Config) -> Iterator[str]:
    if not config.data.eval:
        yield "data.eval: empty; add the held-out prompts to measure with"


def _evaluation(config: Config) -> Iterator[str]:
    wanted = [name for name in ("before", "after") if getattr(config.eval, name)]
    wanted += ["every"] if config.eval.every else []
    if wanted and not config.data.eval:
        off = ", ".join(f"eval.{n}: {'0' if n == 'every' else 'false'}" for n in wanted)
        yield f"data.eval: empty, but eval asks for it; add held-out prompts, or set {off}"


def _same_rows(one: SourceConfig, other: SourceConfig) -> bool:
    return one.model_copy(update={"size": None}) == other.model_copy(update={"size": None})


def _rollout(config: Config) -> Iterator[str]:
    for index, stop in enumerate(config.rollout.stop):
        if not stop:
            yield f"rollout.stop.{index}: an empty stop string ends every response; remove it"


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.temperature == 0:
        yield (
            "rollout.temperature: 0 makes every member of a group the same; use a value > 0, for "
            "example 1.0 (greedy accuracy is measured by eval anyway)"
        )
    for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        value = getattr(rollout, name)
        if value != off:
            yield (
                f"rollout.{name}: {value:g} cuts the sampled distribution while the trainer scores "
                "the full vocabulary, so an unchanged policy would have ratios below 1; "
                f"set {name}: {off:g} (temperature may be lowered instead)"
            )


def _engine(config: Config) -> Iterator[str]:
    engine, longest = config.engine, _longest_sequence(config)
    if config.model.numerics == "exact" and engine.dtype not in ("same", config.model.dtype):
        yield (
            f"engine.dtype: {engine.dtype} gives the engine other weights than the trainer "
            f"(model.dtype {config.model.dtype}), so model.numerics: exact cannot hold; set "
            "engine.dtype: same"
        )
    if config.model.numerics == "exact" and engine.weights != "same":
        yield (
            f"engine.weights: {engine.weights} gives the engine other products than the trainer, "
            "so model.numerics: exact cannot hold; set engine.weights: same, or model.numerics: "
            "fast with train.rounded_weights: true"
        )
    if engine.kv_cache_tokens is None:
        return
    pages = engine.kv_cache_tokens // engine.page_size
    if pages * engine.page_size < longest:
        least = -(-longest // engine.page_size) * engine.page_size
        yield (
            f"engine.kv_cache_tokens: {engine.kv_cache_tokens} in pages of {engine.page_size} "
            f"cannot hold one full sequence (prompt + rollout.max_new_tokens = {longest}); "
            f"use at least {least}, or null to size it from free memory"
        )


def _speculate(speculate: SpeculateConfig) -> Iterator[str]:
    path = speculate.path
    if speculate.kind == "draft" and path is None:
        yield (
            "engine.speculate.path: missing; kind draft guesses with a model of its own; give a "
            "folder or hub id with the policy's tokenizer, or set kind: ngram"
        )
    if path is not None and looks_like_path(path) and not Path(path).is_dir():
        yield (f"engine.speculate.path: there is no folder {path}; give a model folder or a hub id")


def _speculate_notes(speculate: SpeculateConfig) -> Iterator[str]:
    used = {
        "none": (),
        "ngram": ("tokens", "max_running", "match"),
        "draft": ("tokens", "max_running", "path"),
    }
    for name, value in SpeculateConfig():
        acts = name in ("kind", *used[speculate.kind])
        if not acts and getattr(speculate, name) != value:
            yield f"engine.speculate.{name}: not used while kind is {speculate.kind}"


def _longest_sequence(config: Config) -> int:
    return (config.data.max_prompt_tokens or 1) + config.rollout.max_new_tokens


def _score(config: Config) -> Iterator[str]:
    distils = config.model.reference is not None and config.loss.kl.coefficient > 0
    if all(reward.weight == 0 for reward in config.score.rewards) and not distils:
        yield (
            "score.rewards: every weight is 0, so there is nothing to learn; give one a weight, or "
            "name a teacher (model.reference, with loss.kl.coefficient above 0)"
        )


def _products(config: Config) -> Iterator[str]:
    """What trainer and engine would not both compute by 16-bit integers."""
    model, engine = config.model, config.engine
    if model.products == "same":
        return
    others = (
        (model.numerics == "fast", "model.numerics: fast", "exact or auto"),
        (model.lora is not None, "model.lora", "null"),
        (engine.decoder == "torch", "engine.decoder: torch", "auto"),
        (engine.dtype not in ("same", model.dtype), f"engine.dtype: {engine.dtype}", "same"),
        (engine.weights != "same", f"engine.weights: {engine.weights}", "same"),
        (model.device.startswith("cuda"), f"model.device: {model.device}", "cpu"),
    )
    for asked, what, instead in others:
        if asked:
            yield (
                f"model.products: {model.products} multiplies in C, in trainer and engine alike, "
                f"which {what} does not; set {what.split(':')[0]}: {instead}, or model.products: "
                "same"
            )


def _rounded_weights(config: Config) -> Iterator[str]:
    if config.train.rounded_weights and config.engine.weights == "same":
        yield (
            "train.rounded_weights: true rounds as engine.weights does, which is same: nothing is "
            "rounded; set it to false, or engine.weights to int8 or fp8"
        )


def _optimizer(config: Config) -> Iterator[str]:
    yield from optimizer_problems("train.optimizer", config.train.optimizer)


def _notes(config: Config) -> Iterator[str]:
    longest, budget = _longest_sequence(config), config.train.micro_batch_tokens
    if budget < longest:
        yield (
            f"train.micro_batch_tokens: {budget} is below the longest sequence ({longest}); "
            "such a sequence gets a row by itself, which needs the memory of its own length"
        )
    yield from optimizer_notes("train.optimizer", config.train.optimizer, config.schedule.steps)


def _exact_notes(config: Config) -> Iterator[str]:
    runs_ahead = config.schedule.max_lag > 0 and config.staleness.preset is None
    if config.model.numerics == "exact" and runs_ahead and config.engine.kv_on_update == "keep":
        yield (
            "engine.kv_on_update: keep lets a response go on with keys of older weights, which no "
            "numerics can repeat in training; with recompute its new tokens stay exact"
        )


def _types(config: Config) -> Iterator[str]:
    if config.model.dtype == "float16":
        yield (
            "model.dtype: float16 is not trained in: gradients below 6e-8 become 0 in it, and no "
            "loss scaling keeps them above; set bfloat16 or float32 (engine.dtype: float16 lets "
            "the engine alone compute in it)"
        )


def _lora_notes(config: Config) -> Iterator[str]:
    lora, untouched = config.model.lora, LoraConfig()
    if lora is None:
        return
    if lora.start is None:
        if lora.reference != untouched.reference:
            yield "model.lora.reference: a new adapter starts as the base model: both are the same"
        return
    for name in ("rank", "alpha", "targets"):
        if getattr(lora, name) != getattr(untouched, name):
            yield f"model.lora.{name}: not used; the adapter in model.lora.start has its own"


def _eval_notes(config: Config) -> Iterator[str]:
    sizes = [source.size for source in config.data.eval]
    if config.data.eval and all(size is not None for size in sizes):
        total = sum(size or 0 for size in sizes)
        if total < config.eval.num_prompts:
            yield f"eval.num_prompts: {config.eval.num_prompts}, but data.eval has {total} at most"
