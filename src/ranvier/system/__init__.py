"""System: limits of this process, access to untrusted files, and terminal output.

Imports errors and the standard library only; everything else may import it.
"""
