"""Decoding in C on a CPU: the engine's forward pass of Llama-like models in one call.

May import: numerics. Knows a policy by its shape only: train, engine and build_serving import it.
"""
