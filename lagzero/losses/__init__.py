"""Objectives as pure functions on packed tensors: per-token losses in, never a reduced number out.

May import torch, ``types``, ``errors`` and ``config``; never a model, an optimiser or a backend.

Shape legend: N trained tokens of one micro-batch, S sequences of the step, V vocabulary.
"""
