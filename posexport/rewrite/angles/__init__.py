"""Angles of recognised rotations, made exact: the one rewriting that changes the function, at far positions."""
