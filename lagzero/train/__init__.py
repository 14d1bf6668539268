"""The trainer: a model, the log-probs of packed rows, one optimiser step, and what is saved of it.

May import losses, prepare, numerics and what is below them. It is blind to the algorithm: weights,
advantages and the loss function arrive from outside.
"""
