"""`python -m ptxlab`: the command line, where the script is not on the PATH."""

from ptxlab.cli import main

main()
