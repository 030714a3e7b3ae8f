"""What the fork server imports first: it dies with the driver, and the terminal's Ctrl-C is the driver's.

Multiprocessing's server would outlive a driver that was killed for as long as any worker does.
"""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1

signal.signal(signal.SIGINT, signal.SIG_IGN)
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
