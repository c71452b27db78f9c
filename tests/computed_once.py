"""What each process that the tests' preloaded parent forks would compute anew: the tables of flags, which take a rank
and a launcher 40 ms of a processor, and the template of the report, which takes a launcher 30."""

from __future__ import annotations

from spare_megatron.megatron_adapter.versions import core_version
from spare_megatron.monitor.html_report import template
from spare_megatron.worker.job_arguments import honoured_fields

core_version()
honoured_fields()
template()
