"""When a sequence ends, and what text it then has.

The rule for stop strings: ids and log-probs end with the token that completes the stop string (it
was sampled, and the decision to stop is the policy's), whatever else that token holds. The text
ends with the stop string (``include_stop``) or before it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from lagzero.engine.request import Sampling, Sequence
from lagzero.types import Finish


class Decoder(Protocol):
    """What the engine needs of a tokenizer."""

    def decode(self, token_ids: Seq[int], skip_special_tokens: bool = ...) -> str:
        """Return the text of ids."""
        ...


def _cut(text: str, sampling: Sampling) -> tuple[str, bool]:
    """Return the text up to the earliest stop string, and whether there was one."""
    found = [(text.find(stop), stop) for stop in sampling.stop_strings]
    found = [(at, stop) for at, stop in found if at >= 0]
    if not found:
        return text, False
    at, stop = min(found, key=lambda pair: (pair[0] + len(pair[1]), pair[0]))
    return text[: at + len(stop) if sampling.include_stop else at], True


def finish_reason(seq: Sequence, decoder: Decoder, context_limit: int) -> Finish | None:
    """Say why a sequence ends now, or None while it goes on."""
    sampling = seq.request.sampling
    if seq.num_new and seq.ids[-1] in sampling.stop_ids:
        return Finish.STOP
    if seq.num_new and sampling.stop_strings:
        # A character takes at most 4 tokens (its bytes), so a stop string that ends with the
        # newest token lies within this tail.
        tail = 4 * max(map(len, sampling.stop_strings)) + 4
        text = decoder.decode(seq.ids[max(seq.num_prompt, len(seq.ids) - tail) :])
        if _cut(text, sampling)[1]:
            return Finish.STOP
    if seq.num_new >= sampling.max_new_tokens:
        return Finish.LENGTH
    if len(seq.ids) >= context_limit:
        return Finish.CONTEXT
    return None


def final_text(seq: Sequence, decoder: Decoder) -> str:
    """Return what the sequence says: without special tokens, cut at its stop string."""
    text = decoder.decode(seq.ids[seq.num_prompt :], skip_special_tokens=True)
    return _cut(text, seq.request.sampling)[0]
