"""From configuration to objects."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lagzero import build
from lagzero import build_serving as serving_room
from lagzero.build_serving import build_serving
from lagzero.config import Config
from lagzero.config_load import parse_config
from lagzero.engine.request import Request, Sampling
from lagzero.errors import LagzeroError
from lagzero.native import decoder as native_room
from lagzero.numerics.packed import PackedPlan
from lagzero.runtime.local_runtime import ComputeThread
from lagzero.train.critic import ActorCritic
from lagzero.train.model import save_policy
from lagzero.types import Sample, sampled_tokens


def config(**sections: Any) -> Config:
    return parse_config(
        {
            "data": {"train": [{"kind": "arithmetic"}]},
            "score": {"rewards": [{"use": "number_answer"}]},
            "eval": {"before": False, "after": False},
            **sections,
        }
    )


class Small:
    """What the size of a cache depends on: 1 layer of 2 heads of 8, in float32."""

    device = torch.device("cpu")
    dtype = torch.float32
    exact = None
    native = None
    context_limit = 1000

    def hidden(self, ids, position_ids, plan):
        state = torch.zeros(len(ids), 2, 8)
        return plan.attend(0, state, state, state, 1.0, None)


@pytest.mark.parametrize(
    ("free", "expected"), [(128 * 640, 320), (0, 16), (1 << 40, 4 * Small.context_limit)]
)
def test_the_cache_takes_its_share_of_what_is_free_and_no_more_than_is_useful(
    free: int, expected: int, monkeypatch: pytest.MonkeyPatch
):
    """A token takes 2 * 2 * 8 * 4 = 128 bytes; at least one page, at most every slot's context."""
    monkeypatch.setattr(serving_room, "free_bytes", lambda device: free)
    sizes = config(engine={"kv_cache_share": 0.5, "max_running": 4, "page_size": 16})
    limits = serving_room._engine_limits(sizes, Small())
    assert (limits.kv_cache_tokens, limits.kv_reserve) == (expected, False)
    sizes = config(engine={"kv_reserve": True})
    assert serving_room._engine_limits(sizes, Small()).kv_reserve


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model that plain transformers wrote."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
    )
    model.save_pretrained(tmp_path / "model")
    vocabulary = {f"w{i}": i for i in range(11)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    ).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("reference", ["start", "base"])
def test_an_engine_of_another_type_takes_adapters_and_not_the_reference(
    reference: str, folder: Path
):
    """The first update brings all weights; the next one the adapters, which alone can change."""
    lora = {"rank": 2, "start": str(folder.parent / "start"), "reference": reference}
    fresh = config(model={"path": str(folder), "dtype": "float32", "lora": {"rank": 2}})
    save_policy(build.build_policy(fresh), folder.parent / "start")
    chosen = config(
        model={"path": str(folder), "dtype": "float32", "lora": lora},
        engine={"dtype": "bfloat16", "kv_cache_tokens": 1024},
        loss={"kl": {"coefficient": 0.1}},
    )
    compute = ComputeThread()
    try:
        policy = build.build_policy(chosen)
        serving = build_serving(chosen, policy, compute, print)
        build.build_training(chosen, policy, compute)
        engine = serving.backend.engine
        for version in (1, 2):
            with torch.no_grad():
                for weight in policy.weights().values():
                    weight.fill_(version)
            asyncio.run(serving.link.publish(version))
            for name, weight in engine.policy.weights().items():
                expected = version if "lora_" in name else 1
                assert set(weight.flatten().tolist()) == {expected}, name
    finally:
        compute.close()
    assert engine.version == 2


@pytest.mark.parametrize(
    ("loss", "named", "wanted"),
    [
        ({}, True, None),
        ({"kl": {"coefficient": 0.1}}, False, "policy"),
        ({"kl": {"coefficient": 0.1}}, True, "other"),
        ({"policy": "dpo", "reduction": "sequence_mean"}, True, "other"),
    ],
)
def test_the_reference_is_kept_where_something_is_measured_against_it(
    loss: dict[str, Any], named: bool, wanted: str | None, folder: Path
):
    """The policy as it started, or the model that is named, whose head is all zeros here."""
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    other = folder.parent / "other"
    model.save_pretrained(other)
    build.build_policy(config(model={"path": str(folder)})).tokenizer.save_pretrained(other)
    reference = str(other) if named else None
    chosen = config(
        model={"path": str(folder), "dtype": "float32", "reference": reference}, loss=loss
    )
    compute = ComputeThread()
    try:
        training = build.build_training(chosen, build.build_policy(chosen), compute)
    finally:
        compute.close()
    assert (training.preparer.reference_logprobs is None) == (wanted is None)
    if wanted is None:
        return
    tokens = sampled_tokens([1, 2], [-1.0, -1.0], [0, 0])
    (logprobs,) = training.trainer.reference_logprobs(
        [Sample(0, 0, (3, 4), tokens, np.zeros(2), 0.0)]
    )
    assert (wanted == "other") == np.allclose(logprobs, -np.log(11), atol=1e-7)


PPO: dict[str, Any] = {"estimator": "gae", "normalize_std": False}


def trained(chosen: Config) -> build.Training:
    compute = ComputeThread()
    try:
        return build.build_training(chosen, build.build_policy(chosen), compute)
    finally:
        compute.close()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_critic_of_its_own_doubles_what_is_trained_and_a_shared_one_adds_a_head(
    folder: Path, shared: bool, lora: dict[str, int] | None
):
    model = {"path": str(folder), "dtype": "float32", "lora": lora}
    training = trained(config(model=model, advantage=PPO, critic={"shared": shared}))
    assert training.preparer.values is not None
    tensors, _ = training.trainer.state_dict()
    policy = {n.removeprefix("weight.") for n in tensors if n.startswith("weight.")}
    critic = {n.removeprefix("critic.weight.") for n in tensors if n.startswith("critic.weight.")}
    assert {"head.weight", "head.bias"} <= critic
    trunk = {n.removeprefix("trunk.") for n in critic if n.startswith("trunk.")}
    body = {n.removeprefix("model.") for n in policy if n.startswith("model.")}
    assert trunk == (set() if shared else body)


def test_a_critic_with_other_tokens_than_the_policys_is_refused(folder: Path):
    other = folder.parent / "other"
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(other)
    vocabulary = {f"v{i}": i for i in range(11)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="v0"))
    ).save_pretrained(other)
    model = {"path": str(folder), "dtype": "float32"}
    with pytest.raises(LagzeroError, match=r"critic\.path: .*needs the same"):
        trained(config(model=model, advantage=PPO, critic={"path": str(other)}))
    with pytest.raises(LagzeroError, match=r"critic\.path: .*cannot be the critic"):
        trained(config(model=model, advantage=PPO, critic={"path": str(folder.parent)}))


def test_the_policys_schedule_begins_after_the_critics_warm_up(folder: Path):
    training = trained(
        config(
            model={"path": str(folder), "dtype": "float32"},
            advantage=PPO,
            critic={"warmup_steps": 3},
            schedule={"steps": 10},
        )
    )
    assert isinstance(training.trainer, ActorCritic)
    assert training.trainer.critic._optimizer.total_steps == 10
    assert training.trainer._trainer.optimizer.total_steps == 7


@pytest.mark.parametrize(
    ("kind", "threads"), [("colocated", []), ("disaggregated", [3]), ("swap", [3])]
)
def test_exact_numerics_are_checked_under_the_threads_of_engine_processes(
    folder: Path, kind: str, threads: list[int], monkeypatch: pytest.MonkeyPatch
):
    """And for what is sampled alone: a critic of its own is not checked again."""
    checked: list[list[int]] = []

    def note(policy: Any, engine_threads: list[int], decoder: str) -> Any:
        assert decoder == "auto"
        checked.append(engine_threads)
        return policy

    monkeypatch.setattr(build, "make_exact", note)
    chosen = config(
        model={"path": str(folder), "dtype": "float32", "device": "cpu", "numerics": "exact"},
        placement={"kind": kind, "engine_threads": 3},
        critic={},
        advantage={"estimator": "gae", "normalize_std": False},
    )
    policy = build.build_policy(chosen)
    compute = ComputeThread()
    build.build_training(chosen, policy, compute)
    compute.close()
    assert checked == [threads]


def test_engine_processes_are_exact_in_the_way_of_their_trainer(
    llama: str, monkeypatch: pytest.MonkeyPatch
):
    """In C where the trainer is; one that cannot build the library ends with the reason."""
    chosen = config(
        model={"path": llama, "dtype": "float32", "device": "cpu", "numerics": "exact"},
        engine={"kv_cache_tokens": 1024},
    )
    trained = build.build_policy(chosen)
    assert serving_room.exact_decoder(trained) == "native"
    assert serving_room.serve_engine(chosen, "native").engine.policy.exact == trained.exact
    served = serving_room.serve_engine(chosen, "torch").engine.policy
    assert served.native is None and serving_room.exact_decoder(served) == "torch"

    def broken() -> None:
        raise native_room.NotBuilt("no compiler today")

    monkeypatch.setattr(native_room, "library", broken)
    assert serving_room.exact_decoder(build.build_policy(chosen)) == "torch"
    with pytest.raises(LagzeroError, match="this process cannot: no compiler today"):
        serving_room.serve_engine(chosen, "native")


def test_numerics_are_exact_by_themselves_where_both_sides_compute_in_c(
    llama: str, monkeypatch: pytest.MonkeyPatch
):
    """And nowhere else: no check of the machine, no engine of another type or its own weights."""

    def way(numerics: str = "auto", **engine: Any) -> str | None:
        model = {"path": llama, "dtype": "float32", "device": "cpu", "numerics": numerics}
        chosen = config(model=model, engine={"kv_cache_tokens": 1024, **engine})
        return serving_room.exact_decoder(build.build_policy(chosen))

    assert way() == way(decoder="native") == way("exact") == "native"
    assert way("exact", decoder="torch") == "torch"
    assert way("fast") is None
    for engine in ({"decoder": "torch"}, {"dtype": "bfloat16"}, {"weights": "int8"}):
        assert way(**engine) is None

    def broken() -> None:
        raise native_room.NotBuilt("no compiler today")

    monkeypatch.setattr(native_room, "library", broken)
    assert way() is None
    assert way("exact") == "torch"


def test_products_of_integers_are_made_in_c_or_not_at_all(
    llama: str, monkeypatch: pytest.MonkeyPatch
):
    """Trainer and engine are one policy, exact, of another policy than float32's."""
    model = {"path": llama, "dtype": "float32", "device": "cpu", "products": "int16"}
    chosen = config(model=model, engine={"kv_cache_tokens": 1024})
    policy = build.build_policy(chosen)
    assert policy.products == "int16" and serving_room.exact_decoder(policy) == "native"
    assert str(policy.exact) == "engine and trainer compute in C, by 16-bit integers"
    assert build._critic_trunk(chosen, None, policy).products == "same"
    plain = build.build_policy(config(model={**model, "products": "same"}))
    ids = torch.arange(5)
    plan = PackedPlan(ids.numpy(), np.zeros(5, np.int64), np.full(1, -1), policy.device)
    logits = [each.logits(each.hidden(ids, ids, plan)) for each in (policy, plain)]
    assert 0 < (logits[0] - logits[1]).abs().max() < 0.01 * logits[1].abs().max()

    def broken() -> None:
        raise native_room.NotBuilt("no compiler today")

    monkeypatch.setattr(native_room, "library", broken)
    with pytest.raises(LagzeroError, match="int16 multiplies in C.*no compiler today"):
        build.build_policy(chosen)


@pytest.mark.parametrize("kind", ["none", "ngram", "draft"])
def test_the_engine_speculates_as_configured(kind: str, folder: Path):
    """The draft gets pages for so many sequences of its own context, no more."""
    path = str(folder) if kind == "draft" else None
    speculate = {"kind": kind, "tokens": 3, "max_running": 2, "match": 1, "path": path}
    chosen = config(
        model={"path": str(folder), "dtype": "float32"},
        engine={"kv_cache_tokens": 1024, "page_size": 8, "speculate": speculate},
    )
    compute = ComputeThread()
    try:
        engine = build_serving(chosen, build.build_policy(chosen), compute, print).backend.engine
    finally:
        compute.close()
    asked = [Request(n, (1, 2, 3), (n,), Sampling(20, temperature=0)) for n in range(2)]
    for request in asked:
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert (engine.counters.num_accepted > 0) == (kind != "none")
    if kind == "draft":
        assert engine._speculation.proposer._pool.num_pages == 2 * 32 // 8


def test_a_draft_with_other_tokens_is_refused(folder: Path):
    other = folder.parent / "other"
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(other)
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"w0": 0, "v1": 1}, unk_token="w0"))
    ).save_pretrained(other)
    chosen = config(
        model={"path": str(folder), "dtype": "float32"},
        engine={"kv_cache_tokens": 1024, "speculate": {"kind": "draft", "path": str(other)}},
    )
    compute = ComputeThread()
    try:
        policy = build.build_policy(chosen)
        with pytest.raises(LagzeroError, match=r"engine\.speculate\.path: .*has 2 tokens"):
            build_serving(chosen, policy, compute, print)
    finally:
        compute.close()


@pytest.mark.parametrize(
    ("model", "engine", "missing"),
    [
        ("float32", "same", ""),
        ("bfloat16", "same", "bfloat16"),
        ("float32", "float16", "float16"),
        ("bfloat16", "float16", "bfloat16 or float16"),
    ],
)
def test_a_machine_that_multiplies_in_float32_alone_says_so_of_each_type(
    model: str, engine: str, missing: str, monkeypatch: pytest.MonkeyPatch
):
    for name in ("has_fast_bfloat16", "has_fast_float16"):
        monkeypatch.setattr(build, name, lambda device: False)
    notes = build.machine_notes(
        config(model={"dtype": model, "device": "cpu"}, engine={"dtype": engine})
    )
    assert [note.split(" matrix")[0] for note in notes] == (
        [f"note: this cpu has no {missing}"] if missing else []
    )
