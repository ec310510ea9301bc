"""Runs `specjax serve`: an HTTP server with OpenAI's API."""

import argparse
import sys
from dataclasses import fields
from typing import Any

from specjax.async_llm import AsyncLLM
from specjax.commands.serve_arguments import (
    engine_options,
    given_options,
    vllm_options,
)
from specjax.commands.speculation import read_speculation
from specjax.engine.log import get_log
from specjax.engine_args import EngineArgs
from specjax.host.leaving import end_now, leave
from specjax.server.app import build_app
from specjax.server.run import bind, describe, make_server
from specjax.server.service import Service
from specjax.server.settings import Limits, ServerSettings

# Python's switch interval. The event loop releases the interpreter lock at each send, and the
# engine's thread then keeps it for up to this time. With the default of 5 ms, responses are late.
SWITCH_SECONDS = 5e-4


def run(args: argparse.Namespace) -> int:
    """Run `specjax serve` until a signal ends it.

    Settings are checked, and the port is taken, before the model is loaded.
    """
    settings = ServerSettings(**given_options(args, _names(ServerSettings)))
    limits = Limits(**given_options(args, _names(Limits)))
    settings.read_keys()
    settings.read_response_template()
    options = read_engine_args(args)
    with bind(settings) as bound:
        llm = AsyncLLM.from_engine_args(options)
        app = build_app(Service(llm, args.model, settings, limits))
        server = make_server(app, settings)
        get_log(verbose=True).info("listening on %s", describe(settings, bound))
        sys.setswitchinterval(SWITCH_SECONDS)
        server.run(sockets=[bound])
        if server.force_exit:
            end_now()
        if server.is_signalled:  # all answers are sent, so no program is needed any more
            leave(llm.shutdown, get_log(verbose=True).info)
        else:
            llm.shutdown()
    return 0


def read_engine_args(args: argparse.Namespace) -> EngineArgs:
    """Return the options of the engine.

    Raises:
        ValueError: options contradict each other, or an option of vLLM is not supported.
    """
    given = given_options(args, engine_options()) | given_options(args, vllm_options())
    speculation = read_speculation(args, args.model)
    return EngineArgs(args.model, speculative_config=speculation, verbose=True, **given)


def _names(kind: Any) -> list[str]:
    return [one.name for one in fields(kind)]
