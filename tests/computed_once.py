"""What each process that the tests' preloaded parent forks would compute anew: the table of flags, which takes a rank
and a launcher 20 ms of a processor, and the template of the report, which takes a launcher 30."""

from __future__ import annotations

from spare_megatron.flags.supported import all_specs
from spare_megatron.monitor.html_report import template

all_specs()
template()
