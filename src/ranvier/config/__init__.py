"""Config: the settings of a run, how they are checked, and how they are read and written.

Imports errors and the configs of models, but not torch, so that `ranvier plan` starts quickly.
"""
