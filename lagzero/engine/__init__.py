"""The embedded inference engine: continuous batching over a paged KV cache, one process, any device.

May import ``numerics``, ``types``, ``errors``, ``config`` and torch; nothing above it.
"""
