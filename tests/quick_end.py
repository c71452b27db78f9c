"""Ends a process of the tests that was forked by their preloaded parent, and whose script has come to its end, without
taking down the modules that it shares with that parent, which would copy their memory for nothing: a quarter of a
second of a processor for each rank. Jobs with a parent of their own (test_preloaded) and spawned ranks end as users'
do."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref

from spare_megatron.launch.forked_script import ForkedScript

_run = ForkedScript.run


def _run_and_end(script: ForkedScript) -> None:
    for inherited in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        inherited.atexit = False
    _run(script)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


ForkedScript.run = _run_and_end  # type: ignore[method-assign]
