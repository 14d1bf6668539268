"""The C library computes what the model's own modules do, whatever else is in the row."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lagzero.config import LoraConfig
from lagzero.native import decoder as native
from lagzero.native.decoder import Decoder, Row, make_native, row_of, why_not
from lagzero.numerics.attention import ATTENTION, register
from lagzero.numerics.packed import PackedPlan
from lagzero.train.lora import add_lora
from lagzero.train.model import Policy
from lagzero.train.quantised import quantised_copy

VOCABULARY, PAGE, LAYERS = 300, 4, 2


@functools.cache
def policy_of(family: str, dtype: torch.dtype = torch.float32, **changes: object) -> Policy:
    register()
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.15,
        "tie_word_embeddings": family == "llama",
        **changes,
    }
    if family == "qwen2":
        sizes["use_sliding_window"] = False
    torch.manual_seed(7)
    module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **sizes), attn_implementation=ATTENTION
    )
    for name, parameter in module.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # ones and zeros would hide a mistake
            parameter.data += 0.3 * torch.randn_like(parameter)
    return Policy(module.to(dtype).eval().requires_grad_(False), None)


def tokens(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def expected(policy: Policy, sequence: list[int]) -> torch.Tensor:
    """Logits [T, V] of one sequence alone, by the modules."""
    num = len(sequence)
    plan = PackedPlan(np.arange(num), np.zeros(num, np.int64), np.full(1, -1), policy.device)
    with torch.inference_mode():
        return policy.logits(policy.hidden(torch.tensor(sequence), torch.arange(num), plan))


class Cache:
    """Pages for some sequences, in no order, full of NaN where nothing was written."""

    def __init__(self, policy: Policy, lengths: list[int]):
        needed = [-(-n // PAGE) for n in lengths]
        order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(1)).tolist()
        self.pages = [[order.pop() for _ in range(n)] for n in needed]
        attention = policy.module.model.layers[0].self_attn
        heads = attention.k_proj.weight.shape[0] // attention.head_dim
        shape = (sum(needed) + 3, heads, PAGE, attention.head_dim)
        self.keys, self.values = (
            [torch.full(shape, torch.nan, dtype=policy.dtype) for _ in range(LAYERS)]
            for _ in range(2)
        )

    def run(
        self, decoder: Decoder, sequences: list[list[int]], parts: list[tuple[int, int, int]]
    ) -> torch.Tensor:
        """Compute parts (sequence, start, end) in one row; return all their tokens' logits."""
        ids = [i for n, start, end in parts for i in sequences[n][start:end]]
        row = row_of(
            ids,
            [at for _, start, end in parts for at in range(start, end)],
            list(range(len(ids))),
            [end - start for _, start, end in parts],
            [self.pages[n][: -(-end // PAGE)] for n, _, end in parts],
        )
        return decoder.logits(self.keys, self.values, PAGE, row)


CASES = [
    ("llama", {}),
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 80}),
    ("mistral", {"sliding_window": 5}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32}),
]


@pytest.mark.parametrize(("family", "changes"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mixed_row_equals_the_modules(family, changes, dtype):
    """Chunked prompts and single tokens of five sequences, over pages in no order."""
    policy = policy_of(family, dtype, **changes)
    sequences = tokens(1, 3, 9, 22, 31)
    cache, decoder = Cache(policy, [len(each) for each in sequences]), Decoder(policy)
    parts = [
        [(2, 0, 8), (3, 0, 13), (4, 0, 7)],
        [(0, 0, 1), (2, 8, 9), (1, 0, 2), (4, 7, 30), (3, 13, 14)],
        [(1, 2, 3), (3, 14, 22), (4, 30, 31)],
    ]
    found = [torch.empty(len(each), VOCABULARY) for each in sequences]
    for step in parts:
        rows = cache.run(decoder, sequences, step)
        for (number, start, end), logits in zip(
            step, rows.split([end - start for _, start, end in step]), strict=True
        ):
            found[number][start:end] = logits
    for sequence, logits in zip(sequences, found, strict=True):
        want = expected(policy, sequence)
        gap = (logits - want).abs() / want.std()
        if dtype == torch.float32:
            assert gap.max() < 2e-5
        else:  # both round to 8 bits at each step; what is left is their order of sums
            assert gap.max() < 0.1 and gap.mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_about_as_far_from_exact_arithmetic_as_the_modules_are(dtype):
    """Against the same weights in float64, in the mean of all logits."""
    policy = policy_of("llama", dtype)
    sequence = tokens(25)[0]
    wide = Policy(
        AutoModelForCausalLM.from_config(policy.module.config, attn_implementation=ATTENTION)
        .double()
        .eval(),
        None,
    )
    wide.module.load_state_dict(policy.module.state_dict())
    exact = expected(wide, sequence)
    found = Cache(policy, [25]).run(Decoder(policy), [sequence], [(0, 0, 25)])
    ours = (found - exact).abs().mean()
    theirs = (expected(policy, sequence) - exact).abs().mean()
    assert ours < 1.2 * theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_does_not_depend_on_its_neighbours_or_threads(dtype):
    """Bit for bit: alone, as the last of a chunk, among 40 others, on one thread or three."""
    policy = policy_of("qwen3", dtype, head_dim=32)
    sequences = tokens(17, *range(2, 42))
    lengths = [len(each) for each in sequences]
    results = []
    for threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            alone, among, chunk = (Cache(policy, lengths) for _ in range(3))
            decoder = Decoder(policy)
            for at in range(17):
                one = alone.run(decoder, sequences, [(0, at, at + 1)])[-1]
            among.run(decoder, sequences, [(0, 0, 16)])
            parts = [(0, 16, 17), *((n, 0, lengths[n]) for n in range(1, len(lengths)))]
            many = among.run(decoder, sequences, parts)[0]
            last = chunk.run(decoder, sequences, [(0, 0, 17)])[-1]
        finally:
            torch.set_num_threads(before)
        results += [one, many, last]
    assert all(torch.equal(results[0], each) for each in results[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_8_bit_weights_are_read_as_they_are_stored(dtype):
    policy = quantised_copy(policy_of("qwen2", dtype), "int8", None)
    assert why_not(policy) is None
    sequence = tokens(19)[0]
    found = Cache(policy, [19]).run(Decoder(policy), [sequence], [(0, 0, 19)])
    want = expected(policy, sequence)
    gap = (found - want).abs().max() / want.std()
    assert gap < (2e-5 if dtype == torch.float32 else 0.1)
    assert "float8" in str(why_not(quantised_copy(policy_of("qwen2", dtype), "fp8", None)))


def test_weights_that_change_in_place_or_move_are_seen():
    policy = policy_of("llama", initializer_range=0.151)
    decoder, sequence = Decoder(policy), tokens(6)[0]
    first = Cache(policy, [6]).run(decoder, [sequence], [(0, 0, 6)])
    layer = policy.module.model.layers[1].mlp.up_proj
    layer.weight.data.mul_(-1)
    layer.weight.data = layer.weight.data.clone()
    second = Cache(policy, [6]).run(decoder, [sequence], [(0, 0, 6)])
    assert not torch.allclose(first, second)
    torch.testing.assert_close(second, expected(policy, sequence), rtol=1e-4, atol=1e-4)


def test_only_the_rows_that_sample_are_returned_in_their_order():
    policy, sequence = policy_of("llama"), tokens(9)[0]
    decoder = Decoder(policy)
    every = Cache(policy, [9]).run(decoder, [sequence], [(0, 0, 9)])
    cache = Cache(policy, [9])
    row = row_of(sequence, list(range(9)), [7, 2], [9], [cache.pages[0]])
    assert torch.equal(decoder.logits(cache.keys, cache.values, PAGE, row), every[[7, 2]])


def test_a_float32_head_is_not_rounded():
    policy = policy_of("llama", torch.bfloat16)
    sequence = tokens(5)[0]
    wide = Policy(policy.module, None, fp32_head=True)
    found = Cache(wide, [5]).run(Decoder(wide), [sequence], [(0, 0, 5)])
    assert (found.bfloat16().float() != found).any()
    rounded = Cache(policy, [5]).run(Decoder(policy), [sequence], [(0, 0, 5)])
    assert torch.equal(found.bfloat16().float(), rounded.float())


def test_residual_sums_keep_denormal_numbers_as_torch_does():
    """Embeddings of about 2e-39, to which layers add nothing."""
    policy = policy_of("llama", torch.bfloat16, tie_word_embeddings=False)
    sequence = tokens(5)[0]
    with torch.no_grad():
        policy.module.model.embed_tokens.weight.mul_(1e-37)
        policy.module.model.norm.weight.mul_(1e30)
        for layer in policy.module.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    found = Cache(policy, [5]).run(Decoder(policy), [sequence], [(0, 0, 5)]).float()
    want = expected(policy, sequence)
    assert want.abs().max() > 1e-10
    torch.testing.assert_close(found, want, rtol=0.02, atol=float(want.abs().max()) / 50)


def test_a_fault_is_found_before_anything_is_sampled():
    policy = policy_of("llama", initializer_range=0.152)
    assert make_native(policy) is None and isinstance(policy.native, Decoder)
    policy.native = None
    policy.module.model.norm.variance_epsilon = 3.0  # what the configuration does not say
    assert "differ from the model's by" in str(make_native(policy)) and policy.native is None


def test_why_not_names_what_is_in_the_way(monkeypatch):
    assert why_not(policy_of("llama")) is None
    assert "not olmo2" in str(why_not(policy_of("olmo2")))
    assert "not multiples of 32" in str(why_not(policy_of("llama", intermediate_size=100)))
    assert "head sizes [24]" in str(why_not(policy_of("llama", head_dim=24)))
    assert "gelu" in str(why_not(policy_of("llama", hidden_act="gelu")))
    assert "float64" in str(why_not(policy_of("llama", torch.float64)))
    with_adapter = add_lora(policy_of("llama", initializer_range=0.153), LoraConfig(rank=2))
    assert "adapter" in str(why_not(with_adapter))
    monkeypatch.setattr(native, "library", _broken)
    assert why_not(policy_of("llama")) == "no compiler today"


def _broken() -> None:
    raise native.NotBuilt("no compiler today")


def test_rows_are_laid_out_by_sequence():
    row = row_of([5, 6, 7], [0, 1, 4], [1, 2], [2, 1], [[3], [8, 9]])
    assert row.sequences.tolist() == [0, 0, 1]
    assert row.tables.tolist() == [[3, 0], [8, 9]]
    assert row.longest == 5
    assert isinstance(row, Row)


def test_a_cache_of_other_pages_at_the_same_place_is_another_cache():
    policy, sequence = policy_of("llama"), tokens(7)[0]
    cache, decoder = Cache(policy, [7]), Decoder(policy)
    first = cache.run(decoder, [sequence], [(0, 0, 7)])
    heads, size = cache.keys[0].shape[1], cache.keys[0].shape[3]
    wide = [[each.view(-1)[: heads * 8 * size].view(1, heads, 8, size) for each in of]
            for of in (cache.keys, cache.values)]  # fmt: skip
    row = row_of(sequence, list(range(7)), list(range(7)), [7], [[0]])
    assert torch.equal(decoder.logits(*wide, 8, row), first)
