"""Build the C sources once for this machine, and load them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch  # loads the OpenMP runtime whose threads the library shares

SOURCES = (
    "decoder.c",
    "amx.h",
    "attend_back.h",
    "attention.h",
    "backward.h",
    "int16.h",
    "linear.h",
    "model.h",
    "product.h",
    "rows.h",
    "sampling.h",
    "scores.h",
    "tile_rows.h",
    "unit.h",
    "vectors.h",
)
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC", "-std=gnu11")


class NotBuilt(Exception):
    """The library cannot be made here; the text says why."""


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled library, from the cache if these sources were built here before.

    It lies in ``$XDG_CACHE_HOME/lagzero`` (``~/.cache/lagzero``) by a hash of sources, compiler
    and processor. The OpenMP functions that it calls are those of torch, whose threads it shares; a
    second set of threads would fight them for the cores. Raises NotBuilt.
    """
    wanted = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "cc"]
    compiler = next(filter(None, map(shutil.which, wanted)), None)
    if compiler is None:
        raise NotBuilt(f"there is no C compiler {' or '.join(wanted)}; the variable CC names one")
    if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        raise NotBuilt(f"torch {torch.__version__} does not share its OpenMP functions")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lagzero"
    path = folder / f"decoder-{_key(compiler)}.so"
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _build(compiler, path)
        except OSError as error:
            raise NotBuilt(f"{folder} cannot be written: {error.strerror}") from error
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotBuilt(f"{path} cannot be loaded: {error}") from error


def _key(compiler: str) -> str:
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    parts = [told.stdout, *_FLAGS, platform.machine(), _processor()]
    parts += [(Path(__file__).parent / name).read_text(encoding="utf-8") for name in SOURCES]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return what the processor can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _build(compiler: str, path: Path) -> None:
    """Compile to a file of another name and rename it: nobody ever loads half a library."""
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        made, done = Path(work) / "decoder.o", Path(work) / "decoder.so"
        source = Path(__file__).parent / SOURCES[0]
        # Linked without -fopenmp, so that its OpenMP calls go to the runtime that torch has loaded.
        for command in (
            [compiler, *_FLAGS, "-c", str(source), "-o", str(made)],
            [compiler, "-shared", str(made), "-o", str(done), "-lm"],
        ):
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode:
                raise NotBuilt(f"{compiler} failed: {_first_line(ran.stderr)}")
        done.replace(path)


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if "error" in line), text.strip()[:200])
