"""What a configuration trains, in formulas and numbers: ``lagzero explain``.

Reads a ``Config`` and nothing else; may import ``schedule``, ``algorithms`` and what lies below.
"""
