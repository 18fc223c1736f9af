"""A NumPy runner whose prompts attend to keys and values of 16 bits: the twin of `prompt_attention="torch"`."""

from typing import Any

import numpy as np

from ptxlab.llm.model import NumpyRunner
from ptxlab.llm.model.runner import Rows
from ptxlab.lowbit import reference
from ptxlab.spec.dtypes import as_stored


class FloatPromptsRunner(NumpyRunner):
    """Rows of a sequence that begins in a launch see keys and values as they were before they were quantised, unless
    there are more of them than the window has."""

    def _append(self, i: int, k: Any, v: Any, rows: Rows) -> None:
        super()._append(i, k, v, rows)
        self._fresh = as_stored(k, self._dtype), v

    def _attend(self, i: int, q: Any, rows: Rows) -> Any:
        found = super()._attend(i, q, rows)
        for b in np.unique(rows.sequence):
            at = np.flatnonzero(rows.sequence == b)
            if rows.position[at[0]] == 0 and len(at) <= (self.config.window or len(at)):
                k, v = (each[at] for each in self._fresh)
                attended, _ = reference.attention(q[at], k, v, scale=self.config.head_dim**-0.5)
                found[at] = attended.reshape(len(at), -1)
        return found
