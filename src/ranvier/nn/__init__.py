"""Leaves: layers that know their part of the work on the grid, one file each."""
