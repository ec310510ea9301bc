"""The engines that `--against` can name. Each engine has an entry in a table of this module."""

from collections.abc import Mapping

from specjax.bench.peers.process import BatchPeer
from specjax.bench.peers.server import ServedPeer

_TRANSFORMERS = {
    "packages": ("torch", "transformers"),
    "remedy": "pip install 'specjax[peers]'",
    "worker": "specjax.bench.peers.transformers_worker",
}
# Libraries that generate batches, for `throughput`.
BATCH_PEERS: Mapping[str, BatchPeer] = {
    "transformers": BatchPeer(**_TRANSFORMERS, settings={"is_compiled": False}),
    "transformers-compiled": BatchPeer(**_TRANSFORMERS, settings={"is_compiled": True}),
}
# Servers, for `serve`. A URL is one, too.
SERVED_PEERS: Mapping[str, ServedPeer] = {
    "vllm": ServedPeer(
        program="vllm",
        remedy="pip install vllm, or run it elsewhere and give its URL",
        command=("vllm", "serve", "{model}", "--port", "{port}", "--dtype", "{dtype}"),
    ),
    "sglang": ServedPeer(
        program="sglang",
        remedy="pip install sglang, or run it elsewhere and give its URL",
        command=("sglang", "serve", "--model-path", "{model}", "--port", "{port}")
        + ("--dtype", "{dtype}"),
    ),
}
