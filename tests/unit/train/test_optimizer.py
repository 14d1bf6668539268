"""AdamW, its schedule and its float32 master weights."""

from __future__ import annotations

import pytest
import torch

from lagzero.config import OptimizerConfig
from lagzero.errors import LagzeroError
from lagzero.numerics.rounding import join
from lagzero.numerics.rows import MAIN_GRAD
from lagzero.train.optimizer import Optimizer, learning_rate


def parameter(values: list[float] | list[list[float]], dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


def backward(weight: torch.nn.Parameter, grad: list[float] | list[list[float]]) -> None:
    (weight * torch.tensor(grad, dtype=weight.dtype)).sum().backward()


def test_first_two_updates_by_hand():
    """Gradient 2 twice: m / sqrt(v) is 1 after bias correction, so each step is -lr."""
    weight = parameter([1.0], torch.float32)
    optimizer = Optimizer({"w": weight}, OptimizerConfig(lr=0.1, max_grad_norm=None))
    for expected in (0.9, 0.8):
        backward(weight, [2.0])
        assert optimizer.step() == pytest.approx(2.0)
        assert weight.item() == pytest.approx(expected, abs=1e-6)


def test_updates_below_the_spacing_of_bfloat16_add_up_in_masters():
    """LO6's figures: at 1.0 bfloat16's spacing is 0.0078 (0.0039 below), so 0.001 alone is lost;
    ten of them are 0.01."""
    weight = parameter([1.0], torch.bfloat16)
    optimizer = Optimizer({"w": weight}, OptimizerConfig(lr=0.001))
    moved: list[float] = []
    for _ in range(10):
        backward(weight, [1.0])
        optimizer.step()
        moved.append(weight.item())
    assert moved[0] == 1.0
    assert moved[-1] == torch.tensor(0.99).bfloat16().item()


def test_updates_below_the_spacing_of_bfloat16_add_up_on_average_without_masters():
    """Ten updates of 0.001 by a spacing of 0.0039: each weight has moved by 0 to 10 spacings, 0.01
    on average. Of 4,096 weights the mean's standard error is 0.0001 (a weight's is at most
    sqrt(10 / 4) spacings, 0.0062)."""
    weight = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = Optimizer({"w": weight}, OptimizerConfig(lr=0.001, max_grad_norm=None), False)
    for _ in range(10):
        backward(weight, [1.0] * 4096)
        optimizer.step()
    spacings = (1 - weight.float()) / 2**-8
    assert set(spacings.tolist()) <= set(range(11))
    assert (1 - weight.float().mean()).item() == pytest.approx(0.01, abs=0.0005)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_those_of_torchs_adamw_in_float32(dtype: torch.dtype):
    """Of weights larger than what is updated at a time, and one whose gradient comes late."""
    generator = torch.Generator().manual_seed(3)
    sizes = {"large": (1200, 1001), "vector": (7,), "late": (2, 3)}
    start = {n: torch.randn(size, generator=generator).to(dtype) for n, size in sizes.items()}
    ours = {n: torch.nn.Parameter(t.clone()) for n, t in start.items()}
    theirs = {n: torch.nn.Parameter(t.float()) for n, t in start.items()}
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, max_grad_norm=None)
    optimizer = Optimizer(ours, config)
    matrices = [p for p in theirs.values() if p.ndim == 2]
    torchs = torch.optim.AdamW(
        [{"params": matrices}, {"params": [theirs["vector"]], "weight_decay": 0.0}],
        lr=0.01,
        weight_decay=0.1,
    )
    for step in range(4):
        for name in [n for n in sizes if n != "late" or step >= 2]:
            grad = torch.randn(sizes[name], generator=generator).to(dtype)
            (ours[name] * grad).sum().backward()
            theirs[name].grad = grad.float()
        optimizer.step()
        torchs.step()
        torchs.zero_grad()
    state = optimizer.state_dict()
    for name, expected in theirs.items():
        found = ours[name].detach().float()
        if dtype == torch.bfloat16:
            rounded = found.clone()
            join(ours[name].detach(), state[f"rest.{name}"], found)
            assert torch.equal((rounded - found).abs(), (found.bfloat16() - found).abs())
        torch.testing.assert_close(found, expected.detach(), rtol=2e-6, atol=1e-7)


def test_moments_in_bfloat16_are_right_on_average():
    """1,000 gradients of 2: v nears 4 by (4 - v) / 1000 a step, which from v = 1 on is less than
    half of bfloat16's spacing, 0.0078; nearest rounding would stop there. m stops 1.6 % early."""
    weight = torch.nn.Parameter(torch.zeros(2048))
    config = OptimizerConfig(moments="bfloat16", max_grad_norm=None)
    optimizer = Optimizer({"w": weight}, config)
    for _ in range(1000):
        backward(weight, [2.0] * 2048)
        optimizer.step()
    state = optimizer.state_dict()
    mean, square = state["first_moment.w"], state["second_moment.w"]
    assert mean.dtype == square.dtype == torch.bfloat16
    assert mean.float().mean().item() == pytest.approx(2.0, rel=0.001)
    assert square.float().mean().item() == pytest.approx(4 * (1 - 0.999**1000), rel=0.002)


def test_small_gradients_of_many_rows_add_up_in_float32():
    """256 + 1 is 256 in bfloat16: a bfloat16 sum of 1 and 256 ones would stop at 256."""
    weight = parameter([1.0], torch.bfloat16)
    optimizer = Optimizer({"w": weight}, OptimizerConfig(max_grad_norm=None))
    for grad in [256.0, *[1.0] * 100]:
        backward(weight, [grad])
        assert weight.grad is None  # freed at once
    assert optimizer.step() == 356.0


def test_parameters_are_written_in_place():
    weight = parameter([1.0, 2.0], torch.bfloat16)
    shared = weight.detach()
    optimizer = Optimizer({"w": weight}, OptimizerConfig(lr=0.5))
    backward(weight, [1.0, 1.0])
    optimizer.step()
    assert shared.tolist() == [0.5, 1.5]


def test_clipping_scales_to_the_norm_and_reports_it_before():
    """Gradient (3, 4) has norm 5. AdamW hides the scale, so it is read from the first moment:
    0.1 * gradient * 0.5 / 5."""
    weight = parameter([0.0, 0.0], torch.float32)
    optimizer = Optimizer({"w": weight}, OptimizerConfig(max_grad_norm=0.5))
    backward(weight, [3.0, 4.0])
    assert optimizer.step() == pytest.approx(5.0)
    moment = optimizer.state_dict()["first_moment.w"]
    assert moment.tolist() == pytest.approx([0.03, 0.04])


@pytest.mark.parametrize("masters", [True, False])
def test_gradients_may_begin_as_zeros_and_the_update_is_the_same(masters: bool):
    updated: list[list[torch.Tensor]] = []
    for zeros in (False, True):
        weights = [parameter([[1.0, -2.0]], torch.float32), parameter([3.0], torch.float32)]
        small = parameter([0.5], torch.bfloat16)
        optimizer = Optimizer(
            dict(zip("abc", (*weights, small), strict=True)), OptimizerConfig(lr=0.1), masters
        )
        for _ in range(2):
            optimizer.begin(zeros)
            assert small.grad is None  # a float32 sum takes what backward gives
            assert hasattr(small, MAIN_GRAD) is zeros
            laid_out = [w.grad for w in weights]
            assert all((g is not None and not g.any()) if zeros else g is None for g in laid_out)
            for weight, grad in zip((*weights, small), ([[3.0, 4.0]], [1.0], [2.0]), strict=True):
                backward(weight, grad)
            assert not zeros or all(w.grad is g for w, g in zip(weights, laid_out, strict=True))
            optimizer.step()
            assert all(w.grad is None for w in weights)
        updated.append([w.detach().clone() for w in (*weights, small)])
    assert all(torch.equal(a, b) for a, b in zip(*updated, strict=True))


def test_weight_decay_acts_on_matrices_only():
    matrix, vector = parameter([[1.0]], torch.float32), parameter([1.0], torch.float32)
    config = OptimizerConfig(lr=0.1, weight_decay=0.5)
    optimizer = Optimizer({"m": matrix, "v": vector}, config)
    backward(matrix, [[0.0]])
    backward(vector, [0.0])
    optimizer.step()
    assert (matrix.item(), vector.item()) == (pytest.approx(0.95), 1.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_names_the_step_and_changes_nothing(
    bad: float, dtype: torch.dtype
):
    weight, other = parameter([1.0, 1.0], dtype), parameter([1.0], dtype)
    optimizer = Optimizer({"w": weight, "o": other}, OptimizerConfig(lr=0.5))
    backward(weight, [1.0, 1.0])
    optimizer.step()
    before = {name: t.clone() for name, t in optimizer.state_dict().items()}
    backward(weight, [1.0, bad])
    backward(other, [1.0])
    with pytest.raises(LagzeroError, match=f"optimiser step 2: the gradient's norm is {bad}"):
        optimizer.step()
    after = optimizer.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    backward(weight, [1.0, 1.0])  # and nothing of the bad gradient is left
    assert optimizer.step() == pytest.approx(2**0.5)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_schedules_warm_up_and_end_above_zero(schedule: str, expected: list[float]):
    config = OptimizerConfig.model_validate({"lr": 1.0, "schedule": schedule, "warmup_steps": 2})
    assert [learning_rate(config, step, 6) for step in range(6)] == pytest.approx(expected)
    assert learning_rate(config, 99, 6) == pytest.approx(expected[-1])


@pytest.mark.parametrize(
    ("schedule", "decay_steps", "expected"),
    [
        ("linear", 1, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", 4, [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", 4, [0.5, 1.0, 1.0, 1.0, 1.0, 0.8535534, 0.5, 0.1464466]),
        ("linear", 6, [0.5, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("linear", 99, [0.5, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),  # all after warm-up
    ],
)
def test_the_rate_falls_in_the_last_steps_only(
    schedule: str, decay_steps: int, expected: list[float]
):
    config = OptimizerConfig.model_validate(
        {"lr": 1.0, "schedule": schedule, "warmup_steps": 2, "decay_steps": decay_steps}
    )
    assert [learning_rate(config, step, 8) for step in range(8)] == pytest.approx(expected)
    assert learning_rate(config, 99, 8) == pytest.approx(expected[-1])


def test_state_resumes_bit_for_bit():
    def train(
        weight: torch.nn.Parameter, late: torch.nn.Parameter, optimizer: Optimizer, steps: range
    ) -> None:
        for step in steps:
            backward(weight, [[0.1 * step, -0.3], [0.7, 0.05 * step]])
            if step >= 2:  # as an expert's that no token chose before
                backward(late, [0.3])
            optimizer.step()

    for dtype, moments, masters in (
        (torch.float32, "float32", True),
        (torch.float32, "bfloat16", True),
        (torch.bfloat16, "float32", True),
        (torch.bfloat16, "bfloat16", True),
        (torch.bfloat16, "float32", False),
        (torch.bfloat16, "bfloat16", False),
    ):
        config = OptimizerConfig.model_validate(
            {"lr": 0.01, "schedule": "cosine", "weight_decay": 0.1, "moments": moments}
        )

        def make(
            values: list[list[float]],
            dtype: torch.dtype = dtype,
            config: OptimizerConfig = config,
            masters: bool = masters,
        ) -> tuple[torch.nn.Parameter, torch.nn.Parameter, Optimizer]:
            weight, late = parameter(values, dtype), parameter([1.0], dtype)
            optimizer = Optimizer({"w": weight, "late": late}, config, masters, total_steps=6)
            return weight, late, optimizer

        straight, _, whole = one = make([[1.0, 2.0], [3.0, 4.0]])
        train(*one, range(6))
        *_, half = first = make([[1.0, 2.0], [3.0, 4.0]])
        train(*first, range(3))
        saved = {name: t.clone() for name, t in half.state_dict().items()}
        second, _, rest = other = make([[0.0, 0.0], [0.0, 0.0]])
        rest.load_state_dict(saved)
        train(*other, range(3, 6))
        assert torch.equal(second, straight)
        for name, tensor in whole.state_dict().items():
            assert torch.equal(rest.state_dict()[name], tensor), name


def test_a_type_that_is_not_trained_is_refused():
    with pytest.raises(ValueError, match=r"bfloat16 and larger .*'w': torch.float16"):
        Optimizer({"w": parameter([1.0], torch.float16)}, OptimizerConfig())


def test_state_of_another_model_is_refused_whole():
    weight = parameter([1.0, 2.0], torch.float32)
    optimizer = Optimizer({"w": weight}, OptimizerConfig())
    good = {name: t.clone() for name, t in optimizer.state_dict().items()}
    for change, message in [
        ({"weight.w": torch.zeros(3)}, r"weight.w: \[3\]"),
        ({"weight.w": torch.zeros(2).bfloat16()}, "weight.w: .* torch.bfloat16"),
        ({"weight.other": torch.zeros(3)}, "weight.other: not a part"),
        ({"rest.w": torch.zeros(2).short()}, "rest.w: not a part"),  # of a float32 weight
        ({"first_moment.w": torch.zeros(2).bfloat16()}, "first_moment.w: .* torch.bfloat16"),
    ]:
        with pytest.raises(LagzeroError, match=message):
            optimizer.load_state_dict({**good, **change})
    with pytest.raises(LagzeroError, match=r"second_moment\.w: missing\nweight\.w: missing"):
        optimizer.load_state_dict({"num_steps": torch.tensor(1)})
    assert weight.tolist() == [1.0, 2.0]
    assert optimizer.num_steps == 0
