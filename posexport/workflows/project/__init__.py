"""Project files: what a repository ships; `entries` is where to begin."""
