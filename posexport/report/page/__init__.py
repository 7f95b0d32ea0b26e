"""The report page; `make` is where to begin."""
