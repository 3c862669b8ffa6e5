"""`python -m poros`: the command line without an installation, from the root of a checkout."""

from poros.cli import main

main()
