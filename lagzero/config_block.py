"""What every block of the configuration is made of."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
UserPath = Annotated[str, AfterValidator(os.path.expanduser)]  # so that ~ works wherever it stands


class Block(BaseModel):
    """A part of the configuration: frozen, strict, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
