"""One command of posexport as a process that ends with its parent: `python -P -m posexport.workflows.sweep.child ...`."""

from __future__ import annotations

import runpy

from posexport.processes import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    runpy.run_module("posexport", run_name="__main__")
