"""Code generation: programs, the sandbox in which they run, and pass@k.

Imports infer and what is below; the worker imports the standard library only.
"""
