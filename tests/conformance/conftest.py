"""The naive implementation is a plain folder beside the vectors, for other frameworks to take."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
