"""Algorithms of collectives as pure descriptions; imports no torch."""
