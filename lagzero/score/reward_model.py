"""A reward model: a sequence classifier with one label, whose logit is the reward."""

# transformers' own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lagzero.errors import ConfigError, LagzeroError
from lagzero.score.control import control_tokens, without_control
from lagzero.score.judgement import Judgement, completion_text
from lagzero.score.options import (
    is_number,
    is_switch,
    is_whole,
    model_settings,
    one_of,
    refuse,
)

if TYPE_CHECKING:
    import torch

TRANSFORMERS_LABELS = 2  # of a configuration that does not say


class RewardModel:
    """Reward = scale * logit + shift, of a prompt and its response under a reward model.

    Options: ``path``, a folder or hub id of a transformers sequence classifier with one label, used
    with its own tokenizer; ``template``: ``chat`` renders both with the tokenizer's chat template,
    ``plain`` joins their texts; ``max_tokens`` of prompt and response together (by default what the
    model was made for); ``truncate: true`` cuts what is longer at its start, which otherwise is
    unscorable; ``batch_size`` sequences are computed together; ``scale``, ``shift``; ``device``
    and ``dtype`` as in the block ``model``.

    A logit that is not finite makes the rollout unscorable. One call computes at a time.
    """

    def __init__(
        self,
        *,
        path: str,
        template: str = "chat",
        max_tokens: int | None = None,
        truncate: bool = False,
        batch_size: int = 8,
        scale: float = 1.0,
        shift: float = 0.0,
        device: str = "auto",
        dtype: str = "auto",
    ):
        one_of("template", template, "chat", "plain")
        one_of("dtype", dtype, "auto", "float32", "bfloat16")
        has_limit = max_tokens is None or is_whole(max_tokens, 1)
        refuse(
            ("max_tokens", max_tokens, has_limit, "a whole number >= 1, or null"),
            ("truncate", truncate, is_switch(truncate), "true or false"),
            ("batch_size", batch_size, is_whole(batch_size, 1), "a whole number >= 1"),
            ("scale", scale, is_number(scale) and scale != 0, "a number, not 0"),
            ("shift", shift, is_number(shift), "a number"),
        )
        settings = model_settings(path)
        if settings is not None:
            _check_labels(path, _labels(settings))
        self.path, self.template, self.max_tokens = path, template, max_tokens
        self.truncate, self.batch_size = truncate, batch_size
        self.scale, self.shift = scale, shift
        self.device, self.dtype = device, dtype
        self._lock = threading.Lock()
        self._loaded: _Loaded | None = None

    def load_model(self) -> None:
        """Load the model, unless it is there. Raises ConfigError when it is no reward model."""
        with self._lock:
            self._model()

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[Judgement]:
        """Return one judgement a completion."""
        with self._lock:
            model = self._model()
            rows = [
                model.encode(self._text(model, prompt, completion_text(reply)), self.template)
                for prompt, reply in zip(prompts, completions, strict=True)
            ]
            limit = model.limit
            kept = [row[-limit:] if self.truncate else row for row in rows]
            fitting = [n for n, row in enumerate(kept) if 0 < len(row) <= limit]
            logits = model.logits([kept[n] for n in fitting], self.batch_size)
        found = dict(zip(fitting, logits, strict=True))
        return [self._judgement(found.get(n), len(row), limit) for n, row in enumerate(rows)]

    def _judgement(self, logit: float | None, num_tokens: int, limit: int) -> Judgement:
        if logit is None:
            return Judgement(None, note=f"{num_tokens} tokens; the reward model takes 1 to {limit}")
        value = self.scale * logit + self.shift
        if not math.isfinite(value):
            return Judgement(None, note=f"the reward model gave {logit}")
        is_cut = num_tokens > limit
        note = f"cut from {num_tokens} tokens to the last {limit}" if is_cut else ""
        return Judgement(value, {"cut": float(is_cut)} if self.truncate else {}, note)

    def _text(self, model: _Loaded, prompt: Any, reply: str) -> str:
        reply = without_control(reply, model.control)
        if self.template == "plain":
            if not isinstance(prompt, str):
                raise TypeError("template plain joins texts, and this prompt is chat messages")
            return without_control(prompt, model.control) + reply
        turns: list[Mapping[str, str]] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        )
        messages = [
            {**turn, "content": without_control(turn["content"], model.control)} for turn in turns
        ]
        return model.tokenizer.apply_chat_template(
            [*messages, {"role": "assistant", "content": reply}],
            tokenize=False,
            add_generation_prompt=False,
        )

    def _model(self) -> _Loaded:
        if self._loaded is None:
            self._loaded = _load(self)
        return self._loaded


@dataclass(slots=True)
class _Loaded:
    module: Any
    tokenizer: Any
    limit: int  # tokens
    control: tuple[str, ...]

    def encode(self, text: str, template: str) -> list[int]:
        """Return token ids; a chat template writes its own special tokens."""
        return list(self.tokenizer(text, add_special_tokens=template == "plain")["input_ids"])

    def logits(self, rows: Sequence[Sequence[int]], batch_size: int) -> list[float]:
        """Return each row's logit, in order; rows of like length are computed together."""
        order = sorted(range(len(rows)), key=lambda n: len(rows[n]))
        out = [math.nan] * len(rows)
        for start in range(0, len(rows), batch_size):
            batch = order[start : start + batch_size]
            for n, logit in zip(batch, self._batch([rows[n] for n in batch]), strict=True):
                out[n] = logit
        return out

    def _batch(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch

        # Classifiers read the last token that is no padding. One without a padding token of its own
        # reads the last of all, so its padding is a token that these rows do not hold.
        settings = self.module.config.get_text_config()
        own = settings.pad_token_id
        held = {token for row in rows for token in row}
        pad = next(n for n in range(len(held) + 1) if n not in held) if own is None else own
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), pad, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for n, row in enumerate(rows):
            ids[n, : len(row)] = torch.tensor(row)
            mask[n, : len(row)] = 1
        settings.pad_token_id = pad
        try:
            with torch.inference_mode():
                logits: torch.Tensor = self.module(
                    input_ids=ids.to(self.module.device), attention_mask=mask.to(self.module.device)
                ).logits
        finally:
            settings.pad_token_id = own
        return logits[:, 0].float().tolist()


def _load(of: RewardModel) -> _Loaded:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    from lagzero.numerics.precision import pick_dtype
    from lagzero.train.model import pick_device

    try:
        device = pick_device(of.device)
    except LagzeroError as error:
        raise ConfigError([f"device: {error}"]) from error
    try:
        settings: Any = AutoConfig.from_pretrained(of.path)
        _check_labels(of.path, settings.num_labels)
        tokenizer: Any = AutoTokenizer.from_pretrained(of.path)
        module, report = AutoModelForSequenceClassification.from_pretrained(
            of.path, dtype=pick_dtype(of.dtype, device), output_loading_info=True
        )
    except (OSError, ValueError, ImportError) as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        problem = f"path: {of.path} could not be loaded as a sequence classifier with its tokenizer"
        raise ConfigError([f"{problem}: {words[0]}"]) from error
    if missing := sorted(report["missing_keys"]):
        problem = (
            f"path: {of.path} lacks the weights {', '.join(missing[:5])}, which would be random"
        )
        raise ConfigError([f"{problem}; give a model that was trained as a reward model"])
    if of.template == "chat" and not tokenizer.chat_template:
        problem = "template: the reward model's tokenizer has no chat template; set it to plain"
        raise ConfigError([problem])
    most = getattr(settings.get_text_config(), "max_position_embeddings", None) or 1 << 30
    if of.max_tokens is not None and of.max_tokens > most:
        raise ConfigError([f"max_tokens: found {of.max_tokens}; valid: 1 to {most}, of {of.path}"])
    module.to(device).eval().requires_grad_(False)
    return _Loaded(module, tokenizer, of.max_tokens or most, control_tokens(tokenizer))


def _labels(settings: Mapping[str, Any]) -> int:
    if isinstance(labels := settings.get("id2label"), dict):
        return len(labels)
    return int(settings.get("num_labels", TRANSFORMERS_LABELS))


def _check_labels(path: str, num_labels: int) -> None:
    if num_labels != 1:
        raise ConfigError(
            [
                f"path: {path} has {num_labels} labels; a reward model is a sequence classifier "
                "with exactly 1 (num_labels: 1)"
            ]
        )
