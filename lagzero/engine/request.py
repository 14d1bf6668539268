"""What the engine is asked for, what it keeps while it works, and what it returns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from lagzero.types import TOKEN, Array, Finish


def derive_seed(*parts: object) -> int:
    """Return a 64-bit seed that depends on every part, the same in every process and run."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    ``temperature`` 0 takes the most likely token. Truncation keeps, in this order, the ``top_k``
    most likely tokens (0: all), the smallest set with mass >= ``top_p``, and those with at least
    ``min_p`` times the highest probability. Log-probs are of the distribution that was drawn from:
    after temperature and truncation. At temperature 0, where that would be 0 for every token, they
    are of the untempered distribution.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = True  # keep the stop string in ``text``; ids always keep its last token

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value} is not {valid}"
            for name, value, ok, valid in (
                ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 0, ">= 0"),
                ("temperature", self.temperature, self.temperature >= 0, ">= 0"),
                ("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]"),
                ("top_k", self.top_k, self.top_k >= 0, ">= 0"),
                ("min_p", self.min_p, 0 <= self.min_p < 1, "in [0, 1)"),
                ("stop_strings", self.stop_strings, all(self.stop_strings), "non-empty texts"),
            )
            if not ok
        ]
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, sampled once for each seed. The members share the prompt's KV pages.

    ``begun`` is empty, or one ``TOKEN`` array [T_m] for each seed: what an earlier request with
    these seeds had sampled when it was taken back. Sampling goes on after those tokens, with the
    random numbers that follow theirs; the limit on new tokens, the stops and the completion count
    them in, as do rounds those of the present version, and each keeps the log-prob and the version
    that it came with.
    """

    id: int
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]  # 64-bit, see ``derive_seed``
    sampling: Sampling
    begun: tuple[Array, ...] = ()

    def __post_init__(self) -> None:
        if not self.seeds or not all(0 <= seed < 1 << 64 for seed in self.seeds):
            raise ValueError(f"request {self.id}: seeds {self.seeds} are not 64-bit, at least one")
        if any(token < 0 for token in self.prompt_ids):
            raise ValueError(f"request {self.id}: the prompt holds a negative token id")
        if self.begun and len(self.begun) != len(self.seeds):
            raise ValueError(
                f"request {self.id}: begun tokens for {len(self.begun)} members, but "
                f"{len(self.seeds)} seeds; give one TOKEN array a seed, or none at all"
            )
        for member, tokens in enumerate(self.begun):
            problem = _problem_of_begun(tokens, self.sampling.max_new_tokens)
            if problem is not None:
                raise ValueError(
                    f"request {self.id}: the begun tokens of member {member} {problem}"
                )


def _problem_of_begun(tokens: Array, limit: int) -> str | None:
    """Say why tokens cannot be what this policy's engine had sampled, or None if they can."""
    if tokens.dtype != TOKEN or tokens.ndim != 1:
        return f"are not a TOKEN array [T] but {tokens.dtype} {list(tokens.shape)}"
    if len(tokens) > limit:
        return f"are {len(tokens)}, more than max_new_tokens={limit}"
    for what, bad in (
        ("was not sampled by the policy (trained is False)", ~tokens["trained"]),
        ("has no log-prob that is finite and <= 0", ~(np.isfinite(tokens["logprob"]))),
        ("has no log-prob that is finite and <= 0", tokens["logprob"] > 0),
        ("has no policy version", tokens["version"] < 0),
        ("has a negative id", tokens["id"] < 0),
    ):
        if bad.any():
            return f"cannot be resumed: token {int(np.flatnonzero(bad)[0])} {what}"
    return None


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished member of a request: a ``TOKEN`` array [T] of what was sampled, and its text.

    With ``Finish.ABORT``, a request with the same prompt, seeds and sampling whose ``begun`` holds
    the tokens of every member goes on where this one was, on this engine or another.
    """

    request_id: int
    member: int
    tokens: Array
    text: str
    finish: Finish
    version: int  # policy version in force when it finished, also when no token was sampled


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's own state of one member.

    ``ids`` is prompt and sampled tokens; the first ``num_computed`` of them have keys and values in
    ``pages``. A sequence decodes when exactly one id is not computed yet.
    """

    request: Request
    member: int
    ids: list[int]
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    pages: list[int] = field(default_factory=list[int])
    num_computed: int = 0
    num_named: int = 0  # leading pages whose content is in the prefix cache
    name: bytes = b""  # chain hash of those pages
    is_counted: bool = False  # its request's prompt is in the engine's counters
    nameable: bool = True  # False once its pages hold keys of more than one policy version
    round_end: int = 0  # new tokens at which its round ends; the scheduler sets it
    followers: list[Sequence] = field(default_factory=list["Sequence"])
    group: tuple[Sequence, ...] = ()  # all members of its request, itself and ended ones included
    num_kept: int | None = None  # of the tokens proposed for it last

    @classmethod
    def all_of(cls, request: Request) -> tuple[Sequence, ...]:
        """Return the members' states before their first step here."""
        group = tuple(cls._of(request, member) for member in range(len(request.seeds)))
        for seq in group:
            seq.group = group
        return group

    @classmethod
    def _of(cls, request: Request, member: int) -> Sequence:
        seq = cls(request, member, list(request.prompt_ids))
        if request.begun:
            begun = request.begun[member]
            seq.ids += begun["id"].tolist()
            seq.logprobs += begun["logprob"].tolist()
            seq.versions += begun["version"].tolist()
        return seq

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def num_new(self) -> int:
        """Tokens sampled so far."""
        return len(self.ids) - self.num_prompt

    @property
    def num_sampled_here(self) -> int:
        """Those of them that this engine sampled."""
        begun = self.request.begun
        return self.num_new - (len(begun[self.member]) if begun else 0)

    def num_sampled_by(self, version: int) -> int:
        """Return how many of its newest tokens this policy version sampled, here or elsewhere."""
        older = (
            place for place in range(self.num_new, 0, -1) if self.versions[place - 1] != version
        )
        return self.num_new - next(older, 0)

    @property
    def num_pending(self) -> int:
        """Ids whose keys and values are not in the cache."""
        return len(self.ids) - self.num_computed
