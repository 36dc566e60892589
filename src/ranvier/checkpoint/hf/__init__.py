"""Hugging Face format: models and PEFT adapters, read and written.

Imports the rest of checkpoint and models.hf.
"""
