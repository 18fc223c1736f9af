"""Proofs: a kernel's PTX as a formula over all its inputs, decided by an SMT solver (extra `prove`)."""

from ptxlab.prove import kv4, layouts, main_loops, quantisers, w4a4  # noqa: F401  they enter their claims
from ptxlab.prove.claims import Claim as Claim
from ptxlab.prove.claims import Decision as Decision
from ptxlab.prove.claims import decide as decide
from ptxlab.prove.claims import prove as prove
from ptxlab.prove.claims import prove_kernel as prove_kernel
from ptxlab.prove.claims import register as register
from ptxlab.prove.claims import registered as registered
from ptxlab.prove.solve import Enumeration as Enumeration
from ptxlab.prove.solve import Query as Query
