"""Keeps the libraries' own progress bars and advice out of a run's output."""

from __future__ import annotations

import os
import warnings

from transformers.utils import logging


def quiet_libraries() -> None:
    """Show no progress bars, no advice and no warnings about the libraries' future."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
