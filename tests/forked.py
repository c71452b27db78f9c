"""Runs a module in a process that the tests' preloaded parent forks: ``python -m tests.forked MODULE ...`` is
``python -m MODULE ...``, with ``--strict`` before the module as with ``-W error``.

The process ends without taking down the modules that it shares with its parent, torch's operators among them, which
would copy their memory for nothing: a quarter of a second of a processor.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import sys
import threading
import traceback
import weakref

from tests.preloaded import warnings_are_errors


def _run() -> int:
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        raise  # which ends a process by its signal
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    for inherited in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        inherited.atexit = False
    del sys.argv[0]
    if sys.argv[0] == "--strict":
        warnings_are_errors()
        del sys.argv[0]
    code = _run()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    gc.collect()  # warns of what was left open
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
