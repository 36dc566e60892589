"""Hugging Face families: converts their configs to decoder configs, and back.

Imports only models.
"""
