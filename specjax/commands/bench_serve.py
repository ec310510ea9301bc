"""Runs `specjax bench serve`."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from specjax.bench import provenance
from specjax.bench.datasets.queries import Queries, make_queries
from specjax.bench.describe import (
    closing_lines,
    heading,
    peer_lines,
    row,
    speculation_lines,
    step_lines,
)
from specjax.bench.machine import CpuTime, Machine, Moment, load_now
from specjax.bench.peers import SERVED_PEERS
from specjax.bench.peers.peer import as_peer, compare_outputs
from specjax.bench.peers.server import free_port, serving
from specjax.bench.result import Details, Peer, as_json
from specjax.bench.serve import LoadSettings, fill, head, top, verify, warm_up
from specjax.bench.traffic.drive import Traffic, drive
from specjax.bench.traffic.endpoint import Endpoint
from specjax.checkpoint.writing import write_whole
from specjax.commands.bench_load import read_load, read_metadata, result_path, server_command

SHOWN = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "mean_ttft_ms": "mean TTFT (ms)",
    "mean_tpot_ms": "mean TPOT (ms)",
    "mean_itl_ms": "mean ITL (ms)",
    "mean_e2el_ms": "mean E2E (ms)",
    "p99_e2el_ms": "p99 E2E (ms)",
}
