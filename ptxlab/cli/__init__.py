"""The `ptxlab` command. Every command takes `--json`. Exit code 1: a failed check, 2: bad input, 3: undecided."""


def main() -> None:
    """Run the command line; an interrupt ends it quietly, also while modules are being imported."""
    try:
        from ptxlab.cli.app import run_command_line

        run_command_line()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
