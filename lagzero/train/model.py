"""The policy: an unmodified transformers model and its tokenizer; how they are loaded and saved."""

# transformers' and PEFT's own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoTokenizer

from lagzero.config import ModelConfig
from lagzero.config_files import chat_template_text
from lagzero.errors import LagzeroError
from lagzero.native.decoder import Decoder
from lagzero.numerics.attention import ATTENTION, PLAN_KEYWORD, AttentionPlan, register
from lagzero.numerics.exact import ExactNumerics, ProductType, pad_rows, whole_rows
from lagzero.numerics.precision import pick_dtype
from lagzero.train.builtin import BUILTIN, builtin_folder
from lagzero.train.check_model import check_model
from lagzero.train.logprobs import Tail


@dataclass(slots=True)
class Policy:
    """A causal language model over flat rows of T tokens.

    ``module`` is the transformers model, always in eval mode: dropout would make the trained
    distribution another than the sampled one. ``adapter`` is PEFT's wrapper around it, or None.
    ``fp32_head`` says that the head multiplies in float32 whatever the model's type, ``products``
    what layers and attention multiply in where C computes them. ``exact`` is set by ``make_exact``,
    ``native`` by ``make_native`` or by an exact one that decodes in C; the engine alone uses the
    latter.
    """

    module: Any
    tokenizer: Any
    adapter: Any = None
    fp32_head: bool = False
    products: ProductType = "same"
    exact: ExactNumerics | None = None
    native: Decoder | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.module.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations, keys and values."""
        return self.module.get_input_embeddings().weight.dtype

    @property
    def tail(self) -> Tail:
        """How log-probs are taken from logits."""
        if self.exact is None:
            return "fast"
        return self.exact.kernels or "exact"

    @property
    def context_limit(self) -> int:
        """Most tokens of one sequence."""
        return _context_limit(self.module.config)

    def hidden(
        self, ids: torch.Tensor, position_ids: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """Return the last hidden states [T, D] of ids [T] at position_ids [T]."""
        num = len(ids)
        if self.tail == "exact":
            ids, position_ids = (pad_rows(t, whole_rows(num)) for t in (ids, position_ids))
        out = self.module.base_model(
            input_ids=ids.unsqueeze(0),
            position_ids=position_ids.unsqueeze(0),
            use_cache=False,
            **{PLAN_KEYWORD: plan},
        )
        hidden = out.last_hidden_state[0]
        return hidden if len(hidden) == num else hidden[:num]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V], at least float32, of hidden states [N, D].

        The head multiplies in the model's type, or in float32 with ``fp32_head``; what the model
        does to its logits afterwards (soft capping, scaling) is done in float32. Trainer and engine
        both come here, so their heads cannot differ. A trainer that computes in C gets them in the
        type that the head gives, and takes log-probs from them as they are.
        """
        num = len(hidden)
        if self.tail == "exact":
            hidden = pad_rows(hidden, whole_rows(num))
        logits = self._head(hidden)
        if self.exact is not None and self.exact.native:
            return logits  # none of the models that it knows does anything more
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        config = self.module.config.get_text_config()
        if (factor := getattr(config, "logit_scale", None)) is not None:
            logits = logits * factor
        if (divisor := getattr(config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits if len(logits) == num else logits[:num]

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self.module.get_output_embeddings()
        by_kernels = self.exact is not None and self.exact.kernels is not None
        if not self.fp32_head or by_kernels:  # their head is float32 as it stands
            return head(hidden)
        # The head's own forward, so that a bias or an adapter on it takes part.
        parameters = {name: p.float() for name, p in head.named_parameters()}
        return functional_call(head, parameters, (hidden.float(),))

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that an optimiser may change, each once, by name."""
        return {n: p for n, p in self.module.named_parameters() if p.requires_grad}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return every parameter, each once, by name."""
        return {n: p.detach() for n, p in self.module.named_parameters()}

    def cast_copy(self, dtype: torch.dtype) -> Policy:
        """Return a copy whose parameters, adapters included, are of another type.

        Buffers stay as they are, as in a model that is loaded in that type: rotary frequencies in
        bfloat16 would be off by 0.09 rad at position 512.
        """
        module, adapter = copy.deepcopy((self.module, self.adapter))
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
        return replace(self, module=module.requires_grad_(False), adapter=adapter, native=None)


ReferenceScope = Callable[[], AbstractContextManager[Policy]]
"""Enter to hold the frozen policy that the KL term is measured against."""


def load_policy(config: ModelConfig, device: torch.device | None = None) -> Policy:
    """Load a folder, a hub id or the built-in model, without adapters, ready to train whole.

    Raises LagzeroError when there is no such model, its tokenizer cannot be loaded, or
    ``check_model`` finds that it cannot run under lagzero's attention.
    """
    # Here, as in other functions: it brings in what an engine may do without (``train.light``).
    from transformers import AutoModelForCausalLM

    register()
    tokenizer, _ = load_tokenizer(config)
    device = device or pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    with _explained(config.path):
        module: Any = AutoModelForCausalLM.from_pretrained(
            model_source(config.path), dtype=dtype, attn_implementation=ATTENTION
        )
    policy = Policy(
        module.to(device).eval(),
        tokenizer,
        fp32_head=config.fp32_head,
        products=config.products,
    )
    check_model(policy)
    return policy


def load_tokenizer(config: ModelConfig, settings: Any = None) -> tuple[Any, int]:
    """Return the tokenizer and the most tokens of one sequence, without loading any weights.

    ``settings`` is transformers' configuration of the model, where it has been read already.

    Raises LagzeroError as ``load_policy`` does.
    """
    with _explained(config.path):
        source = model_source(config.path)
        tokenizer = AutoTokenizer.from_pretrained(source, config=settings)
        limit = _context_limit(settings or AutoConfig.from_pretrained(source))
    if config.chat_template is not None:
        tokenizer.chat_template = chat_template_text(config.chat_template)
    return tokenizer, limit


@contextmanager
def _explained(path: str) -> Generator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        raise LagzeroError(
            f"model.path: {path!r} could not be loaded as a causal language model with its "
            "tokenizer. Give a folder written by save_pretrained, a hub id that can be reached or "
            f"is in the local cache, or {BUILTIN!r}. The library says: {_first_line(error)}"
        ) from error


def model_source(path: str) -> str:
    """Return what transformers loads ``path`` from. Raises LagzeroError where there is no model."""
    return str(builtin_folder()) if path == BUILTIN else _checked_path(path)


def _context_limit(config: Any) -> int:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return 1 << 30 if limit is None else int(limit)


def pick_device(name: str) -> torch.device:
    """Turn ``auto``, ``cpu``, ``cuda`` or ``cuda:1`` into a device.

    Raises LagzeroError for another word and for a CUDA device that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise LagzeroError(
            f"model.device: {name!r} is none of auto, cpu, cuda, cuda:<number>"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise LagzeroError(
            f"model.device: {name!r} was asked for and {torch.cuda.device_count()} CUDA devices "
            "are visible; use cpu or auto"
        )
    return device


def stop_ids(module: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return, sorted, all end ids of the generation config and the tokenizer's own.

    A chat model often has several, and stops rightly at any of them.
    """
    found: set[int] = set()
    for ids in (
        getattr(module.generation_config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return tuple(sorted(found))


def frozen_copy(policy: Policy) -> ReferenceScope:
    """Copy the policy as it is now, to be the reference of a run that trains all weights."""
    module = copy.deepcopy(policy.module).requires_grad_(False)
    frozen = replace(policy, module=module, native=None)

    @contextmanager
    def scope() -> Generator[Policy]:
        yield frozen

    return scope


def load_reference(config: ModelConfig, policy: Policy) -> ReferenceScope:
    """Load ``model.reference``, frozen, to stand in for the policy as it started.

    Raises LagzeroError when it cannot be loaded, and when its tokenizer has other tokens than the
    policy's: the ids of a response would then mean another text to it.
    """
    path = config.reference
    if path is None:
        raise ValueError("model.reference names no model")
    other = load_beside(config, path, policy, "model.reference")

    @contextmanager
    def scope() -> Generator[Policy]:
        yield other

    return scope


def load_beside(config: ModelConfig, path: str, policy: Policy, key: str) -> Policy:
    """Load another model, frozen, that reads the policy's token ids; ``key`` says who names it.

    Raises LagzeroError when it cannot be loaded, and when its tokenizer has other tokens.
    """
    try:
        other = load_policy(config.model_copy(update={"path": path}), policy.device)
    except LagzeroError as error:
        raise LagzeroError(f"{key}: {path!r} cannot be used.\n{error}") from error
    check_same_tokens(other, policy, f"{key}: {path!r}")
    other.module.requires_grad_(False)
    return other


def check_same_tokens(other: Policy, policy: Policy, name: str) -> None:
    """Raise LagzeroError when a model that scores the policy's token ids has other tokens."""
    theirs, ours = (p.tokenizer.get_vocab() for p in (other, policy))
    if theirs != ours:
        shared = len(theirs.items() & ours.items())
        raise LagzeroError(
            f"{name}: its tokenizer has {len(theirs)} tokens and the policy's {len(ours)}, of "
            f"which {shared} are the same; it reads the policy's token ids, so it needs the same. "
            "Give a model of the same family, or remove the key"
        )


def enable_activation_checkpointing(policy: Policy) -> None:
    """Keep only each layer's input for the backward pass and compute the rest again there.

    Raises LagzeroError for a model whose layers do not offer it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [
        m for m in policy.module.modules() if isinstance(m, GradientCheckpointingLayer)
    ]
    if not layers:
        raise LagzeroError(
            f"{type(policy.module).__name__} offers no activation checkpointing; set "
            "model.activation_checkpointing to false"
        )
    for layer in layers:
        layer.forward = functools.partial(_checkpointed, layer)


def _checkpointed(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a layer so that its backward pass computes it again.

    transformers' own switch works in training mode only, which would turn on the dropout of
    layers that ask ``self.training`` themselves.
    """
    forward = functools.partial(type(layer).forward, layer, **kwargs)
    if not torch.is_grad_enabled():
        return forward(*args)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)


def save_policy(policy: Policy, folder: Path) -> None:
    """Write an ordinary model folder, or a PEFT adapter folder, and the tokenizer with it."""
    folder.mkdir(parents=True, exist_ok=True)
    if policy.adapter is not None:
        # Looking for resized embeddings would ask the hub about the base model.
        policy.adapter.save_pretrained(
            str(folder), selected_adapters=["default"], save_embedding_layers=False
        )
    else:
        policy.module.save_pretrained(str(folder))
    policy.tokenizer.save_pretrained(str(folder))


def _checked_path(path: str) -> str:
    """Return the path, after saying clearly what is wrong with one that looks like a folder."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            hint = ""
            if (folder / "adapter_config.json").is_file():
                hint = "; it holds an adapter, which belongs in model.lora.start"
            raise LagzeroError(f"model.path: folder {path!r} has no config.json{hint}")
        return str(folder)
    if path.startswith(("/", "./", "../", "~")) or path.count("/") > 1:
        raise LagzeroError(f"model.path: there is no folder {path!r}")
    return path


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
