"""Hugging Face families: which of their configs map to a decoder, and the reverse.

Imports models only.
"""
