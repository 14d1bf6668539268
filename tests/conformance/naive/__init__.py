"""The same formulas a second time: plain floats, loops and the standard library.

Nothing here is imported from lagzero, so that one mistake cannot be on both sides. Slow and dull on
purpose: a batch is the dict that the JSON files hold, a token is an index into its lists.
"""
