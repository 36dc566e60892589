"""System: limits of this process, files of strangers, and what a terminal is shown.

Imports errors and the standard library only; everything else may import it.
"""
