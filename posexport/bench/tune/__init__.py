"""The tune stage; `tuning` is where to begin."""
