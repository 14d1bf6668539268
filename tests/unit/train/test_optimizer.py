"""AdamW, its schedule and its float32 master weights."""

from __future__ import annotations

import pytest
import torch

from lagzero.config import OptimizerConfig
from lagzero.errors import LagzeroError
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


def test_updates_below_the_spacing_of_bfloat16_add_up():
    """LO6's figures: at 1.0 bfloat16's spacing is 0.0078 (0.0039 below), so 0.001 alone is lost;
    ten of them are 0.01. Without master weights the weight never moves."""
    moved: dict[bool, list[float]] = {}
    for master_weights in (True, False):
        weight = parameter([1.0], torch.bfloat16)
        optimizer = Optimizer({"w": weight}, OptimizerConfig(lr=0.001), master_weights)
        moved[master_weights] = []
        for _ in range(10):
            backward(weight, [1.0])
            optimizer.step()
            moved[master_weights].append(weight.item())
    assert moved[False] == [1.0] * 10
    assert moved[True][0] == 1.0
    assert moved[True][-1] == torch.tensor(0.99).bfloat16().item()


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


def test_gradients_may_begin_as_zeros_and_the_update_is_the_same():
    updated: list[list[torch.Tensor]] = []
    for zeros in (False, True):
        weights = [parameter([[1.0, -2.0]], torch.float32), parameter([3.0], torch.float32)]
        small = parameter([0.5], torch.bfloat16)
        optimizer = Optimizer(
            dict(zip("abc", (*weights, small), strict=True)), OptimizerConfig(lr=0.1)
        )
        for _ in range(2):
            optimizer.begin(zeros)
            assert small.grad is None  # its master takes what backward gives
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
    def train(weight: torch.nn.Parameter, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            backward(weight, [[0.1 * step, -0.3], [0.7, 0.05 * step]])
            optimizer.step()

    config = OptimizerConfig(lr=0.01, schedule="cosine", weight_decay=0.1)
    for dtype in (torch.float32, torch.bfloat16):
        straight = parameter([[1.0, 2.0], [3.0, 4.0]], dtype)
        whole = Optimizer({"w": straight}, config, total_steps=6)
        train(straight, whole, range(6))
        first = parameter([[1.0, 2.0], [3.0, 4.0]], dtype)
        half = Optimizer({"w": first}, config, total_steps=6)
        train(first, half, range(3))
        saved = {name: t.clone() for name, t in half.state_dict().items()}
        second = parameter([[0.0, 0.0], [0.0, 0.0]], dtype)
        rest = Optimizer({"w": second}, config, total_steps=6)
        rest.load_state_dict(saved)
        train(second, rest, range(3, 6))
        assert torch.equal(second, straight)
        for name, tensor in whole.state_dict().items():
            assert torch.equal(rest.state_dict()[name], tensor), name


def test_state_of_another_model_is_refused_whole():
    weight = parameter([1.0, 2.0], torch.float32)
    optimizer = Optimizer({"w": weight}, OptimizerConfig())
    good = {name: t.clone() for name, t in optimizer.state_dict().items()}
    for change, message in [
        ({"weight.w": torch.zeros(3)}, r"weight.w: \[3\]"),
        ({"weight.w": torch.zeros(2).bfloat16()}, "weight.w: .* torch.bfloat16"),
        ({"weight.other": torch.zeros(3)}, "weight.other: not a part"),
        ({"first_moment.w": torch.zeros(2)}, "second_moment.w: missing"),
    ]:
        with pytest.raises(LagzeroError, match=message):
            optimizer.load_state_dict({**good, **change})
    with pytest.raises(LagzeroError, match=r"weight\.w: missing"):
        optimizer.load_state_dict({"num_steps": torch.tensor(1)})
    assert weight.tolist() == [1.0, 2.0]
    assert optimizer.num_steps == 0
