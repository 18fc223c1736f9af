"""The tracked tree stays small: it travels with every clone and every call to a remote GPU."""

import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 27_000_000


def tracked_files() -> list[Path]:
    """List the files that git tracks and the checkout has; none outside a git checkout."""
    try:
        listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [path for name in listed.decode().split("\0") if name and (path := ROOT / name).is_file()]


def test_the_tracked_tree_is_below_27_mb() -> None:
    sizes = {path: path.stat().st_size for path in tracked_files()}
    if not sizes:
        pytest.skip("not a git checkout: git says which files are tracked")
    by_folder: Counter[Path] = Counter()
    for path, size in sizes.items():
        by_folder[path.parent.relative_to(ROOT)] += size
    largest = ", ".join(f"{folder} {size / 1e6:.1f} MB" for folder, size in by_folder.most_common(5))
    total = sum(sizes.values())
    assert total < MOST_BYTES, f"tracked files: at most {MOST_BYTES / 1e6:.0f} MB (got {total / 1e6:.1f} MB: {largest})"
