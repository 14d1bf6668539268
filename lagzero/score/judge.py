"""A language model as the judge of responses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from lagzero.score.control import without_control
from lagzero.score.gold import gold_text
from lagzero.score.judgement import Judgement, column_of, completion_text
from lagzero.score.options import is_number, is_whole, model_settings, one_of, refuse
from lagzero.score.verdict import (
    DEFAULT_TEMPLATE,
    Form,
    NoVerdict,
    instruction,
    nonce_of,
    places,
    question,
    read_verdict,
    template_text,
)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a judge wrote. ``problem``: why it is not a whole reply."""

    text: str
    problem: str = ""


class Writer(Protocol):
    """Writes a judge's replies."""

    @property
    def control(self) -> Sequence[str]:
        """Texts that structure the chat, which no quoted text may spell out."""
        ...

    async def write(self, message: str, nonce: str) -> Reply:
        """Answer one message. The same message and nonce get the same reply."""
        ...

    def close(self) -> None:
        """Let go of the model."""
        ...


class ModelJudge:
    """Reward = the number from ``min`` to ``max`` that a generative model gives a response.

    Options: ``path``, a folder or hub id of a model that the embedded engine runs; ``template``,
    a text or file with {response} and {verdict}, and whatever else the judge is shown: {prompt},
    {answer} or another column of the data; ``verdict``, the form of the reply: ``line`` or
    ``json``; ``min``, ``max``; ``max_new_tokens``, ``temperature`` and ``seed`` of its replies;
    ``max_running`` replies are written together, in ``kv_cache_tokens`` of cache; ``device`` and
    ``dtype`` as in the block ``model``.

    Quoted texts are data: each stands between tags that it cannot foresee, without control tokens,
    and the verdict is read from the judge's own words alone (``verdict.read_verdict``). A verdict
    that is missing, cut off, ambiguous or out of range makes the rollout unscorable.
    """

    def __init__(
        self,
        *,
        path: str,
        template: str = DEFAULT_TEMPLATE,
        verdict: str = "line",
        min: float = 0.0,
        max: float = 10.0,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        seed: int = 0,
        max_running: int = 32,
        kv_cache_tokens: int = 65536,
        device: str = "auto",
        dtype: str = "auto",
    ):
        one_of("verdict", verdict, "line", "json")
        one_of("dtype", dtype, "auto", "float32", "bfloat16")
        is_scale = is_number(min) and is_number(max) and min < max
        warm = is_number(temperature) and temperature >= 0
        least = "a whole number >= 1"
        refuse(
            ("min", min, is_scale, f"a number below max ({max})"),
            ("max_new_tokens", max_new_tokens, is_whole(max_new_tokens, 1), least),
            ("temperature", temperature, warm, "a number >= 0"),
            ("seed", seed, is_whole(seed, 0), "a whole number >= 0"),
            ("max_running", max_running, is_whole(max_running, 1), least),
            ("kv_cache_tokens", kv_cache_tokens, is_whole(kv_cache_tokens, 1), least),
        )
        model_settings(path)
        self.template = template_text(template)
        self.form: Form = "line" if verdict == "line" else "json"
        self.low, self.high = float(min), float(max)
        self.seed = seed
        self.path, self.device, self.dtype = path, device, dtype
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.max_running, self.kv_cache_tokens = max_running, kv_cache_tokens
        self.writer: Writer | None = None
        self._lock = threading.Lock()

    def load_model(self) -> None:
        """Load the model, unless it is there. Raises ConfigError when that cannot be done."""
        from lagzero.score.judge_engine import EngineWriter

        with self._lock:
            if self.writer is None:
                self.writer = EngineWriter.load(self)

    def close(self) -> None:
        """Let go of the model."""
        if self.writer is not None:
            self.writer.close()

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[Judgement]:
        """Return one judgement a completion; they are judged together."""
        if self.writer is None:
            await asyncio.to_thread(self.load_model)
        named = [self._texts(completions, prompts, columns, n) for n in range(len(completions))]
        return list(await asyncio.gather(*map(self._judged, named)))

    async def _judged(self, texts: Mapping[str, str]) -> Judgement:
        writer = self.writer
        assert writer is not None  # loaded by the caller
        nonce = nonce_of(self.seed, texts)
        told = instruction(self.form, self.low, self.high, nonce)
        safe = {name: without_control(text, writer.control) for name, text in texts.items()}
        reply = await writer.write(question(self.template, safe, told, nonce), nonce)
        if reply.problem:
            return Judgement(None, note=reply.problem)
        found = read_verdict(reply.text, self.form, self.low, self.high, nonce)
        if isinstance(found, NoVerdict):
            return Judgement(None, note=found.reason)
        return Judgement(found)

    def _texts(
        self,
        completions: Sequence[Any],
        prompts: Sequence[Any],
        columns: Mapping[str, Any],
        number: int,
    ) -> dict[str, str]:
        texts: dict[str, str] = {}
        for name in places(self.template):
            if name == "response":
                texts[name] = completion_text(completions[number])
            elif name == "prompt":
                texts[name] = _conversation(prompts[number])
            elif name != "verdict":
                value = column_of(columns, name, len(completions))[number]
                texts[name] = gold_text(value) or "(none)"
        return texts


def _conversation(prompt: object) -> str:
    """Return a prompt's text; of chat messages, each with its role."""
    if isinstance(prompt, str):
        return prompt
    messages = cast("Sequence[Mapping[str, str]]", prompt)
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{each['role']}: {each['content']}" for each in messages)
