"""lagzero trains language models with reinforcement learning: the systems stay out of the math."""

import os

# Math threads wait for each other some hundred times a forward pass. GNU's OpenMP lets them spin
# for about a millisecond; where other work wants the cores, the last thread cannot begin in that
# time (figures in docs/log.md). Read when torch is loaded; a user's own choice stays.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "1000"
