"""First import of the fork server: makes it end with the driver, and leave to the driver what a terminal (Ctrl-C),
`timeout` or a batch system (SIGTERM) sends to all processes of a command.

By default, multiprocessing's server outlives a killed driver as long as any worker lives.
"""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a worker has the default again
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
