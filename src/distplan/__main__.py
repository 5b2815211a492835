"""The command `distplan`, which is also `python -m distplan`.

The rest is imported inside, so that Ctrl-C during start-up ends like Ctrl-C at any other time.
"""

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (`>&-`), who wants to see nothing
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    try:
        from distplan.planner.cli import run

        code = run()
    except KeyboardInterrupt:
        sys.stderr.write("distplan: interrupted\n")
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
