"""The llama.cpp peer of ``bench/engine.py``; runs in the environment of ``llama-cpp-python``.

All sequences are decoded in one batch a step, prompts are computed once and their cells copied,
and a sequence that ends gives its place to the last one, so that the batch stays dense. Tokens are
drawn by numpy in as many threads as the library computes with, because its own samplers record no
log-prob. Keys and values are in float16, the library's default.
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np
import peers

Array = np.ndarray[Any, Any]
ERROR = 4  # the library's level


def main() -> None:
    """Sample once, with weights of the type that the peer's name ends with."""
    job, peer = peers.Job.of_arguments()
    lib.llama_log_set(_log, None)
    verb, kind = peer.split("-", 1)
    if verb == "quantize":
        quantize(job, kind)
        return
    file = weights_file(job, kind)
    if not file.exists():  # in a process of its own, whose memory is not this one's
        subprocess.run([sys.executable, *sys.argv[:-1], f"--peer=quantize-{kind}"], check=True)
    begun = time.perf_counter()
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
    if model is None:
        raise OSError(f"llama.cpp cannot load {file}")
    decoder = Decoder(model, job)
    decoder.sample(job.warm_up())
    ready_s = time.perf_counter() - begun
    begun = time.perf_counter()
    rollout = decoder.sample(job)
    seconds = time.perf_counter() - begun
    peers.report(job, rollout, seconds, ready_s, peers.peak_memory_gb())


@lib.llama_log_callback
def _log(level: int, text: bytes, _data: Any) -> None:
    """Pass on errors alone."""
    if level == ERROR:
        sys.stderr.write(text.decode())


def weights_file(job: peers.Job, kind: str) -> Path:
    """Return where weights of a type are; float32 are the bench's own."""
    file = Path(job.gguf)
    return file if kind == "f32" else file.with_suffix(f".{kind}.gguf")


def quantize(job: peers.Job, kind: str) -> None:
    """Let the library write its own bf16, f16 or q8_0 from the float32 file."""
    types = {
        "bf16": lib.LLAMA_FTYPE_MOSTLY_BF16,
        "f16": lib.LLAMA_FTYPE_MOSTLY_F16,
        "q8_0": lib.LLAMA_FTYPE_MOSTLY_Q8_0,
    }
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.nthread = types[kind], job.threads
    target = str(weights_file(job, kind)).encode()
    if lib.llama_model_quantize(job.gguf.encode(), target, params):
        raise OSError(f"llama.cpp cannot write {target.decode()}")


class Decoder:
    """One context. Sequence i of the cache is always in place i of the batch."""

    def __init__(self, model: Any, job: peers.Job):
        self._vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        params = lib.llama_context_default_params()
        params.n_seq_max = job.num_sequences
        params.n_ctx = job.num_sequences * -(-(job.longest + 1) // 256) * 256
        self._most = max(512, sum(map(len, job.prompts)), job.num_sequences)
        params.n_batch, params.n_ubatch = self._most, 512
        params.n_threads = params.n_threads_batch = job.threads
        params.no_perf = True
        params.kv_unified = False  # else every token looks through the cells of all sequences
        self._context = lib.llama_init_from_model(model, params)
        if self._context is None:
            raise OSError("llama.cpp cannot make a context")
        self._memory = lib.llama_get_memory(self._context)
        self._pool = ThreadPoolExecutor(job.threads)
        self._threads = job.threads

    def sample(self, job: peers.Job) -> peers.Rollout:
        """Sample until every sequence has ended."""
        rng = np.random.default_rng(0)
        lib.llama_memory_clear(self._memory, False)
        rows: list[list[int]] = [[] for _ in range(job.num_sequences)]
        logprobs: list[list[float]] = [[] for _ in rows]
        places = list(range(len(rows)))  # which sequence is in each place of the batch
        logits = np.repeat(self._prefill(job), job.samples, 0)
        positions = [len(prompt) for prompt in job.prompts for _ in range(job.samples)]
        while True:
            drawn = self._draw(logits, rng.random(len(places)), job.temperature)
            for place, (token, logprob) in zip(places, drawn, strict=True):
                rows[place].append(token)
                logprobs[place].append(logprob)
            ended = [
                at
                for at, place in enumerate(places)
                if rows[place][-1] in job.ends or len(rows[place]) == job.max_new_tokens
            ]
            for at in reversed(ended):
                self._remove(at, len(places) - 1)
                places[at] = places[-1]
                places.pop()
            if not places:
                return peers.Rollout(rows, logprobs)
            newest = [
                (rows[p][-1], positions[p] + len(rows[p]) - 1, at) for at, p in enumerate(places)
            ]
            logits = self._decode(newest, range(len(newest)))

    def _prefill(self, job: peers.Job) -> Array:
        """Compute each prompt once, for all its samples; return the logits behind it."""
        flat: list[tuple[int, int, int]] = []
        last: list[int] = []
        for number, prompt in enumerate(job.prompts):
            flat += [(token, at, number * job.samples) for at, token in enumerate(prompt)]
            last.append(len(flat) - 1)
        logits = self._decode(flat, last)
        for first in range(0, job.num_sequences, job.samples):
            for other in range(first + 1, first + job.samples):
                lib.llama_memory_seq_cp(self._memory, first, other, -1, -1)
        return logits

    def _remove(self, at: int, last: int) -> None:
        """Free a place and put the last sequence there."""
        lib.llama_memory_seq_rm(self._memory, at, -1, -1)
        if at != last:
            lib.llama_memory_seq_cp(self._memory, last, at, -1, -1)
            lib.llama_memory_seq_rm(self._memory, last, -1, -1)

    def _decode(self, flat: Any, outputs: Any) -> Array:
        """Compute (token, position, sequence) of a flat row; return the logits at ``outputs``."""
        batch = lib.llama_batch_init(len(flat), 0, 1)
        batch.n_tokens = len(flat)
        for at, (token, position, sequence) in enumerate(flat):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.logits[at] = 0
        for at in outputs:
            batch.logits[at] = 1
        code = lib.llama_decode(self._context, batch)
        lib.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        logits = lib.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (len(outputs), self._vocab))

    def _draw(self, logits: Array, uniform: Array, temperature: float) -> list[tuple[int, float]]:
        """Return a token and its log-prob for each row."""

        def one(row: Array, number: float) -> tuple[int, float]:
            shifted = row - row.max()
            if temperature not in (0, 1):
                shifted /= temperature
            mass = np.exp(shifted).cumsum(dtype=np.float64)
            if temperature == 0:
                token = int(row.argmax())
            else:
                token = int(mass.searchsorted(number * mass[-1], side="right"))
            return token, float(shifted[token] - np.log(mass[-1]))

        return list(self._pool.map(one, logits, uniform, chunksize=1))


if __name__ == "__main__":
    main()
