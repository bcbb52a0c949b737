"""Holds engines to what engines on a kvpoold have to do: see README.md beside this file."""
