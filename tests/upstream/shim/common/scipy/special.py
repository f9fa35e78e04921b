"""See the package."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def log_softmax(x: npt.ArrayLike, axis: int | None = None) -> npt.NDArray[np.float64]:
    """Return the logarithm of the softmax."""
    values = np.asarray(x, dtype=np.float64)
    shifted = values - values.max(axis=axis, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True)))
