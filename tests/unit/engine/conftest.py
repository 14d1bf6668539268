"""Tiny random models of four families, a scripted one, and how to run an engine to its end."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lagzero.engine.engine import Engine, EngineLimits
from lagzero.engine.request import Completion, Request
from lagzero.engine.speculation import Speculation
from lagzero.native.decoder import make_native
from lagzero.numerics.attention import ATTENTION, register
from lagzero.train.model import Policy

VOCABULARY = 300  # no multiple of the sampler's block
Completions = dict[tuple[int, int], Completion]


class Words:
    """A tokenizer whose token i is the i-th text. Texts may be bytes: parts of characters."""

    def __init__(self, texts: Sequence[str | bytes] = (), special: Iterable[int] = ()):
        self.texts = texts
        self.special = frozenset(special)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        parts = [
            self.texts[i] if i < len(self.texts) else f"<{i}>"
            for i in token_ids
            if not (skip_special_tokens and i in self.special)
        ]
        data = b"".join(p if isinstance(p, bytes) else p.encode() for p in parts)
        return data.decode(errors="replace")


class Scripted:
    """A policy whose next token depends on the last one alone: logits are a row of ``table``."""

    device = torch.device("cpu")
    dtype = torch.float32
    exact = None
    native = None

    def __init__(self, table: torch.Tensor, context_limit: int = 1 << 20):
        self.table = table
        self.context_limit = context_limit

    def hidden(self, ids: torch.Tensor, position_ids: torch.Tensor, plan: object) -> torch.Tensor:
        return torch.nn.functional.one_hot(ids, self.table.shape[0]).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table[hidden.argmax(-1)]

    @classmethod
    def chain(cls, size: int = 16, context_limit: int = 1 << 20) -> Scripted:
        """Token i is nearly always followed by i + 1, with log-prob about -0.14."""
        table = torch.zeros(size, size)
        table[torch.arange(size - 1), torch.arange(1, size)] = 4.6
        return cls(table, context_limit)


def _config(family: str) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "initializer_range": 0.12,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    match family:
        case "llama":
            return LlamaForCausalLM, LlamaConfig(**sizes)
        case "qwen3":
            return Qwen3ForCausalLM, Qwen3Config(**sizes)
        case "gemma3":
            return Gemma3ForCausalLM, Gemma3TextConfig(
                sliding_window=8,
                layer_types=["sliding_attention", "full_attention"],
                query_pre_attn_scalar=16,
                **sizes,
            )
        case "gpt2":
            return GPT2LMHeadModel, GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=128,
                n_embd=64,
                n_layer=2,
                n_head=4,
                initializer_range=0.12,
                bos_token_id=1,
                eos_token_id=2,
            )
        case _:
            raise ValueError(family)


def make_model(family: str, seed: int = 0) -> tuple[Policy, Any]:
    """Return a policy under lagzero's attention and its twin under transformers' own.

    That of "<family> in C" decodes in C.
    """
    register()
    make, config = _config(family.removesuffix(" in C"))
    torch.manual_seed(seed)
    plain = (
        make._from_config(copy.copy(config), attn_implementation="sdpa")
        .eval()
        .requires_grad_(False)
    )
    module = make._from_config(config, attn_implementation=ATTENTION).eval()
    module.load_state_dict(plain.state_dict())
    policy = Policy(module.requires_grad_(False), Words())
    assert not family.endswith(" in C") or make_native(policy) is None
    return policy, plain


class Guesses:
    """Proposes what each sequence is known to sample, but for every ``wrong``-th place.

    A place with no known token gets one that is made up.
    """

    def __init__(self, known: Completions, wrong: int = 0):
        self.known = {key: done.tokens["id"].tolist() for key, done in known.items()}
        self.wrong = wrong
        self.asked: list[dict[tuple[int, int], int]] = []  # how many each time, by sequence
        self.releases = 0

    def propose(self, limits: Mapping[Any, int]) -> dict[Any, list[int]]:
        self.asked.append({(seq.request.id, seq.member): most for seq, most in limits.items()})
        return {seq: [self._guess(seq, ahead) for ahead in range(n)] for seq, n in limits.items()}

    def _guess(self, seq: Any, ahead: int) -> int:
        place, known = seq.num_new + ahead, self.known[seq.request.id, seq.member]
        right = known[place] if place < len(known) else 3
        return (right + 1) % 8 if self.wrong and (place + 1) % self.wrong == 0 else right

    def release(self) -> None:
        self.releases += 1


class Versions:
    """One model that holds the weights of version ``v % 2``, and its plain twin likewise."""

    def __init__(self, family: str, same: bool = False):
        self.policy, self.plain = make_model(family, seed=0)
        other, _ = make_model(family, seed=0 if same else 1)
        self.states = [
            {name: tensor.clone() for name, tensor in p.module.state_dict().items()}
            for p in (self.policy, other)
        ]

    def load(self, module: Any, version: int) -> None:
        with torch.no_grad():
            for name, tensor in module.state_dict().items():
                tensor.copy_(self.states[version % 2][name])

    def publish(self, engine: Engine, version: int) -> None:
        self.load(self.policy.module, version)
        engine.weights_changed(version)

    def cached_logprobs(self, asked: Request, tokens: Any) -> list[float]:
        """Transformers' own cache, one token at a time, with the weights of each token's tag."""
        past, row = None, torch.tensor([asked.prompt_ids])
        logprobs = []
        for token, version in zip(tokens["id"].tolist(), tokens["version"].tolist(), strict=True):
            self.load(self.plain, version)
            with torch.no_grad():
                out = self.plain(input_ids=row, past_key_values=past, use_cache=True)
            logprobs.append(float(out.logits[0, -1].log_softmax(-1)[token]))
            past, row = out.past_key_values, torch.tensor([[token]])
        return logprobs

    def whole_logprobs(self, asked: Request, tokens: Any) -> list[float]:
        """One pass without a cache for each version: its weights alone say what its tokens get."""
        ids, start = tokens["id"].tolist(), len(asked.prompt_ids) - 1
        logprobs = [0.0] * len(ids)
        for version in sorted(set(tokens["version"].tolist())):
            self.load(self.plain, version)
            with torch.no_grad():
                logits = self.plain(input_ids=torch.tensor([[*asked.prompt_ids, *ids]])).logits[0]
            for at in (tokens["version"] == version).nonzero()[0].tolist():
                logprobs[at] = float(logits[start + at].log_softmax(-1)[ids[at]])
        return logprobs


def drain(
    engine: Engine,
    requests: Iterable[Request] = (),
    before_step: Callable[[int], object] | None = None,
) -> Completions:
    """Run until nothing is left, checking the engine's invariants after every step.

    The last check finds no sequence, and so asserts that every page was given back.
    """
    for request in requests:
        engine.add(request)
    done: Completions = {}
    step = 0
    while engine.has_work:
        if before_step is not None:
            before_step(step)
        for completion in engine.step():
            key = completion.request_id, completion.member
            assert key not in done, f"{key} ended twice"
            done[key] = completion
        engine.check_integrity()
        step += 1
        assert step < 5000, "the engine does not come to an end"
    return done


@pytest.fixture(scope="session")
def versions_of() -> type[Versions]:
    return Versions


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that fills with the position of every id that any policy computes."""
    hidden, positions = Policy.hidden, []

    def counted(self: Policy, ids: torch.Tensor, position_ids: torch.Tensor, plan: Any) -> Any:
        positions.extend(position_ids.tolist())
        return hidden(self, ids, position_ids, plan)

    monkeypatch.setattr(Policy, "hidden", counted)
    return positions


@pytest.fixture(scope="session")
def model() -> Callable[[str], tuple[Policy, Any]]:
    """Return (policy, plain twin) of a family; nobody may change its weights."""
    return functools.cache(make_model)


@pytest.fixture(scope="session", name="drain")
def _drain() -> Callable[..., Completions]:
    return drain


@pytest.fixture(scope="session")
def guesses() -> type[Guesses]:
    return Guesses


@pytest.fixture(scope="session")
def scripted() -> type[Scripted]:
    return Scripted


@pytest.fixture(scope="session")
def words() -> type[Words]:
    return Words


@pytest.fixture(scope="session")
def engine_of() -> Callable[..., Engine]:
    """Make an engine: ``engine_of(policy, decoder, **limits)``."""

    def make(
        policy: Any,
        decoder: Any = None,
        version: int = 0,
        speculation: Speculation | None = None,
        **limits: Any,
    ) -> Engine:
        sizes = {"page_size": 8, "kv_cache_tokens": 4096, **limits}
        return Engine(policy, decoder or Words(), EngineLimits(**sizes), version, speculation)

    return make
