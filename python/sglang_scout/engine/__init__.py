"""The engine runs steps and moves bytes; ``policy/`` decides what it should do."""

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]
PageIds = npt.NDArray[np.integer]

RESULT_DELAY_STEPS = 2
"""Boundaries until the host knows a step's selections."""
