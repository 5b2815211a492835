"""`python -m distplan` is the command `distplan`."""

from distplan.planner.cli import main

if __name__ == "__main__":
    main()
