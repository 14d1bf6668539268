"""Published objectives by name: ``algorithm: <name>`` stands for keys and for nothing else.

Each value says where it comes from. Sizes, learning rates and lengths are left to the user, except
where they are part of the method. Plain values: imports nothing of the package.
"""
