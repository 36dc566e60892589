"""Mixture of experts: router, token dispatcher, permutation, grouped GEMM and load balancing.

Imports the rest of nn and the packages below it.
"""
