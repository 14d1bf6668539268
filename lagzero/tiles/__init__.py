"""Exact numerics on a GPU: Triton kernels whose tiles do not depend on the number of rows.

``kernels`` imports Triton, which torch brings along on a machine with CUDA; nothing else here does.
May import: numerics, errors. Knows a policy by its shape only, to train.
"""
