"""A policy's forward pass by the C library: which models it can run, and one call a step."""

# transformers' own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lagzero.native.kernels import Packed, cache_shape, linear, pack, takes_tiles, tile
from lagzero.native.library import NotBuilt, library
from lagzero.native.structures import LINEARS, TYPES, Layer, Linear, Model, Step
from lagzero.numerics.packed import PackedPlan

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_PAIRS = 32  # inputs of a product come in so many at once
_DTYPES = {number: dtype for dtype, number in TYPES.items()}
_LARGEST_HEAD = 256  # numbers that share a step as integers


@dataclass(frozen=True, slots=True)
class Row:
    """A flat row of T tokens: each has an id, a position and a sequence, each sequence its pages.

    All are int64 tensors. ``sampled`` [N] are the places of the row whose logits are wanted.
    """

    ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    sequences: torch.Tensor  # [T] rows of ``tables``
    tables: torch.Tensor  # [sequences, pages of the longest]
    sampled: torch.Tensor  # [N]
    longest: int  # tokens of the longest sequence


def why_not(policy: Any) -> str | None:
    """Say why the library cannot run a policy here, or None if it can."""
    module = policy.module
    config = module.config
    if policy.device.type != "cpu":
        return f"the weights are on {policy.device}"
    if config.model_type not in FAMILIES:
        return f"it knows {', '.join(FAMILIES)}, not {config.model_type}"
    if policy.adapter is not None:
        return "the policy has an adapter"
    if policy.dtype not in (torch.float32, torch.bfloat16):
        return f"the weights are {policy.dtype}, neither float32 nor bfloat16"
    if config.hidden_act != "silu":
        return f"the activation is {config.hidden_act}, not silu"
    sizes = {layer.self_attn.head_dim for layer in module.model.layers}
    if len(sizes) != 1 or next(iter(sizes)) % 16:
        return f"head sizes {sorted(sizes)} are not one multiple of 16"
    if policy.products == "int16" and max(sizes) > _LARGEST_HEAD:
        return f"int16 products know head sizes up to {_LARGEST_HEAD}, not {max(sizes)}"
    inputs = {linear.weight.shape[1] for linear in _linears(module)}
    if any(each % _PAIRS for each in inputs):
        return f"products have {sorted(inputs)} inputs, not multiples of {_PAIRS}"
    stored = {linear.weight.dtype for linear in _linears(module)} - {policy.dtype, torch.int8}
    if stored:
        return f"weights of linear layers are {', '.join(map(str, stored))}"
    try:
        library()
    except NotBuilt as error:
        return str(error)
    return None


def _linears(module: Any) -> list[Any]:
    found = [module.get_output_embeddings()]
    for layer in module.model.layers:
        found += layer_linears(layer)
    return found


def layer_linears(layer: Any) -> list[Any]:
    """Return a layer's linear modules, in the order of ``LINEARS``."""
    a, m = layer.self_attn, layer.mlp
    return [a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj]


def window_of(config: Any, attention: Any) -> int | None:
    """Return how many positions a token of a layer sees, its own included, or None for all."""
    where = config if config.model_type == "mistral" else attention
    return getattr(where, "sliding_window", None)


class Decoder:
    """Runs one policy.

    Between two steps its parameters may change, in place or with their storage: if they do,
    ``weights_changed`` must follow. ``policy`` is one for which ``why_not`` says nothing.
    """

    def __init__(self, policy: Any):
        self._policy = policy
        self._library = library()
        self._library.scratch_floats.restype = ctypes.c_long
        self._library.held_type.restype = self._library.logits_type.restype = ctypes.c_long
        self._library.forward.restype = None
        self._scratch = torch.empty(0)
        self._parameters = list(policy.module.parameters())
        self._places: list[int] = []  # page size, parameters, cache: what ``_model`` was made of
        self._model = Model()
        self._packed: dict[int, Packed] = {}  # by the number of a linear layer

    @property
    def cache_dtype(self) -> torch.dtype:
        """Type of keys and values."""
        return torch.int16 if self._policy.products == "int16" else self._policy.dtype

    def weights_changed(self) -> None:
        """Say that the parameters have other values than in the step before."""
        self._places = []

    def release(self) -> None:
        """Give back what the next step can make again."""
        self._places, self._packed, self._scratch = [], {}, torch.empty(0)

    def logits(self, keys: Any, values: Any, page_size: int, row: Row) -> torch.Tensor:
        """Compute a row; return logits [N, V] in float32, or in bfloat16 if they are rounded so.

        ``keys`` and ``values`` are the cache of each layer, [pages, K, page_size, E] as
        ``cache_shape`` says; those of the row's tokens are written there.
        """
        policy = self._policy
        caches = [cache[number] for cache in (keys, values) for number in range(len(keys))]
        places = [page_size, *(each.data_ptr() for each in (*self._parameters, *caches))]
        if places != self._places:
            self._model, self._places = self._point(keys, values, page_size), places
        model = self._model
        held, dtype = (
            _DTYPES[which(ctypes.byref(model))]
            for which in (self._library.held_type, self._library.logits_type)
        )
        with torch.inference_mode():
            cosine, sine = (
                each[0].to(held).contiguous()
                for each in policy.module.model.rotary_emb(
                    torch.empty(1, dtype=policy.dtype), row.positions.unsqueeze(0)
                )
            )
        logits = torch.empty(len(row.sampled), model.head.rows, dtype=dtype)
        tensors = (row.ids, row.positions, row.sequences, row.tables, row.sampled, cosine, sine)
        step = Step(
            len(row.ids),
            len(row.sampled),
            row.tables.shape[1],
            torch.get_num_threads(),
            row.longest,
            *(each.data_ptr() for each in tensors),
        )
        floats = self._library.scratch_floats(ctypes.byref(model), ctypes.byref(step))
        if len(self._scratch) < floats:
            self._scratch = torch.empty(floats)
        step.scratch, step.logits = self._scratch.data_ptr(), logits.data_ptr()
        self._library.forward(ctypes.byref(model), ctypes.byref(step))
        return logits

    def _point(self, keys: Any, values: Any, page_size: int) -> Model:
        """Point at the weights where they are now."""
        policy = self._policy
        module, config = policy.module, policy.module.config
        head, *linears = (self._linear(*each) for each in enumerate(_linears(module)))
        layers = (Layer * len(module.model.layers))()
        for number, (layer, to) in enumerate(zip(module.model.layers, layers, strict=True)):
            attention = layer.self_attn
            to.norm_in = layer.input_layernorm.weight.data_ptr()
            to.norm_mlp = layer.post_attention_layernorm.weight.data_ptr()
            if config.model_type == "qwen3":
                to.norm_query = attention.q_norm.weight.data_ptr()
                to.norm_key = attention.k_norm.weight.data_ptr()
            own = linears[number * len(LINEARS) : (number + 1) * len(LINEARS)]
            for name, each in zip(LINEARS, own, strict=True):
                setattr(to, name, each)
            to.keys, to.values = keys[number].data_ptr(), values[number].data_ptr()
            to.window = window_of(config, attention) or 0
        first = module.model.layers[0].self_attn
        return Model(
            layers,
            module.get_input_embeddings().weight.data_ptr(),
            module.model.norm.weight.data_ptr(),
            head,
            len(layers),
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            first.head_dim,
            page_size,
            TYPES[policy.dtype],
            TYPES[self.cache_dtype],
            int(policy.fp32_head),
            config.rms_norm_eps,
            first.scaling,
        )

    def _linear(self, number: int, module: Any) -> Linear:
        weight, packed = module.weight.detach(), self._packed.get(number)
        if self._policy.products == "int16":
            packed = self._packed[number] = pack(weight, packed)
        elif takes_tiles(weight):
            packed = self._packed[number] = tile(weight, packed)
        return linear(weight, module.bias, getattr(module, "scale", None), packed)


def row_of(
    ids: list[int],
    positions: list[int],
    sampled: list[int],
    counts: Sequence[int],
    pages: Sequence[list[int]],
) -> Row:
    """Lay out a row that has ``counts[s]`` tokens of sequence s, whose pages are ``pages[s]``."""
    width = max(map(len, pages))
    return Row(
        torch.tensor(ids),
        torch.tensor(positions),
        torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),  # pyright: ignore
        torch.tensor([each + [0] * (width - len(each)) for each in pages]),
        torch.tensor(sampled, dtype=torch.long),
        max(positions) + 1,
    )


_CHECKED = 8  # tokens
# Mean gap of a logit, in standard deviations of the logits; a wrong formula makes it about 1. What
# rounding makes of it was 3e-6 and 0.06, by products of integers 1e-3 (SmolLM2-135M, 30 layers).
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
_TOLERANCE_INT16 = 0.05


def make_native(policy: Any) -> str | None:
    """Let a policy decode by the C library. Returns why it cannot, and None where it does.

    Its logits of a few tokens are compared with those of the model's own modules first, so that a
    variant of a family that the library does not know is found before anything is sampled.
    """
    reason = why_not(policy)
    if reason is None:
        decoder = Decoder(policy)
        gap = _gap(policy, decoder)
        most = _TOLERANCE[policy.dtype]
        if policy.products == "int16":
            most = max(most, _TOLERANCE_INT16)
        if not gap <= most:
            return f"its logits differ from the model's by {gap:.3g} standard deviations"
        policy.native = decoder
    return reason


def _gap(policy: Any, decoder: Decoder) -> float:
    """Return the mean difference of a logit, in standard deviations of the logits."""
    num, page = _CHECKED, 4
    generator = torch.Generator().manual_seed(0)
    size = policy.module.get_input_embeddings().weight.shape[0]
    ids = torch.randint(size, (num,), generator=generator)
    places = torch.arange(num)
    plan = PackedPlan(places.numpy(), np.zeros(num, np.int64), np.full(1, -1), policy.device)
    with torch.inference_mode():
        expected = policy.logits(policy.hidden(ids, places, plan))
    attention = policy.module.model.layers[0].self_attn
    kv_heads = attention.k_proj.weight.shape[0] // attention.head_dim
    dtype, pages = decoder.cache_dtype, -(-num // page)
    shape = cache_shape(dtype, pages, kv_heads, page, attention.head_dim)
    keys, values = (
        [torch.zeros(shape, dtype=dtype) for _ in policy.module.model.layers] for _ in range(2)
    )
    row = Row(
        ids,
        places,
        torch.zeros(num, dtype=torch.long),
        torch.arange(pages).unsqueeze(0),
        places,
        num,
    )
    found = decoder.logits(keys, values, page, row)
    return float((found - expected).abs().mean() / expected.std())
