"""Exit statuses of roles, and of the programs that start and supervise them.  Python 3.9 and the standard library."""

from __future__ import annotations

EXIT_CONFIG = 2  # settings, arguments or the run directory are wrong: another try would not help
EXIT_FAULT = 3  # a failure that may not happen on another try
EXIT_FENCED = 4  # a later attempt or supervisor owns the run
EXIT_ALONE = 5  # the other roles it needs did not connect
EXIT_BUG = 70  # internal error
EXIT_INTERRUPTED = 130  # Ctrl-C, as shells report it
