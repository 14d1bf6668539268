"""Scoring: what a rollout is worth, and how an answer is told from a wrong one.

May import ``lagzero.types``, ``lagzero.errors``, ``lagzero.config`` and ``lagzero.protocols``.
"""
