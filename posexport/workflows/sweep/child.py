"""One command of posexport as a process that ends when its parent does: `python -P -m posexport.sweep.child ...`."""

from __future__ import annotations

import runpy

from posexport.processes import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    runpy.run_module("posexport", run_name="__main__")
