"""Imported first by the server of local ranks: signals for a whole group are not for it.

Ctrl-C and `timeout` signal every process of a group; ranks hear of it through their parent.
"""

import signal

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)
