"""``ullage train`` in which rank 1 gets signals in the fourth step: ``signal_script.py CASE ARGUMENTS...``.

``once``: SIGTERM. ``twice``: SIGTERM, and again while the main thread is stuck outside of Python. ``killed``: rank 1 is
killed in the middle of a step, and rank 0 gets SIGTERM then. ``lost``: rank 1 is killed, and nobody tells rank 0.
"""

import ctypes
import os
import signal
import sys
import threading
import time

from ullage.cli import main
from ullage.training import Trainer

case, *arguments = sys.argv[1:]
rank = int(os.environ["RANK"])
steps = 0


def happens():
    global steps
    steps += 1
    if steps != 4:
        return
    if case == "lost":
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
    elif case == "killed":
        os.kill(os.getpid(), signal.SIGKILL if rank else signal.SIGTERM)
    elif rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        if case == "twice":
            threading.Thread(target=again, daemon=True).start()
            ctypes.CDLL(None).sleep(120)


def again():
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGTERM)


def after(function):
    def wrapped(*args, **kwargs):
        happens()
        return function(*args, **kwargs)

    return wrapped


Trainer.training_step = after(Trainer.training_step)
sys.argv = ["ullage", "train", *arguments]
main()
