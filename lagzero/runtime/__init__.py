"""Where stages run: threads and turns on one machine.

May import ``types``, ``protocols``, ``errors``; backends are handed in.
"""
