"""Chat: conversations, their templates, and the sandbox in which templates are rendered.

Imports the rest of data.
"""
