"""Arithmetic that the engine and the trainer share: attention dispatch, packed attention, precision.

May import torch, transformers, ``types``, ``errors`` and ``config``; nothing above it.
"""
