"""The part of the configuration that says how responses are sampled, and by which engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lagzero.config_block import Block, PositiveInt, Share, UserPath


class RolloutConfig(Block):
    """How responses are sampled: in training, and in evaluation where it samples."""

    group_size: PositiveInt = 8  # rollouts of one prompt
    max_new_tokens: PositiveInt = 256  # of one response
    temperature: Annotated[float, Field(ge=0)] = 1.0  # logits are divided by it
    # sample from the likeliest tokens that hold this share; 1: off. Like top_k and min_p for
    # `lagzero eval` only, and refused in training
    top_p: Share = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0  # sample from the so many likeliest tokens; 0: off
    # leave out tokens below this share of the likeliest one's probability; 0: off
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    stop: list[str] = Field(default_factory=list)  # strings that end a response
    # whether the text that rewards see keeps the stop string; its tokens are trained either way
    include_stop: bool = True
    # partial rollouts: tokens that a response writes between two weight updates, after which it
    # waits for the next one; None: it writes on
    tokens_per_round: PositiveInt | None = None
    # of a group; then it is begun again, `retries` times, and given up after that; None: no limit
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    retries: Annotated[int, Field(ge=0)] = 1  # of a group that timed out


class SpeculateConfig(Block):
    """Speculative decoding: the same tokens in fewer forward passes, where few sequences run."""

    # who guesses the next tokens. ngram: what followed the newest ones where the prompt, the
    # response or another one of its group held them before; draft: a smaller model
    kind: Literal["none", "ngram", "draft"] = "none"
    tokens: PositiveInt = 8  # most tokens guessed for a sequence in one step
    # guess only while at most so many sequences run; with more, judging guesses costs more
    # arithmetic than it saves
    max_running: PositiveInt = 8
    match: PositiveInt = 3  # of ngram: newest tokens that must have stood there before
    # of draft: the model, a folder or hub id with the policy's tokenizer; it is not trained
    path: UserPath | None = None


class EngineConfig(Block):
    """The embedded inference engine."""

    # same: share the trainer's weights
    dtype: Literal["same", "float32", "bfloat16", "float16"] = "same"
    # how the engine stores the weights of linear layers. same: in its dtype; int8, fp8: in 8 bits
    # with one scale for each output, quantised anew at each weight transfer. The head, embeddings,
    # norms and adapters stay in its dtype
    weights: Literal["same", "int8", "fp8"] = "same"
    # what computes the forward pass. native: C, compiled at the first start, for Llama-like models
    # on a CPU; torch: the model's own modules; auto: native where it can. With model.numerics:
    # exact the trainer's forward pass goes the same way
    decoder: Literal["auto", "native", "torch"] = "auto"
    max_running: PositiveInt = 128  # sequences decoded together
    page_size: PositiveInt = 32  # tokens a page
    kv_cache_tokens: PositiveInt | None = None  # None: from kv_cache_share of free memory
    # of available memory (GPU: free device memory), when kv_cache_tokens is null
    kv_cache_share: Share = 0.25
    # take the cache's memory when the engine is made, not as it fills: the first steps are faster,
    # and memory that is not there is missed at once
    kv_reserve: bool = False
    prefill_chunk_tokens: PositiveInt = 512  # prompt tokens computed in one engine step
    prefix_cache: bool = True  # reuse prompts that start alike
    # what unfinished responses do with keys and values of the old weights when new ones arrive:
    # keep them (PipelineRL), or compute them again
    kv_on_update: Literal["keep", "recompute"] = "keep"
    speculate: SpeculateConfig = Field(default_factory=SpeculateConfig)
