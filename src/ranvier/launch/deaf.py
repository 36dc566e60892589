"""Imported first by the server of local ranks: a terminal's Ctrl-C is not for it."""

import signal

signal.signal(signal.SIGINT, signal.SIG_IGN)
