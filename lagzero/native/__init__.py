"""Decoding in C on a CPU: the engine's forward pass of Llama-like models in one call.

May import: numerics, errors. Imported by: train (which gives it a policy) and engine.
"""
