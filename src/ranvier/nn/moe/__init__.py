"""Mixture of experts: router, token dispatcher, permutation, grouped GEMM and load balancing.

Imports the rest of nn and what is below.
"""
