"""`python -m distplan` is the command `distplan`."""

from distplan.planner.cli import main

main()
