"""`posexport`, and `python -m posexport`: the command line."""

from __future__ import annotations

import signal


def main() -> object:
    """Run the command line. While it loads, Ctrl-C ends the process silently, as it ends other programs."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from posexport.cli import main as run

    return run()


if __name__ == "__main__":
    main()
