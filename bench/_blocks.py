"""Random quantised weights without a quantiser: valid blocks, made once, and read round and round.

A `Weights` object is a few MiB of random blocks. The number of blocks is a prime, so that a stretch that starts elsewhere, such
as the next expert or the next row, has other values, however often the blocks repeat. A tensor is a stretch of any length from
a start of its own, and costs no more than writing it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

N_BLOCKS = 30011
"""Prime: no row, expert or tensor has a multiple of it in blocks, unless it is that large."""

BLOCKS = {"Q4_0": (32, 18), "Q8_0": (32, 34), "Q4_K": (256, 144)}
"""Type -> values and bytes per block."""


def block_of(quant: str) -> tuple[int, int]:
    """Return values and bytes per block of a type.

    Raises:
        ValueError: If it is not one of `BLOCKS`.
    """
    if quant not in BLOCKS:
        raise ValueError(f"quant {quant!r} is not one of {', '.join(BLOCKS)}")
    return BLOCKS[quant]


class Weights:
    """Blocks whose values have mean 0 and a given standard deviation."""

    def __init__(self, quant: str, std: float, seed: int) -> None:
        """Draw the blocks.

        Args:
            quant: One of `BLOCKS`.
            std: Standard deviation of the values.
            seed: Of the bits. Objects of one seed and type differ in scale only.
        """
        self.quant, (_, self.block_bytes) = quant, block_of(quant)
        rng = np.random.default_rng([seed, sorted(BLOCKS).index(quant)])
        blocks = rng.integers(0, 256, (N_BLOCKS, self.block_bytes), dtype=np.uint8)
        scale = _as_bytes
        if quant == "Q8_0":  # d, 32 x int8: value = d q
            blocks[:, :2] = scale(std / 73.9)
        elif quant == "Q4_0":  # d, 32 x 4 bits: value = d (q - 8)
            blocks[:, :2] = scale(std / 4.64)
        else:  # d, dmin, 8 x (6 bits sc, 6 bits m), 256 x 4 bits: value = d sc q - dmin m, with dmin = 7.5 d, the mean of q
            blocks[:, :2] = scale(std / 258.0)
            blocks[:, 2:4] = scale(7.5 * std / 258.0)
        self._bytes = memoryview(np.concatenate([blocks, blocks]).reshape(-1).data)

    def stretch(self, start: int, n_bytes: int) -> Iterator[memoryview]:
        """Yield a stretch in pieces.

        Args:
            start: Block to begin with, taken modulo the number of blocks.
            n_bytes: Length of all pieces together.
        """
        period = N_BLOCKS * self.block_bytes
        at = start % N_BLOCKS * self.block_bytes
        while n_bytes > 0:
            piece = self._bytes[at : at + min(n_bytes, period)]
            yield piece
            n_bytes -= len(piece)


def _as_bytes(value: float) -> npt.NDArray[np.uint8]:
    return np.frombuffer(np.array(value, dtype="<f2").tobytes(), np.uint8)
