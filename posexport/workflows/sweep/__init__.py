"""Sweeps over many machines; `jobs` is where to begin: a sweep as plain data."""
