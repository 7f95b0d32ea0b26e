"""Sweeps over many machines. Start reading at `jobs`, which describes a job as plain data."""
