"""Prompts: files, Hub datasets and generators; templates; the order in which they are visited.

May import ``types``, ``errors``, ``nearest``, ``config``, ``config_files`` and ``protocols``.
Imports without torch, transformers, pyarrow, datasets or reasoning-gym: each is loaded by the
function that needs it.
"""
