"""AdamW on float32 weights, whatever type the model computes in."""

# torch's own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from lagzero.config import OptimizerConfig
from lagzero.errors import LagzeroError
from lagzero.numerics.memory import lazy_zeros
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


class Optimizer:
    """AdamW with float32 master weights for parameters of a smaller type.

    A smaller type's gradient is added to the master's float32 gradient as soon as backward has it,
    and freed. An update that is below the parameter's spacing is thus kept in the master until
    enough of them add up. Parameters are written in place, so whoever shares them sees the update.

    Weight decay acts on matrices only, never on norms and biases. Source of AdamW: Loshchilov and
    Hutter 2019.

    Args:
        parameters: the trained ones, by name.
        master_weights: keep float32 masters; False trains small types directly.
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
        self._parameters = dict(parameters)
        self._masters: dict[str, torch.nn.Parameter] = {}
        for name, parameter in parameters.items():
            if master_weights and parameter.dtype.itemsize < 4:
                self._masters[name] = torch.nn.Parameter(parameter.detach().float())
                parameter.register_post_accumulate_grad_hook(self._mover(name))
            else:
                self._masters[name] = parameter
        matrices = [m for m in self._masters.values() if m.ndim >= 2]
        others = [m for m in self._masters.values() if m.ndim < 2]
        groups = [(matrices, config.weight_decay), (others, 0.0)]
        self._adamw = torch.optim.AdamW(
            [{"params": ps, "weight_decay": decay} for ps, decay in groups if ps],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def _mover(self, name: str) -> Callable[[torch.Tensor], None]:
        def move(parameter: torch.Tensor) -> None:
            master, grad = self._masters[name], parameter.grad
            if grad is None:  # it was added to ``main_grad``
                return
            if master.grad is None:
                master.grad = grad.float()
            else:
                master.grad.add_(grad)
            parameter.grad = None

        return move

    @property
    def lr(self) -> float:
        """Rate of the next update."""
        step = self.num_steps // self.updates_per_step
        return learning_rate(self.config, step, self.total_steps)

    def step(self) -> float:
        """Clip, update, write back and clear the gradients; return their norm before clipping.

        Raises LagzeroError for a norm that is not finite; weights and moments are then unchanged.
        """
        grads = [m.grad for m in self._masters.values() if m.grad is not None]
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
        if limit is not None and value > limit:
            for grad in grads:
                grad.mul_(limit / value)
        for group in self._adamw.param_groups:
            group["lr"] = self.lr
        self._adamw.step()
        self.num_steps += 1
        self._write_back()
        self.clear()
        return value

    def begin(self, zeros: bool = False) -> None:
        """Drop all gradients. With ``zeros`` float32 weights and masters get new ones, of zeros.

        A parameter whose master another is knows the master's as ``main_grad``: who adds to it
        there leaves nothing for autograd to add. They lie in memory of their own, which goes back
        to the system when they are dropped: so nothing of them is left while a step samples.
        """
        self.clear()
        owners = {n: m for n, m in self._masters.items() if zeros and m.dtype == torch.float32}
        if not owners:
            return
        size = sum(m.numel() for m in owners.values())
        space = lazy_zeros((size,), torch.float32, next(iter(owners.values())).device)
        parts = space.split([m.numel() for m in owners.values()])
        for (name, master), part in zip(owners.items(), parts, strict=True):
            master.grad = part.view_as(master)
            if master is not self._parameters[name]:
                setattr(self._parameters[name], MAIN_GRAD, master.grad)

    def clear(self) -> None:
        """Drop all gradients."""
        for name, master in self._masters.items():
            master.grad = self._parameters[name].grad = None
            if hasattr(self._parameters[name], MAIN_GRAD):
                delattr(self._parameters[name], MAIN_GRAD)

    @torch.no_grad()
    def _write_back(self) -> None:
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                self._parameters[name].copy_(master)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return weights, both moments and the step count: all that an exact resume needs."""
        out = {"num_steps": torch.tensor(self.num_steps)}
        for name, master in self._masters.items():
            out[f"weight.{name}"] = master.detach()
            moments = self._adamw.state.get(master)
            if moments:
                out[f"first_moment.{name}"] = moments["exp_avg"]
                out[f"second_moment.{name}"] = moments["exp_avg_sq"]
        return out

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what ``state_dict`` returned, parameters included.

        Raises LagzeroError, changing nothing, when names, shapes or types differ.
        """
        self._check(state)
        self.clear()
        self.num_steps = int(state["num_steps"])
        for name, master in self._masters.items():
            master.copy_(state[f"weight.{name}"])
            self._adamw.state.pop(master, None)
            if f"first_moment.{name}" in state:
                self._adamw.state[master] = {
                    "step": torch.tensor(float(self.num_steps), device=master.device),
                    "exp_avg": state[f"first_moment.{name}"].to(master.device, copy=True),
                    "exp_avg_sq": state[f"second_moment.{name}"].to(master.device, copy=True),
                }
        self._write_back()

    def _check(self, state: Mapping[str, torch.Tensor]) -> None:
        problems: list[str] = []
        known = {"num_steps"}
        for name, master in self._masters.items():
            for kind in ("weight", "first_moment", "second_moment"):
                key = f"{kind}.{name}"
                known.add(key)
                found = state.get(key)
                if found is None:
                    if kind == "weight" or self._has_moments(state):
                        problems.append(f"{key}: missing")
                elif found.shape != master.shape or found.dtype != master.dtype:
                    problems.append(
                        f"{key}: {list(found.shape)} {found.dtype}, here {list(master.shape)} "
                        f"{master.dtype}"
                    )
        problems.extend(f"{key}: not a part of this model" for key in state.keys() - known)
        if "num_steps" not in state:
            problems.append("num_steps: missing")
        if problems:
            raise LagzeroError(
                "the saved optimiser state is of another model or configuration:\n"
                + "\n".join(sorted(problems)[:20])
            )

    @staticmethod
    def _has_moments(state: Mapping[str, torch.Tensor]) -> bool:
        return any(key.startswith("first_moment.") for key in state)
