"""Family `moe`: a mixture of experts around its grouped GEMMs: which tokens go where, and what comes back."""

from ptxlab.lowbit.kernels.moe.api import RoutedTokens, combine_experts, route_tokens
from ptxlab.lowbit.kernels.moe.specs import CHOOSE, COMBINE, GATHER

SPECS = (CHOOSE, GATHER, COMBINE)

__all__ = ["CHOOSE", "COMBINE", "GATHER", "SPECS", "RoutedTokens", "combine_experts", "route_tokens"]
