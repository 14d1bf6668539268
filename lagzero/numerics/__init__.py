"""Arithmetic that the engine and the trainer share: attention, precision, memory.

May import torch, transformers, ``types``, ``errors`` and ``config``; nothing above it.
"""
