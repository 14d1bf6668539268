"""How far behaviour and trainer are apart, by hand."""

import math
from dataclasses import replace

import pytest
import torch

from lagzero.losses.inputs import LossInputs
from lagzero.losses.mismatch import (
    behaviour_metrics,
    effective_sample_share,
    lag_metrics,
    mismatch_metrics,
)
from lagzero.losses.objective import step_metrics
from lagzero.losses.reduce import reduce_metrics


def facts(behaviour: torch.Tensor, versions: list[int] | None = None, own: int = 0) -> LossInputs:
    n = len(behaviour)
    version = torch.tensor(versions or [0] * n)
    return LossInputs(behaviour, None, torch.zeros(n), version, torch.zeros(n).long(), 1, own)


@pytest.mark.parametrize("num_padding", [0, 1, 3])
def test_a_constant_gap_is_reported_as_it_is_with_any_padding(num_padding: int) -> None:
    """LN9: a gap of 1 nat on 12 tokens is 1.0 with 0, 1 or 3 rows of padding masked out."""
    n = 12 + 4 * num_padding
    keep = torch.arange(n) < 12
    behaviour = torch.where(keep, -1.0, float("nan")).double()
    logprobs = torch.where(keep, -2.0, 0.0).double()
    parts = [behaviour_metrics(logprobs[keep], facts(behaviour).where(keep))]
    got = reduce_metrics(parts)
    assert got["behaviour/kl_k1"] == pytest.approx(1.0, abs=1e-12)
    assert got["behaviour/gap_max"] == pytest.approx(1.0, abs=1e-12)
    assert got["behaviour/kl_k3"] == pytest.approx(math.exp(-1), abs=1e-12)  # e^-1 - 1 + 1


def test_both_estimators_have_the_expectation_of_the_kl() -> None:
    mu = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    pi = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    exact = (mu * (mu / pi).log()).sum().item()
    metrics = behaviour_metrics(pi.log(), facts(mu.log()))
    for name in ("kl_k1", "kl_k3"):
        assert (mu * metrics[f"behaviour/{name}"][0]).sum().item() == pytest.approx(
            exact, abs=1e-12
        )


def test_effective_sample_share_by_hand() -> None:
    """Ratios [1, 3]: (4^2) / (2 * 10) = 0.8, however they are cut."""
    behaviour = torch.tensor([-2.0, -2.0], dtype=torch.float64)
    logprobs = behaviour + torch.tensor([1.0, 3.0], dtype=torch.float64).log()
    whole = [behaviour_metrics(logprobs, facts(behaviour))]
    cut = [behaviour_metrics(logprobs[i : i + 1], facts(behaviour[i : i + 1])) for i in (0, 1)]
    assert effective_sample_share(2.0, 5.0) == pytest.approx(0.8, abs=1e-12)
    for parts in (whole, cut):
        got = step_metrics(parts)
        assert got["behaviour/ess_share"] == pytest.approx(0.8, abs=1e-12)
        assert got["behaviour/ratio_mean"] == pytest.approx(2.0, abs=1e-12)
        assert got["behaviour/ratio_max"] == pytest.approx(3.0, abs=1e-12)
        assert "behaviour/ratio_square_mean" not in got


def test_mismatch_reads_tokens_of_the_trainers_own_version_only() -> None:
    behaviour = torch.tensor([-1.0, -1.0, -1.0], dtype=torch.float64)
    logprobs = torch.tensor([-1.25, -9.0, -1.75], dtype=torch.float64)
    got = step_metrics([mismatch_metrics(logprobs, facts(behaviour, [3, 2, 3], own=3))])
    assert got["mismatch/kl_k1"] == pytest.approx(0.5, abs=1e-12)
    assert got["mismatch/gap_max"] == pytest.approx(0.75, abs=1e-12)
    assert step_metrics([mismatch_metrics(logprobs, facts(behaviour, [1, 1, 1], own=3))]) == {}


def test_metrics_carry_no_gradient_and_stay_finite() -> None:
    logprobs = torch.tensor([-1.0, 700.0, -700.0], requires_grad=True)
    metrics = behaviour_metrics(logprobs, facts(torch.tensor([-1.0, -1.0, -1.0])))
    for value, _ in metrics.values():
        assert not value.requires_grad and torch.isfinite(value).all()


def test_the_update_under_way_is_no_part_of_the_mismatch() -> None:
    """In a later pass the policy has moved; behaviour/* still compares prox with mu."""
    behaviour, moved = torch.tensor([-1.0, -1.0]).double(), torch.tensor([-3.0, -0.1]).double()
    inputs = replace(facts(behaviour), proximal_logprobs=behaviour - 0.25)
    for metrics in (behaviour_metrics(moved, inputs), mismatch_metrics(moved, inputs)):
        (kl,) = (value for name, (value, _) in metrics.items() if name.endswith("kl_k1"))
        assert kl.tolist() == [0.25, 0.25]


def test_each_lag_is_measured_by_itself_and_the_old_ones_together() -> None:
    """Lags 0, 1, 1, 8, 30 of version 30; ratios 1, 1, 3, 2, 2."""
    behaviour = torch.full((5,), -2.0, dtype=torch.float64)
    logprobs = behaviour + torch.tensor([1.0, 1.0, 3.0, 2.0, 2.0], dtype=torch.float64).log()
    inputs = facts(behaviour, [30, 29, 29, 22, 0], own=30)
    stopped = torch.tensor([False, True, False, True, True])
    got = step_metrics([lag_metrics(logprobs, inputs, stopped, None)])
    assert {name.split("/")[1] for name in got} == {"0", "1", "8_up"}
    assert got["lag/0/kl_k3"] == 0.0 and got["lag/0/ess_share"] == 1.0
    assert got["lag/1/ratio_mean"] == pytest.approx(2.0, abs=1e-12)
    assert got["lag/1/ess_share"] == pytest.approx(0.8, abs=1e-12)
    assert got["lag/1/kl_k1"] == pytest.approx(-math.log(3) / 2, abs=1e-12)
    assert got["lag/8_up/kl_k3"] == pytest.approx(1 - math.log(2), abs=1e-12)
    assert [got[f"lag/{lag}/stopped_share"] for lag in ("0", "1", "8_up")] == [0.0, 0.5, 1.0]
    assert not any(name.endswith("capped_share") for name in got)
    cut = [lag_metrics(logprobs[k], inputs.where(k), stopped[k], None) for k in (stopped, ~stopped)]
    assert step_metrics(cut) == pytest.approx(got, abs=1e-12)
