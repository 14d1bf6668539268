"""Where stages run: threads, turns and engine processes on one machine.

May import ``types``, ``protocols``, ``errors`` and the engine's request types; backends are handed
in.
"""
