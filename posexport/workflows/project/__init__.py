"""Project files: what a repository ships. Start reading at `file`."""
