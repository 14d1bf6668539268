"""Loss inputs from plain lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from lagzero.losses.inputs import LossInputs


@pytest.fixture(scope="session")
def facts() -> Callable[..., LossInputs]:
    """A function (behaviour, advantages, ...) -> inputs, float64 unless told."""

    def make(
        behaviour: Sequence[float],
        advantages: Sequence[float],
        sequences: Sequence[int] | None = None,
        reference: Sequence[float] | None = None,
        lags: Sequence[int] | None = None,
        proximal: Sequence[float] | None = None,
        groups: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> LossInputs:
        n, version = len(behaviour), 100
        sequences = list(range(n)) if sequences is None else sequences
        lags = [0] * n if lags is None else lags

        def real(values: Sequence[float] | None) -> torch.Tensor | None:
            return None if values is None else torch.tensor(values, dtype=dtype)

        return LossInputs(
            torch.tensor(behaviour, dtype=dtype),
            real(reference),
            torch.tensor(advantages, dtype=dtype),
            torch.tensor([version - lag for lag in lags], dtype=torch.int32),
            torch.tensor(sequences, dtype=torch.int64),
            max(sequences, default=-1) + 1,
            version,
            real(proximal),
            None if groups is None else torch.tensor(groups),
        )

    return make
