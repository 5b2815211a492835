"""What every test takes for granted of its process."""

from __future__ import annotations

import signal

# A suite started in the background of a script ignores Ctrl-C, and so would the commands that it starts and interrupts:
# POSIX, 2.11 Signals and Error Handling. A handler of our own is none of theirs after exec.
signal.signal(signal.SIGINT, signal.default_int_handler)
