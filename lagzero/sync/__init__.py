"""Weight transfer from the trainer to the generator, all or nothing.

May import ``engine``, ``runtime``, ``types``, ``protocols``, ``errors`` and torch.
"""
