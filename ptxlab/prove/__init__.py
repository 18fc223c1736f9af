"""Proofs: a kernel's PTX as a formula over all its inputs, decided by an SMT solver (extra `prove`)."""

from typing import Any

from ptxlab.prove.claims import Claim as Claim
from ptxlab.prove.claims import Decision as Decision
from ptxlab.prove.claims import decide as decide
from ptxlab.prove.claims import prove as prove
from ptxlab.prove.claims import register as register
from ptxlab.prove.claims import registered_claims as registered_claims
from ptxlab.prove.solve import Enumeration as Enumeration
from ptxlab.prove.solve import Query as Query
from ptxlab.prove.solve import check_solver


def __getattr__(name: str) -> Any:
    """Import `prove_kernel` when it is first asked for: it needs z3."""
    if name != "prove_kernel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_solver("z3")
    from ptxlab.prove.kernels import prove_kernel

    return prove_kernel
