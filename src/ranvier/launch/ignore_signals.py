"""Imported first by the forkserver of local ranks, to ignore signals to its process group.

Ctrl-C and `timeout` signal every process of a group; ranks receive the signal through their parent.
The server ends with its launcher, and the ranks end with the server.
"""

import os
import signal

from ranvier.launch.lifetime import end_children_with_me, end_with_parent

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)

if "RANVIER_LAUNCHER" in os.environ:
    end_with_parent(int(os.environ["RANVIER_LAUNCHER"]))
    end_children_with_me()
