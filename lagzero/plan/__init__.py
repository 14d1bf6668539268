"""Prediction before spending: a virtual clock, modelled stages, the simulator.

May import the loop, schedule, observe, types, errors and the gate of runtime; never torch.
"""
