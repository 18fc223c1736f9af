"""Family `attention`: decode attention over a paged cache of 4 or 8 bits, the teaching steps first (QServe §5.3)."""

from ptxlab.lowbit.kernels.attention import append, ladder, merge, prefill, sm80, sm90
from ptxlab.lowbit.kernels.attention.api import AttentionWorkspace, attention_kv4, attention_workspace
from ptxlab.lowbit.kernels.attention.append_api import append_kv4, rope_append_kv4

SPECS = (*ladder.SPECS, *sm80.SPECS, *sm90.SPECS, *prefill.SPECS, *merge.SPECS, *append.SPECS)
FORMS = (sm90.INVARIANT, sm80.ROTATED, sm90.ROTATED, prefill.ROTATED, *append.ROTATED)

__all__ = [
    "FORMS",
    "SPECS",
    "AttentionWorkspace",
    "append_kv4",
    "attention_kv4",
    "attention_workspace",
    "rope_append_kv4",
]
