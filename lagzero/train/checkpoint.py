"""Checkpoints of a run: ``<run>/checkpoints/step-000010/``, complete or not there.

policy/                 the model folder or adapter folder, as transformers and PEFT load it
trainer.safetensors     weights, moments; the critic's too
trainer.json            version and other scalars of the trainer
<name>.json             one for each further part of the state, such as the data cursor
complete.json           every file with its size; written last
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType]
    save_file,  # pyright: ignore[reportUnknownVariableType]
)

from lagzero.errors import LagzeroError

_MARKER = "complete.json"
_TENSORS = "trainer.safetensors"
_VALUES = "trainer.json"
_FOLDER = "checkpoints"
_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a run resumes from. ``parts`` holds the JSON of every further part, by name."""

    step: int
    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Any]
    parts: Mapping[str, Any]


def save_checkpoint(
    run: Path,
    checkpoint: Checkpoint,
    write_policy: Callable[[Path], None],
    keep: int = 2,
) -> Path:
    """Write a checkpoint, then delete all but the ``keep`` newest complete ones.

    Everything is written to a hidden folder and flushed, the marker comes last, and a rename makes
    the folder appear. Nothing older is touched before that.

    Args:
        run: the run's folder.
        checkpoint: its ``step`` names the folder; an existing one of that step is replaced.
        write_policy: writes the policy into the folder that it is given.
        keep: at least 1.

    Raises LagzeroError when the disk is full or a file cannot be written; older checkpoints are
    then as they were.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least the checkpoint just written stays")
    if overlap := {"trainer", "complete"} & checkpoint.parts.keys():
        raise ValueError(f"parts cannot be called {sorted(overlap)}")
    root = run / _FOLDER
    final = root / _name(checkpoint.step)
    work = root / f"{_UNFINISHED}{final.name}"
    try:
        _tidy(root)
        work.mkdir(parents=True)
        _write(work, checkpoint, write_policy)
        if final.exists():
            final.rename(root / f"{_REPLACED}{final.name}")
        work.rename(final)
        _flush(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(work, ignore_errors=True)
        raise LagzeroError(
            f"the checkpoint of step {checkpoint.step} could not be written to {root}: {error}. "
            "Older checkpoints are intact; free some space or name another run_dir"
        ) from error
    for old in _complete(root)[:-keep]:
        if old != final:
            _remove(old)
    _tidy(root)
    return final


def latest(run: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None; warn of incomplete newer ones."""
    root = run / _FOLDER
    _tidy(root)
    complete = _complete(root)
    newest = complete[-1] if complete else None
    for folder in sorted(root.glob("step-*")):
        if not (folder / _MARKER).is_file() and (newest is None or _step(folder) > _step(newest)):
            warnings.warn(
                f"{folder} was cut off while it was written and is passed over; resuming from "
                + ("nothing" if newest is None else newest.name),
                stacklevel=2,
            )
    return newest


def load_checkpoint(folder: Path, parts: tuple[str, ...] = ()) -> Checkpoint:
    """Read a complete checkpoint.

    Args:
        folder: as ``latest`` returned it.
        parts: names that must be there, such as ``cursor``.

    Raises LagzeroError when it is not complete, when a file is missing or of another size than was
    written, or when a needed part was never written. A run that resumed without its cursor would
    train on the first prompts again.
    """
    marker = folder / _MARKER
    if not marker.is_file():
        raise LagzeroError(f"{folder} has no {_MARKER}: it was not written to its end")
    manifest: dict[str, int] = _read_json(marker)["files"]
    problems = [f"{name}: missing" for name in manifest if not (folder / name).is_file()]
    problems.extend(
        f"{name}: {(folder / name).stat().st_size} bytes, {size} were written"
        for name, size in manifest.items()
        if (folder / name).is_file() and (folder / name).stat().st_size != size
    )
    problems.extend(f"{p}.json: never written" for p in parts if f"{p}.json" not in manifest)
    if problems:
        raise LagzeroError(
            f"{folder} cannot be resumed from:\n" + "\n".join(sorted(problems)) + "\n"
            "Put the files back, or delete the folder to resume from the checkpoint before it"
        )
    names = [n for n in manifest if "/" not in n and n.endswith(".json") and n != _VALUES]
    values = _read_json(folder / _VALUES)
    try:
        tensors = load_file(folder / _TENSORS)
    except SafetensorError as error:
        raise LagzeroError(f"{folder / _TENSORS} cannot be read: {error}") from error
    return Checkpoint(
        int(values["step"]),
        tensors,
        values["trainer"],
        {name.removesuffix(".json"): _read_json(folder / name) for name in names},
    )


def _write(work: Path, checkpoint: Checkpoint, write_policy: Callable[[Path], None]) -> None:
    write_policy(work / "policy")
    tensors = {name: t.detach().cpu().contiguous() for name, t in checkpoint.tensors.items()}
    save_file(tensors, work / _TENSORS)
    _write_json(work / _VALUES, {"step": checkpoint.step, "trainer": dict(checkpoint.values)})
    for name, value in checkpoint.parts.items():
        _write_json(work / f"{name}.json", value)
    files = sorted(path for path in work.rglob("*") if path.is_file())
    for path in files:
        _flush(path)
    sizes = {path.relative_to(work).as_posix(): path.stat().st_size for path in files}
    _write_json(work / _MARKER, {"step": checkpoint.step, "files": sizes})
    _flush(work / _MARKER)
    _flush(work)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _step(folder: Path) -> int:
    number = folder.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def _complete(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    folders = [f for f in root.glob("step-*") if _step(f) >= 0 and (f / _MARKER).is_file()]
    return sorted(folders, key=_step)


def _remove(folder: Path) -> None:
    """Delete a checkpoint so that no half of it is ever taken for a whole one."""
    gone = folder.with_name(f"{_UNFINISHED}old-{folder.name}")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _tidy(root: Path) -> None:
    """Put back what was being replaced when a run died, and delete what was never finished."""
    for folder in root.glob(f"{_REPLACED}*"):
        final = root / folder.name.removeprefix(_REPLACED)
        if not final.exists():
            folder.rename(final)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    for folder in root.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LagzeroError(f"{path} is not JSON: {error}") from error


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
