"""Who may start and what is handed over: pure objects, no I/O, no clock, no torch.

May import ``types`` and ``errors``; nothing above them.
"""
