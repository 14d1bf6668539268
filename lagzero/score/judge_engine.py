"""The embedded engine as the writer of a judge's replies."""

# transformers' own annotations are incomplete.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from lagzero.config import ModelConfig
from lagzero.engine.engine import Engine, EngineLimits
from lagzero.engine.request import Sampling, derive_seed
from lagzero.errors import ConfigError, LagzeroError
from lagzero.generate.native_backend import NativeBackend
from lagzero.runtime.local_runtime import ComputeThread
from lagzero.score.control import control_tokens
from lagzero.score.judge import Reply
from lagzero.train.model import Policy, load_policy, stop_ids
from lagzero.types import Finish

if TYPE_CHECKING:
    from lagzero.score.judge import ModelJudge


class EngineWriter:
    """Writes replies with an engine of its own, on a thread of its own."""

    def __init__(self, policy: Policy, limits: EngineLimits, sampling: Sampling, seed: int):
        self.control = control_tokens(policy.tokenizer)
        self._tokenizer: Any = policy.tokenizer
        self._sampling, self._seed = sampling, seed
        self._longest = min(policy.context_limit, limits.kv_cache_tokens)
        self._compute = ComputeThread()
        self._backend = NativeBackend(Engine(policy, policy.tokenizer, limits), self._compute)

    @classmethod
    def load(cls, of: ModelJudge) -> EngineWriter:
        """Load the model that a judge's options name. Raises ConfigError when that fails."""
        dtype = cast("Any", of.dtype)  # checked with the options
        try:
            policy = load_policy(ModelConfig(path=of.path, device=of.device, dtype=dtype))
        except LagzeroError as error:
            raise ConfigError([f"path: the judge cannot be loaded: {error}"]) from error
        policy.module.requires_grad_(False)
        most = min(of.kv_cache_tokens, of.max_running * policy.context_limit)
        if of.max_new_tokens >= min(most, policy.context_limit):
            room = min(most, policy.context_limit)
            raise ConfigError(
                [f"max_new_tokens: found {of.max_new_tokens}, but the judge holds {room} in all"]
            )
        limits = EngineLimits(max_running=of.max_running, kv_cache_tokens=most)
        sampling = Sampling(
            of.max_new_tokens,
            float(of.temperature),
            stop_ids=frozenset(stop_ids(policy.module, policy.tokenizer)),
        )
        return cls(policy, limits, sampling, of.seed)

    async def write(self, message: str, nonce: str) -> Reply:
        """Answer one message, within the judge's context."""
        ids = self._ids(message)
        room = self._longest - self._sampling.max_new_tokens
        if len(ids) > room:
            return Reply("", f"the judge would read {len(ids)} tokens, and has room for {room}")
        seeds = [derive_seed(self._seed, "judge", nonce)]
        (rollout,) = await self._backend.complete(
            tuple(ids), seeds, self._sampling, label=f"verdict {nonce}"
        )
        if rollout.finish is not Finish.STOP:
            num = len(rollout.tokens)
            return Reply(rollout.text, f"the judge's reply is cut off after {num} tokens")
        return Reply(rollout.text)

    def close(self) -> None:
        """End the thread, after what it computes now."""
        self._compute.close()

    def _ids(self, message: str) -> list[int]:
        if not self._tokenizer.chat_template:
            return list(self._tokenizer(message)["input_ids"])
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
