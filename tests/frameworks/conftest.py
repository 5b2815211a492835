"""These tests need frameworks that only .ci/frameworks installs, and are not part of a plain `pytest`."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("DISTPLAN_FRAMEWORKS") else ["test_*.py"]
