"""Command line: commands, their options, and what they print.

Imports everything; only `__main__` imports it.
"""
