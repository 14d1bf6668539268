"""lagzero trains language models with reinforcement learning, and keeps the systems out of the math."""
