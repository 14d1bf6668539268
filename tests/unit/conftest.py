"""What unit tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from lagzero.train.verify import tiny_policy


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """A folder with a model that the C library knows."""
    tiny_policy("llama", torch.float32).module.save_pretrained(tmp_path)
    words = {f"w{i}": i for i in range(211)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words)))
    tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)
