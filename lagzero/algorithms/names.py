"""The names that ``algorithm`` takes."""

from __future__ import annotations

from typing import Literal

AlgorithmName = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "ppo",
    "rloo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "online_dpo",
    "distill",
    "olmo3",
    "icepop",
    "scalerl",
    "areal",
]
