"""Attention recognised in any graph, one file per idea."""
