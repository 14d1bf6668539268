"""Decoding in C on a CPU: the engine's forward pass of Llama-like models in one call.

The parts of that pass also serve a trainer whose log-probs must be the engine's, bit for bit.
``modules`` holds such a model in an engine process, which trains nothing.
May import: numerics, types. Knows a policy by its shape only, to train, engine and build_serving.
"""
