"""What a run tells: metrics, times and the view in the terminal. It never steers.

May import ``types``, ``errors``, ``config`` and ``protocols``. Imports without torch.
"""
