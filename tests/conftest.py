"""What every test shares: quiet libraries, no network."""

from __future__ import annotations

import os

# Before any test module imports a model library; a hub look-up would be a mistake here.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Triton looks at it once, when it is first imported, which a library may do at any time.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
