"""Scoring: what a rollout is worth, and how an answer is told from a wrong one.

May import ``lagzero.types``, ``lagzero.errors``, ``lagzero.nearest``, ``lagzero.config``,
``lagzero.protocols`` and ``lagzero.data.reasoning_gym_source``.
"""
