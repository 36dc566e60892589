"""HTML pages, plots and number formats of reports, without external resources.

Imports the standard library only.
"""
