"""Hugging Face families: which of their configs a decoder can be, and the other way round.

Imports models only.
"""
