"""What to do about a finding or a fault, by its kind."""

from collections.abc import Iterable

REMEDIES = {
    "carry": "unpack the lanes first, or keep the operands so small that no lane overflows",
    "range": "use a wider lane, or smaller operands",
    "uninitialised": "write it first, in every thread that comes here",
    "race": "put a barrier, or a flag with release and acquire, between the two accesses",
    "async": "wait first: cp.async.wait_group and a barrier, the copy's mbarrier, wgmma.wait_group",
    "async-dirty": "fence.proxy.async in the threads that wrote, before the barrier behind which it is read",
    "war": "wait for the reader first: wgmma.wait_group, cp.async.bulk.wait_group.read, the stage's empty mbarrier",
    "divergence": "move it to where all threads of the warp arrive, a __syncthreads() where all of the block do",
    "overrun": "bound the index, or make the array larger",
    "nan": "look at the operands that the finding names; a maximum of -infinity alone gives infinity less infinity",
    "infinity": "scale the operands before, or sum in float32",
    "overflow": "scale the operands before, or sum in float32",
    "subnormal": "scale the operands before, or sum in float32",
    "narrow": "clamp it, use a wider type, or say // @wraps on the line",
    "MemoryFault": "bound the index, make the array larger, or align the address to the bytes of the access",
    "Deadlock": "see that all threads reach the barrier, the mbarrier gets its arrivals and bytes, or the flag is set",
    "schedules": "wait for each copy before its data are read; --check async names the read",
}


PAGES = dict.fromkeys(("async-dirty", "war"), "guide/fence_bugs.md")  # of the guide; others: `CHECKS_PAGE`
CHECKS_PAGE = "guide/checks.md"


def remedy_of(kind: str) -> str:
    """Return the remedy of a kind of finding, or of the class of an error, with the guide's page; empty if none."""
    return f"{REMEDIES[kind]} ({PAGES.get(kind, CHECKS_PAGE)})" if kind in REMEDIES else ""


def remedies_of(kinds: Iterable[str]) -> list[str]:
    """List the remedy of each kind of finding and the guide's page about it, as lines; each once."""
    return [f"  remedy ({kind}): {remedy}" for kind in dict.fromkeys(kinds) if (remedy := remedy_of(kind))]
