"""From scored groups to one packed batch: advantages, selection, weights, packing.

NumPy in, NumPy out. May import ``types``, ``errors`` and ``config``; never torch or a backend.
"""
