"""AdamW on float32 weights, whatever type the model computes in.

A bfloat16 parameter is the upper half of its float32 master; only the lower half is kept beside it.
An update joins some of the numbers, takes AdamW's step on them and takes them apart again: it makes
nothing that is as large as the model.
"""

# torch's own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from lagzero.config import OptimizerConfig
from lagzero.errors import LagzeroError
from lagzero.numerics.memory import lazy_zeros
from lagzero.numerics.rounding import join, round_at_random, split
from lagzero.numerics.rows import MAIN_GRAD


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the rate of optimiser step ``step``, counted from 0 of ``total_steps``.

    Over the W warm-up steps the rate is lr (step + 1) / W. After them it is lr until step D, with
    D = max(W, total_steps - decay_steps), or W without ``decay_steps``. From there, with x =
    (step - D) / (total_steps - D): constant lr; linear lr (1 - x); cosine lr (1 + cos(pi x)) / 2.
    The last step's rate is above 0, and steps past ``total_steps`` keep the last step's. Source of
    ``decay_steps``: Hu et al. 2024 (MiniCPM), the schedule called WSD.
    """
    warmup = config.warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    step = min(step, max(total_steps - 1, warmup))
    start = warmup if config.decay_steps is None else max(warmup, total_steps - config.decay_steps)
    done = max(step - start, 0) / max(total_steps - start, 1)
    match config.schedule:
        case "constant":
            return config.lr
        case "linear":
            return config.lr * (1 - done)
        case "cosine":
            return config.lr * (1 + math.cos(math.pi * done)) / 2


def global_norm(tensors: Sequence[torch.Tensor]) -> float:
    """Return the Euclidean norm of all elements together, summed over tensors in float64."""
    norms = [
        torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)).double()
        for t in tensors
    ]
    return math.sqrt(float(torch.stack(norms).square().sum()))


@dataclass(slots=True)
class _Weight:
    """A parameter and what is kept beside it: flat, in the parameter's order."""

    parameter: torch.nn.Parameter
    decay: float
    first: torch.Tensor  # mean of the gradients
    second: torch.Tensor  # mean of their squares
    rest: torch.Tensor | None  # int16: what the master has beyond the parameter
    grad: torch.Tensor | None = None  # float32, where the parameter is of a smaller type
    num_updates: int = 0

    @property
    def small(self) -> bool:
        """Whether its gradients are summed in a larger type than its own."""
        return self.parameter.dtype == torch.bfloat16

    @property
    def gradient(self) -> torch.Tensor | None:
        """The sum of what backward gave since the last update; None where it gave none."""
        return self.grad if self.small else self.parameter.grad

    def take_grad(self, parameter: torch.Tensor) -> None:
        """Add what backward has left in the parameter to the gradient, and free it."""
        if parameter.grad is None:  # it was added to ``main_grad``
            return
        if self.grad is None:
            self.grad = parameter.grad.float()
        else:
            self.grad.add_(parameter.grad)
        parameter.grad = None

    def begin(self, grad: torch.Tensor) -> None:
        """Sum gradients in ``grad``, which a parameter of a smaller type knows as ``main_grad``."""
        grad = grad.view_as(self.parameter)
        if self.small:
            self.grad = grad
            setattr(self.parameter, MAIN_GRAD, grad)
        else:
            self.parameter.grad = grad

    def clear(self) -> None:
        """Drop the gradient."""
        self.grad = self.parameter.grad = None
        if hasattr(self.parameter, MAIN_GRAD):
            delattr(self.parameter, MAIN_GRAD)

    def parts(self, num: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield parameter, gradient, moments and the rest, if there is one, ``num`` at a time."""
        assert self.gradient is not None
        lines = [self.parameter.detach().view(-1), self.gradient.reshape(-1)]
        lines += [self.first, self.second, *([] if self.rest is None else [self.rest])]
        return zip(*(line.split(num) for line in lines), strict=True)


class Optimizer:
    """AdamW with float32 master weights for parameters in bfloat16.

    A bfloat16 gradient is added to a float32 one as soon as backward has it, and freed. An update
    that is below a parameter's spacing is kept in its master until enough of them add up. Without
    masters it is rounded at random, so that they add up on average; moments in bfloat16, of which
    an update may change a thousandth, likewise. Parameters are written in place, so whoever shares
    them sees the update.

    Weight decay acts on matrices only, never on norms and biases. Source of AdamW: Loshchilov and
    Hutter 2019.

    Args:
        parameters: the trained ones, by name, contiguous and on one device.
        master_weights: keep float32 masters of parameters in bfloat16.
        total_steps: length of the schedule.
        updates_per_step: calls of ``step`` that share one place of the schedule.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        config: OptimizerConfig,
        master_weights: bool = True,
        total_steps: int = 1,
        updates_per_step: int = 1,
    ):
        if not parameters:
            raise ValueError("an optimiser needs at least one parameter")
        self.config = config
        self.total_steps = total_steps
        self.updates_per_step = updates_per_step
        self.num_steps = 0
        self._device = next(iter(parameters.values())).device
        small = {n: p for n, p in parameters.items() if p.dtype.itemsize < 4}
        if other := {n: p.dtype for n, p in small.items() if p.dtype != torch.bfloat16}:
            raise ValueError(f"bfloat16 and larger types are trained, not {other}")
        if not master_weights:
            small = {}
        rests = dict(zip(small, self._zeros(small.values(), torch.int16), strict=True))
        moments = (self._zeros(parameters.values(), getattr(torch, config.moments)) for _ in "12")
        self._weights = {
            name: _Weight(
                parameter,
                config.weight_decay if parameter.ndim >= 2 else 0.0,
                first,
                second,
                rests.get(name),
            )
            for (name, parameter), first, second in zip(parameters.items(), *moments, strict=True)
        }
        for weight in self._weights.values():
            if weight.small:
                weight.parameter.register_post_accumulate_grad_hook(weight.take_grad)

    def _zeros(self, like: Collection[torch.Tensor], dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """Return a line of zeros for each tensor, whose memory is taken when they are written."""
        sizes = [each.numel() for each in like]
        return lazy_zeros((sum(sizes),), dtype, self._device).split(sizes)

    @property
    def lr(self) -> float:
        """Rate of the next update."""
        step = self.num_steps // self.updates_per_step
        return learning_rate(self.config, step, self.total_steps)

    def step(self) -> float:
        """Clip, update, write back and clear the gradients; return their norm before clipping.

        Raises LagzeroError for a norm that is not finite; weights and moments are then unchanged.
        """
        updated = [w for w in self._weights.values() if w.gradient is not None]
        grads = [w.gradient for w in updated if w.gradient is not None]
        if not grads:
            raise ValueError("no parameter has a gradient")
        value = global_norm(grads)
        if not math.isfinite(value):
            self.clear()
            raise LagzeroError(
                f"optimiser step {self.num_steps + 1}: the gradient's norm is {value}; no weight "
                "was changed. Look at the log-prob and ratio metrics of the steps before"
            )
        limit = self.config.max_grad_norm
        scale = limit / value if limit is not None and value > limit else 1.0
        generator = torch.Generator(self._device).manual_seed(self.num_steps)
        largest = max(grad.numel() for grad in grads)
        spaces = {d: _Space(largest, d, self._device) for d in {grad.dtype for grad in grads}}
        for weight, grad in zip(updated, grads, strict=True):
            self._update(weight, scale, spaces[grad.dtype], generator)
        self.num_steps += 1
        self.clear()
        return value

    @torch.no_grad()
    def _update(
        self, weight: _Weight, scale: float, space: _Space, generator: torch.Generator
    ) -> None:
        for parameter, grad, first, second, *rest in weight.parts(space.size):
            wide, scaled, means, squares = (each[: len(parameter)] for each in space.numbers)
            if rest:
                join(parameter, rest[0], wide)
            else:
                wide = space.of(parameter, wide)
            means, squares = space.of(first, means), space.of(second, squares)
            adamw(
                [wide],
                [torch.mul(grad, scale, out=scaled)],
                [means],
                [squares],
                [],
                [torch.tensor(float(weight.num_updates), device=self._device)],
                fused=True,
                amsgrad=False,
                beta1=self.config.betas[0],
                beta2=self.config.betas[1],
                lr=self.lr,
                weight_decay=weight.decay,
                eps=self.config.eps,
                maximize=False,
            )
            space.keep(means, first, generator)
            space.keep(squares, second, generator)
            if rest:
                split(wide, parameter, rest[0])
            else:
                space.keep(wide, parameter, generator)
        weight.num_updates += 1

    def begin(self, zeros: bool = False) -> None:
        """Drop all gradients. With ``zeros`` those that are summed in float32 begin as zeros.

        A parameter in bfloat16 knows its sum as ``main_grad``: who adds to it there leaves nothing
        for autograd to add. They lie in memory of their own, which goes back to the system when
        they are dropped: so nothing of them is left while a step samples.
        """
        self.clear()
        if not zeros:
            return
        summed = [w for w in self._weights.values() if w.parameter.dtype.itemsize <= 4]
        spaces = self._zeros([w.parameter for w in summed], torch.float32)
        for weight, space in zip(summed, spaces, strict=True):
            weight.begin(space)

    def clear(self) -> None:
        """Drop all gradients."""
        for weight in self._weights.values():
            weight.clear()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return weights, both moments and counts: all that an exact resume needs."""
        counts = [weight.num_updates for weight in self._weights.values()]
        out = {"num_steps": torch.tensor(self.num_steps), "num_updates": torch.tensor(counts)}
        for name, weight in self._weights.items():
            out[f"weight.{name}"] = weight.parameter.detach()
            for kind, line in (
                ("rest", weight.rest),
                ("first_moment", weight.first),
                ("second_moment", weight.second),
            ):
                if line is not None:
                    out[f"{kind}.{name}"] = line.view_as(weight.parameter)
        return out

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what ``state_dict`` returned, parameters included.

        Raises LagzeroError, changing nothing, when names, shapes or types differ.
        """
        own = self.state_dict()
        _check(state, own)
        self.clear()
        self.num_steps = int(state["num_steps"])
        for weight, count in zip(self._weights.values(), state["num_updates"], strict=True):
            weight.num_updates = int(count)
        for name, tensor in own.items():
            tensor.copy_(state[name])


def _check(state: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    problems = [f"{key}: not a part of this model" for key in state.keys() - own.keys()]
    problems += [f"{key}: missing" for key in own.keys() - state.keys()]
    for key in own.keys() & state.keys():
        (found, here) = ((list(each.shape), each.dtype) for each in (state[key], own[key]))
        if found != here:
            problems.append(f"{key}: {found[0]} {found[1]}, here {here[0]} {here[1]}")
    if problems:
        raise LagzeroError(
            "the saved optimiser state is of another model, configuration or version of lagzero:\n"
            + "\n".join(sorted(problems)[:20])
        )


class _Space:
    """Where some numbers of a weight are put together, at most ``largest``, of type ``dtype``."""

    def __init__(self, largest: int, dtype: torch.dtype, device: torch.device):
        # With fewer at a time math threads would go to sleep between calls.
        self.size = min(largest, 1 << 20 if device.type == "cpu" else 1 << 24)
        self.numbers = torch.empty((4, self.size), dtype=dtype, device=device)
        self._draws = torch.empty(-(-self.size // 4), dtype=torch.int64, device=device)

    def of(self, kept: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Return what is kept, as it is or, of another type, in ``place``."""
        return kept if kept.dtype == place.dtype else place.copy_(kept)

    def keep(self, wide: torch.Tensor, kept: torch.Tensor, generator: torch.Generator) -> None:
        """Write numbers back, to bfloat16 rounded at random."""
        if kept.dtype != torch.bfloat16:
            kept.copy_(wide)
            return
        words = self._draws[: -(-len(wide) // 4)]
        words.random_(-(2**63), None, generator=generator)  # pyright: ignore[reportCallIssue]
        round_at_random(wide, kept, words.view(torch.int16)[: len(wide)])
