"""What looks on while a kernel runs: checks, counts of bank conflicts, the step clock."""
