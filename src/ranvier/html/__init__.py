"""HTML: pages, plots and number formats of reports, without a script or a download.

Imports the standard library only.
"""
