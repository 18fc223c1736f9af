"""Family `attention`: decode attention over a paged cache of 4 or 8 bits, the teaching steps first (QServe §5.3)."""

from ptxlab.lowbit.kernels.attention import append, ladder, merge, prefill, prefill_sm80, sm80, sm90
from ptxlab.lowbit.kernels.attention.api import AttentionWorkspace, attention_kv4, attention_workspace
from ptxlab.lowbit.kernels.attention.append_api import append_kv4, rope_append_kv4

SPECS = (*ladder.SPECS, *sm80.SPECS, *sm90.SPECS, *prefill_sm80.SPECS, *prefill.SPECS, *merge.SPECS, *append.SPECS)
FORMS = (
    sm90.INVARIANT,
    sm80.ROTATED,
    sm90.ROTATED,
    prefill_sm80.ROTATED,
    prefill_sm80.OWN,
    prefill_sm80.OWN_ROTATED,
    prefill.ROTATED,
    prefill.OWN,
    prefill.OWN_ROTATED,
    *append.ROTATED,
)

__all__ = [
    "FORMS",
    "SPECS",
    "AttentionWorkspace",
    "append_kv4",
    "attention_kv4",
    "attention_workspace",
    "rope_append_kv4",
]
