"""lagzero trains language models with reinforcement learning: the systems stay out of the math."""
