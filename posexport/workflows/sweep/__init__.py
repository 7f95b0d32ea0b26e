"""Sweeps over many machines; `jobs` describes a job as plain data and is the first file to read."""
