"""The embedded inference engine: continuous batching over a paged KV cache, on any device.

May import ``numerics``, ``types``, ``errors``, ``config`` and torch; nothing above it.
"""
