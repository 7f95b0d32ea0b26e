"""One command of posexport in a process that ends with its parent: `python -m posexport.workflows.sweep.child ...`."""

from __future__ import annotations

import runpy

from posexport.processes import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    runpy.run_module("posexport", run_name="__main__")
