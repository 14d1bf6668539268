"""Playing prompts: an episode, and the backends that sample tokens.

May import ``engine``, ``runtime``, ``types``, ``protocols``, ``errors`` and ``config``.
"""
