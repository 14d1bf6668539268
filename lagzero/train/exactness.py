"""Makes a policy exact: its engine's log-probs are its trainer's, bit for bit; and checks it.

Exact means that a token's log-prob is a function of the weights, its sequence and the temperature
alone: not of the batch it was sampled in, of how its prompt was cut, of preemption or of the row
that it is trained in. Then ratios of an unchanged policy are 1 and the mismatch is 0, exactly.
"""

# transformers' own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from lagzero.engine.runner import probe_kv_shapes
from lagzero.errors import LagzeroError
from lagzero.native.decoder import make_native
from lagzero.native.kernels import kernels_of
from lagzero.native.rows import install_rows
from lagzero.numerics.exact import (
    ExactNumerics,
    Shape,
    experts_forward,
    install,
    linear_forward,
    router_forward,
    shape_of,
    transposed_forward,
)
from lagzero.numerics.self_check import check_attention, check_products
from lagzero.tiles import rows as tiles
from lagzero.train.model import Policy
from lagzero.train.traffic import Traffic, compare, play

DecoderChoice = Literal["auto", "native", "torch"]
"""``engine.decoder``."""

_EXPERTS_LAYOUT = {
    "is_concatenated": True,
    "is_transposed": False,
    "has_bias": False,
    "has_gate": True,
    "has_post_expert_norm": False,
}


def make_exact(
    policy: Policy, thread_counts: Sequence[int] = (), decoder: DecoderChoice = "auto"
) -> Policy:
    """Return the policy with exact numerics; its module is changed in place, not its parameters.

    Where the C library knows the model, engine and trainer compute by the same functions of it; on
    a GPU by the same Triton kernels. Elsewhere every product of the module, adapters included, is
    made as a self-check of this machine found. ``thread_counts`` are those of other processes that
    must get the same results. ``decoder`` is ``engine.decoder``; all processes of a run must come
    out with the same way.

    Last, a few tokens are sampled and scored, which finds what no check of a part would.

    Raises LagzeroError for a GPU whose kernels do not know the model, for modules that multiply in
    a way that is not known here, where the check finds no exact way, where ``native`` is asked for
    and cannot be had, and when one of those tokens differs.
    """
    if policy.exact is not None:
        raise ValueError("the policy is exact already")
    policy = replace(policy, native=None)
    if policy.products == "int16":
        decoder = "native"
    if policy.device.type != "cpu" and decoder != "native":
        return make_exact_by_tiles(policy)
    reason = "engine.decoder is torch" if decoder == "torch" else make_native(policy)
    if reason is None:
        return _in_c(policy)
    if policy.products == "int16":
        raise LagzeroError(
            "model.products: int16 multiplies in C in the trainer and in each engine, and this "
            f"process cannot: {reason}. Set model.products: same"
        )
    if decoder == "native":
        raise LagzeroError(
            "model.numerics: exact with engine.decoder: native computes in C in the trainer and "
            f"in each engine, and this process cannot: {reason}. Set engine.decoder: torch"
        )
    exact = _checked(policy, thread_counts, reason)
    _try_out(exact)
    return exact


def make_exact_in_c(policy: Policy) -> Policy:
    """Return the policy with exact numerics where C computes them, at next to no cost; else itself.

    Raises LagzeroError when a token that is tried out differs.
    """
    native = replace(policy, native=None)
    return policy if make_native(native) is not None else _in_c(native)


def make_exact_by_tiles(policy: Policy) -> Policy:
    """Return the policy with exact numerics by Triton kernels, as ``make_exact`` does on a GPU."""
    reason = tiles.why_not(policy)
    if reason is not None:
        raise LagzeroError(
            f"model.numerics: exact on model.device {policy.device} needs the Triton kernels, and "
            f"{reason}. Set model.device: cpu, or model.numerics: fast"
        )
    how = ExactNumerics(tiles.install_tiles(policy), f"the weights are on {policy.device}")
    exact = replace(policy, exact=how)
    _try_out(exact)
    return exact


def _in_c(policy: Policy) -> Policy:
    """Let the modules of a policy that decodes in C compute as its decoder does."""
    install_rows(policy)
    how = ExactNumerics(kernels_of(policy.products), products=policy.products)
    exact = replace(policy, exact=how)
    _try_out(exact)
    return exact


def _checked(policy: Policy, thread_counts: Sequence[int], reason: str) -> Policy:
    """Let the modules multiply as the self-check finds exact."""
    threads = list(dict.fromkeys([torch.get_num_threads(), *thread_counts]))
    modules = list(_multiplying(policy))
    shapes = {shape for _, _, weights in modules for shape in weights}
    products = check_products(sorted(shapes, key=str), threads)
    heads = {shape.head_size for shape in probe_kv_shapes(policy).shapes.values()}
    rows = check_attention(sorted(heads), threads)
    for module, forward, _ in modules:
        install(module, forward, products)
    widened = any(product.widen for product in products.values())
    return replace(policy, exact=ExactNumerics(None, reason, rows, len(shapes), widened))


def _try_out(policy: Policy) -> None:
    exact = policy.exact
    assert exact is not None
    longest = min(12, policy.context_limit // 2)
    traffic = Traffic(
        num_tokens=12,
        longest_prompt=longest,
        longest_response=min(4, longest),
        num_open=3,
        weight_change=0.0,
        take_back=0.0,
    )
    found = compare(policy, play(policy, traffic), traffic)
    if found.num_different:
        hint = "Another number of threads (model.threads) may hold; else set model.numerics: fast"
        if policy.native is not None:
            hint = "engine.decoder: torch may hold; else set model.numerics: fast"
        elif exact.kernels is not None:
            hint = "Set model.device: cpu, or model.numerics: fast"
        raise LagzeroError(
            f"model.numerics: exact does not hold for {type(policy.module).__name__} on this "
            f"machine with {torch.get_num_threads()} threads ({exact}): {found.num_different} of "
            f"{found.num_tokens} sampled tokens have another log-prob in training (up to "
            f"{found.gap_max:.2g} nats). {hint}"
        )


def _multiplying(policy: Policy) -> Iterator[tuple[torch.nn.Module, Any, list[Shape]]]:
    """Yield every module with a product of its own, its exact forward, and the products' shapes."""
    from transformers.pytorch_utils import Conv1D  # late: an engine that decodes in C needs none

    head = policy.module.get_output_embeddings()
    for name, module in policy.module.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.ndim >= 2]
        if not own or isinstance(module, torch.nn.Embedding):
            continue
        weight: Any = getattr(module, "weight", None)
        if type(module).forward is torch.nn.Linear.forward:
            dtypes = {weight.dtype}
            if policy.fp32_head and module is head:
                dtypes.add(torch.float32)
            yield module, linear_forward, [shape_of(weight, dtype) for dtype in dtypes]
        elif isinstance(module, Conv1D):
            yield module, transposed_forward, [shape_of(weight.t(), weight.dtype)]
        elif all(getattr(module, k, None) is v for k, v in _EXPERTS_LAYOUT.items()):
            yield module, experts_forward, [shape_of(p[0], p.dtype) for p in own]
        elif len(own) == 1 and own[0] is weight and weight.ndim == 2:
            # Some routers multiply in float32 for precision.
            dtypes = {weight.dtype, torch.float32}
            yield module, router_forward, [shape_of(weight, dtype) for dtype in dtypes]
        else:
            raise LagzeroError(
                f"model.numerics: exact does not know how {name} ({type(module).__name__}) "
                "multiplies; it knows linear layers, routers and gated experts of transformers. "
                "Use another model, or model.numerics: fast"
            )
