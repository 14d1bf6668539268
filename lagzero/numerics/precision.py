"""Which type a device multiplies in at full speed."""

from __future__ import annotations

import torch


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether the device has bfloat16 matrix products of its own.

    A CPU without them (AVX2 at most) converts number by number: 1.2 GFLOP/s where float32 reaches
    64 on the same core.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # no public name says it


def has_fast_float16(device: torch.device) -> bool:
    """Whether the device has float16 matrix products of its own."""
    return device.type == "cuda" or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Turn ``auto`` or a type's name into a type; auto is bfloat16 where it is fast."""
    if name == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
