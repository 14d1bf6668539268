"""Who may start and what is handed over: pure objects, no I/O, no clock, no torch.

May import ``types``, ``errors`` and ``config``; nothing above them.
"""
