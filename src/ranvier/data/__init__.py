"""Data: corpora, tokenizers, packing, and the order in which a run reads its samples.

Imports models, grid and what is below.
"""
