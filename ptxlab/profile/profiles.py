"""Profiles of kernels: made by ncu on a GPU, or read from what was saved, on any machine."""

import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ptxlab import gpu, registry
from ptxlab.errors import UnavailableError
from ptxlab.profile import launch_target, nsight
from ptxlab.profile.launch_target import LaunchTarget
from ptxlab.profile.nsight import Profile, ProfiledLaunch
from ptxlab.runtime.arguments import merge_sizes
from ptxlab.sources import commit

SAVED = (".ncu-rep", ".json")  # what `read_saved` reads


def profile(job: LaunchTarget, *, metric_set: str = "quick", keep: Path | None = None) -> Profile:
    """Launch a kernel under ncu and put that launch on a page.

    Args:
        job: what to launch.
        metric_set: `quick` or `full`, as `nsight.collect` has them.
        keep: where to leave ncu's report.

    Raises:
        ArgumentError: sizes that the kernel does not have, or that break its rules.
        UnavailableError: no GPU for this kernel, no ncu, no permission, no ncu-report, a metric that ncu does not know.
    """
    (profiled_launch,) = launch([job], nsight.METRICS, metric_set=metric_set, keep=keep)
    sizes = launch_target.sizes_of(job.spec, job.sizes) if job.spec else {}
    weights = launch_target.weights_of(job.spec, sizes)
    return nsight.profile_of(profiled_launch, sizes=sizes, weights=weights, origin=origin())


def read_saved(path: Path, sizes: Mapping[str, Any] | None = None) -> Profile:
    """Read the profile in a `.json`, or of the last launch in a `.ncu-rep`, of a problem of these sizes.

    Raises:
        FileError: no such file, or another.
        ArgumentError: a size that a kernel of the project does not have.
    """
    if path.suffix == ".json":
        return nsight.load(path)
    requested_sizes, last_launch = dict(sizes or {}), nsight.read(path)[-1]
    spec = registry.specs().get(last_launch.kernel)
    if spec:
        # Raises for a size that it does not have.
        merge_sizes("--shape", spec, launch_target.usual_sizes(spec), requested_sizes)
    return nsight.profile_of(
        last_launch, sizes=requested_sizes, weights=launch_target.weights_of(spec, requested_sizes)
    )


def launch(
    jobs: Sequence[LaunchTarget], metrics: Sequence[str], *, metric_set: str = "quick", keep: Path | None = None
) -> list[ProfiledLaunch]:
    """Run all jobs under one ncu, in this order, and return their launches; raises as `profile` does."""
    nsight.require_reader()
    entries = [launch_target.entry_of(job) for job in jobs]
    try:
        gpu.device_info()
    except UnavailableError as error:
        raise UnavailableError(
            f"{error}; `ptxlab profile --from` reads a saved report; `ptxlab timeline` needs no GPU"
        ) from None
    for spec in filter(None, (job.spec for job in jobs)):
        if reason := gpu.why_not(spec.arch, exact=spec.exact_arch):
            raise UnavailableError(f"{spec.name}: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        file = keep or Path(folder) / "launches.ncu-rep"
        nsight.collect(launch_target.command(jobs), entries, metrics, file, metric_set=metric_set)
        launches = nsight.read(file)
    if [launched.kernel for launched in launches] != entries:
        launched_names = ", ".join(launched.kernel for launched in launches)
        raise UnavailableError(f"ncu: expected launches of {', '.join(entries)}, saw {launched_names}")
    return launches


def origin() -> dict[str, str]:
    """Return the origin of a profile made now: commit, date, versions of driver and ncu."""
    device, now = gpu.device_info(), datetime.now(UTC).isoformat(timespec="seconds")
    return {"commit": commit(), "date": now, "driver": device.driver, "ncu": nsight.version()}
