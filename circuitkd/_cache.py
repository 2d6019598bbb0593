"""Where circuitkd keeps what it makes once and needs again."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """The user's cache: ``$CIRCUITKD_CACHE``, else ``$XDG_CACHE_HOME/circuitkd``, else
    ``~/.cache/circuitkd``. It need not exist yet.
    """
    if own := os.environ.get("CIRCUITKD_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser() / "circuitkd"
