"""The script of ranks that import no torch (:mod:`tests.process.control_client`): nothing that takes time is preloaded
for it, so that a parent of its own is ready at once."""

import runpy

runpy.run_module("tests.process.control_client", run_name="__main__")
